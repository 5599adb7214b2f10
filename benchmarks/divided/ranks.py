"""One rank of the measurement: decode, exchange and merge in CUDA graphs, and their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from row_origin import origin_of_calls

from cubin_runtime.attention import Runtime, merge_states, mla_decode, paged_decode
from cubin_runtime.distributed import ContextParallelMerge, KvPartition

from .model import bytes_sent

PAGE = 64
LINK_BYTES = 256 << 20
POOL_BYTES = 12 << 30  # requests share pages beyond this, which is far more than L2 holds
WARM, REPLAYS = 2, 9
# A graph has so many rounds, each on pages of its own: its start counts little, and L2 holds no keys of a round before.
ROUNDS, ROUNDS_FROM_BYTES = 8, 2 << 30
LATENT, ROPE = 512, 64
Call = Callable[[], object]


class Layout(NamedTuple):
    """``kv_heads`` 0: latent attention."""

    name: str
    heads: int
    kv_heads: int
    value_dim: int
    token_bytes: int


GQA = Layout("gqa", 64, 8, 128, 8 * 128 * 2 * 2)
MLA = Layout("mla", 128, 0, LATENT, (LATENT + ROPE) * 2)


class Local:
    """What one rank decodes: ``kv_len`` keys of each of ``batch`` requests, in pages of one pool."""

    def __init__(self, runtime: Runtime, pool: torch.Tensor, layout: Layout, batch: int, kv_len: int) -> None:
        self.runtime, self.layout, self.batch = runtime, layout, batch
        columns = -(-kv_len // PAGE)
        if layout.kv_heads:
            pages = pool.numel() // (2 * PAGE * layout.kv_heads * layout.value_dim)
            shape = (2, pages, PAGE, layout.kv_heads, layout.value_dim)
        else:
            pages = pool.numel() // (PAGE * (LATENT + ROPE))
            shape = (1, pages, PAGE, LATENT + ROPE)
        self.pools = pool[: torch.Size(shape).numel()].view(shape)
        self.table = torch.randint(pages, (batch, columns), device="cuda", dtype=torch.int32)
        self.lens = torch.full((batch,), kv_len, dtype=torch.int32, device="cuda")
        key_dim = layout.value_dim + (0 if layout.kv_heads else ROPE)
        self.q = torch.randn(batch, layout.heads, key_dim, device="cuda").bfloat16()

    def call(self, out: torch.Tensor, lse: torch.Tensor) -> Call:
        """The decode, into these."""
        bound, runtime = self.table.shape[1] * PAGE, self.runtime
        if self.layout.kv_heads:
            k, v = self.pools
            return lambda: paged_decode(
                self.q, k, v, self.table, self.lens, max_seq_len=bound, out=out, lse=lse, runtime=runtime
            )
        rows, more = self.pools[0], {"softmax_scale": 192**-0.5, "runtime": runtime}
        return lambda: mla_decode(self.q, rows, self.table, self.lens, max_seq_len=bound, out=out, lse=lse, **more)

    def alone(self) -> Call:
        """The decode into memory of its own."""
        shape = (self.batch, self.layout.heads)
        out = torch.empty(*shape, self.layout.value_dim, dtype=torch.bfloat16, device="cuda")
        return self.call(out, torch.empty(shape, device="cuda"))


def replay_us(rounds: Sequence[Sequence[Call]]) -> float:
    """Median device time of a round in a graph of them, on the slowest rank; all ranks replay together."""
    stream, calls = torch.cuda.Stream(), [call for calls in rounds for call in calls]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    for _ in range(WARM):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    own = 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in marks)
    return slowest(own) / len(rounds)


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    largest = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def step_of(runtime: Runtime, layout: Layout, batch: int, exchange: str) -> tuple[ContextParallelMerge, torch.Tensor]:
    """The merge of a step, and the output of this rank's heads."""
    step = ContextParallelMerge(
        None,
        tokens=batch,
        heads=layout.heads,
        head_dim=layout.value_dim,
        dtype=torch.bfloat16,
        device="cuda",
        exchange=exchange,
        merge=lambda *given, **named: merge_states(*given, **named, runtime=runtime),
    )
    return step, torch.empty(batch, step.own_heads, layout.value_dim, dtype=torch.bfloat16, device="cuda")


def measure(
    runtime: Runtime, pool: torch.Tensor, layout: Layout, batch: int, kv_len: int, *, exchanges: bool = True
) -> list[dict[str, Any]]:
    """A row for each exchange: a step as a whole, its parts alone, and one GPU with all keys.

    ``exchanges``: the group moves data; otherwise a step is measured without its communication.
    """
    world, rank = dist.get_world_size(), dist.get_rank()

    def decodes_of(keys: int) -> list[Local]:
        count = ROUNDS if batch * keys * layout.token_bytes < ROUNDS_FROM_BYTES else 1
        return [Local(runtime, pool, layout, batch, keys) for _ in range(count)]

    alone = [local.alone() for local in decodes_of(kv_len)]
    whole = replay_us([[call] for call in alone])
    decodes, rows = decodes_of(KvPartition(world, rank, PAGE).own_keys(kv_len)), []
    for exchange in ("all_to_all", "gather_reduce"):
        step, out = step_of(runtime, layout, batch, exchange)
        rounds = [[local.call(step.out, step.lse)] for local in decodes]
        kinds = ("communication", "merge") if exchanges else ("merge",)
        steps = [s for s in step.steps(out) if s.kind in kinds]
        parts = {kind: [s.run for s in steps if s.kind == kind] for kind in kinds}
        row: dict[str, Any] = {"layout": layout.name, "heads": layout.heads, "value_dim": layout.value_dim}
        row |= {"token_bytes": layout.token_bytes, "world": world, "batch": batch, "kv_len": kv_len}
        row |= {"exchange": exchange, "one_gpu_us": whole, "decode_us": replay_us(rounds)}
        row["sent_bytes"] = bytes_sent(row, world)
        row |= {f"{kind}_us": replay_us([calls] * ROUNDS) for kind, calls in parts.items()}
        row["step_us"] = replay_us([[*decode, *(s.run for s in steps)] for decode in rounds])
        row["speedup"] = whole / row["step_us"]
        rows.append(row | origin_of_calls(runtime.driver, alone[0], *rounds[0], *(s.run for s in steps)))
    return rows


def measured_link() -> dict[str, float]:
    """What one rank sends to the others of the group while it receives as much, in an all-to-all of many bytes."""
    world = dist.get_world_size()
    sent, received = (torch.empty(LINK_BYTES * world, dtype=torch.uint8, device="cuda") for _ in range(2))
    us = replay_us([[lambda: dist.all_to_all_single(received, sent)]])
    moved = LINK_BYTES * (world - 1)
    return {"sent_bytes": moved, "us": us, "gb_per_s": moved / us / 1e3}


def largest_error(runtime: Runtime, layout: Layout, exchange: str) -> float:
    """How far a step is from one GPU with all keys, relative to the largest value; the same keys on every rank.

    A step as it is called, and in a CUDA graph that replays with other queries and lengths.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(1)
    batch, kv_len, columns = 4, 4096, 4096 // PAGE
    pool = torch.randn(batch * kv_len * layout.token_bytes // 2, generator=generator, device="cuda").bfloat16()
    whole, part = (Local(runtime, pool, layout, batch, kv_len) for _ in range(2))
    partition = KvPartition(world, rank, PAGE)
    whole.table = torch.arange(batch * columns, dtype=torch.int32, device="cuda").view(batch, columns)
    part.table = whole.table[:, rank::world].contiguous()  # whole pages in turn
    part.lens, part.q = partition.own_lens(whole.lens), whole.q
    expected = torch.empty(batch, layout.heads, layout.value_dim, dtype=torch.bfloat16, device="cuda")
    decode_all = whole.call(expected, torch.empty(batch, layout.heads, device="cuda"))
    step, out = step_of(runtime, layout, batch, exchange)
    decode = part.call(step.out, step.lse)

    def divided() -> None:
        decode()
        step.merge(out)

    def error_of(run: Call, *lens: int) -> float:
        whole.q.copy_(torch.randn(whole.q.shape, generator=generator, device="cuda"))
        whole.lens.copy_(torch.tensor(lens, dtype=torch.int32, device="cuda"))
        part.lens.copy_(partition.own_lens(whole.lens))
        decode_all()
        out.fill_(float("nan"))
        run()
        mine = expected[:, rank * step.own_heads :][:, : step.own_heads]
        return float((out - mine).abs().max() / mine.abs().max())

    errors = [error_of(divided, kv_len, kv_len, kv_len, kv_len)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        divided()
    errors += [error_of(graph.replay, *lens) for lens in ((4096, 3001, 65, 1), (2, 64, 4095, 700))]
    return slowest(max(errors) if all(error == error for error in errors) else float("inf"))
