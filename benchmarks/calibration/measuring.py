"""Launches on the GPU: a sequence of layers in one CUDA graph, each layer with a cache of its own."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cubin_runtime.attention import Runtime, plan_mla_decode, plan_paged_decode
from cubin_runtime.attention.operators import mla_decode as mla_operator
from cubin_runtime.kernels.native.decode import select as decode_select

from .rows import MLA_ROPE, Row

LAYERS, PASSES = 4, 2
PAGE = 64
TIMED_REPLAYS = 3
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}

Run = Callable[[int], None]


class Layers:
    """The tensors of a row: queries and output of all layers, and a cache for each. The memory of caches is shared."""

    memory: torch.Tensor | None = None

    def __init__(self, row: Row, bound: int) -> None:
        self.row = row
        pages_of = [-(-keys // PAGE) for keys in row.lengths]
        pages = sum(pages_of)
        width = row.head_dim + (0 if row.kv_heads else MLA_ROPE)
        shape = (pages, PAGE, 2, row.kv_heads, width) if row.kv_heads else (pages, PAGE, width)
        self.caches = [part.reshape(shape) for part in self._values(row.dtype, LAYERS, shape)]
        q_shape = (row.batch, row.q_len, row.heads, width) if row.q_len > 1 else (row.batch, row.heads, width)
        self.q = torch.randn(q_shape, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(*q_shape[:-1], row.head_dim, device="cuda", dtype=torch.bfloat16)
        self.lengths = torch.tensor(row.lengths, device="cuda", dtype=torch.int32)
        order, begin = torch.randperm(pages, device="cuda", dtype=torch.int32), 0
        self.table = torch.zeros(row.batch, -(-bound // PAGE), device="cuda", dtype=torch.int32)
        for request, count in enumerate(pages_of):
            self.table[request, :count] = order[begin : begin + count]
            begin += count

    @classmethod
    def _values(cls, dtype: str, count: int, shape: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """``count`` stretches of random numbers of ``dtype``, which have as many elements as ``shape``."""
        elements = int(torch.Size(shape).numel())
        needed = count * elements
        if cls.memory is None or cls.memory.numel() < needed or cls.memory.dtype != DTYPES[dtype]:
            cls.memory = None
            block = torch.randn(1 << 24, device="cuda", dtype=torch.bfloat16).to(DTYPES[dtype])
            cls.memory = block.repeat(-(-needed // len(block)))
        return cls.memory[:needed].split(elements)

    def plan(self, bound: int, runtime: Runtime) -> Any:
        """A plan of the row for a bound."""
        lengths = (self.table, self.lengths, self.out)
        if self.row.kv_heads:
            k, v = self._keys_and_values(0)
            return plan_paged_decode(self.q, k, v, *lengths, max_seq_len=bound, runtime=runtime)
        scale = 192**-0.5
        return plan_mla_decode(
            self.q, self.caches[0], *lengths, max_seq_len=bound, softmax_scale=scale, runtime=runtime
        )

    def run(self, plan: Any, stream: torch.cuda.Stream) -> Run:
        """The call of a layer."""
        workspace = plan.prepare(stream, graphs=1)
        rest = (self.table, self.lengths, self.out)
        if self.row.kv_heads:
            caches = [self._keys_and_values(layer) for layer in range(LAYERS)]
        else:
            caches = [(cache,) for cache in self.caches]
        return lambda layer: plan.run(self.q, *caches[layer], *rest, workspace=workspace, stream=stream)

    def _keys_and_values(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.caches[layer][:, :, 0], self.caches[layer][:, :, 1]


@contextmanager
def forced(selection: Any) -> Iterator[None]:
    """Plans made inside take this launch."""
    decode, mla = decode_select.select_decode, mla_operator.select_mla_decode
    decode_select.select_decode = lambda *_: (selection,)
    mla_operator.select_mla_decode = lambda *_: selection
    try:
        yield
    finally:
        decode_select.select_decode, mla_operator.select_mla_decode = decode, mla


def captured(run: Run, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """All layers, several times, as a graph. ``torch.cuda.graph`` would collect garbage each time."""
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(PASSES):
            for layer in range(LAYERS):
                run(layer)
        graph.capture_end()
    return graph


def medians_us(graphs: Sequence[torch.cuda.CUDAGraph], stream: torch.cuda.Stream, rounds: int) -> list[float]:
    """The time of one layer in each graph: the median over rounds, in which the graphs take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, of_graph in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                graph.replay()
                begin.record(stream)
                for _ in range(TIMED_REPLAYS):
                    graph.replay()
                end.record(stream)
                stream.synchronize()
            of_graph.append(begin.elapsed_time(end) * 1e3 / (TIMED_REPLAYS * PASSES * LAYERS))
    return [round(statistics.median(each), 2) for each in times]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Plans refer to themselves; one that is freed while a stream captures ends the capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
