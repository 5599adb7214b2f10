"""Decodes on the host in a device's place: the stand-in driver, and launches computed from their parameter struct.

So the GPU tests themselves run without a GPU: what they pass, poison, capture and compare is right before a device is
at hand. Slow, in float64, row by row as the struct's fields say; it shares only the visibility rule with the tests.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cubin_runtime import Config
from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import Runtime, operator_plan
from cubin_runtime.attention.fast_path import path
from cubin_runtime.attention.runtime import NativeRelease, PlanRuntime
from cubin_runtime.kernels.native.constants import ATTENTION_TYPES
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.tensormap import TensorMapSpec
from cubin_runtime.testing import GraphDriver
from kernels_src.variants import VARIANTS, Variant
from tests.gpu.decode_masks import keys_before_windows, visible_keys
from tests.gpu.decode_values import KINDS, bits_of, values_of
from tests.kernels.variant_kernels import kernel_of

TYPES = {code: name for name, code in ATTENTION_TYPES.items()}
STRUCTS = {False: "PagedDecodeCopyParams", True: "PagedDecodeCopyE4m3Params"}  # by whether caches are e4m3
ARITHMETIC = "rehearsed arithmetic"
# Whether results show which kernel's arithmetic they are of, and without fixed splits the batch, as a device's do.
show_arithmetic = False


def arithmetic_of(variant: Variant) -> int:
    """Kernels with the same number give a row the same bits: warps, warpgroups that share tiles or do not, segments."""
    if variant.defines.get("SEGMENTS"):
        return 3
    if not variant.defines["WARPGROUP_MMA"]:
        return 0
    return 1 if int(variant.traits["rows"]) <= 64 else 2


KERNELS = tuple(
    # Caches come as pointers and strides.
    kernel_of(v, STRUCTS[v.traits["dtype"] == "e4m3"], traits={**v.traits, "tma": False, ARITHMETIC: arithmetic_of(v)})
    for v in VARIANTS
    if v.operation == "paged_decode" and v.sm == "90a"
)


class RehearsalPlanRuntime(PlanRuntime):
    """What plans refer to of a runtime whose kernels need no bytes."""

    def load(self, kernel: NativeKernel, context: int, stream: int = 0) -> Any:
        return kernel

    def active_clusters(self, kernel: Any, context: int, config: Any) -> int:
        return 1


class RehearsalRuntime(Runtime):
    """A runtime whose kernels need no bytes."""

    def __init__(self, driver: Driver, store: Path) -> None:
        super().__init__(Config(store=store, sources=(), offline=True), driver=driver)
        self.for_plans = RehearsalPlanRuntime()
        self.for_plans.__dict__ = self.__dict__
        pin: Any = SimpleNamespace(path=ArtifactPath("rehearsal"), name="rehearsal", manifest_sha256="0" * 64)
        self._native = NativeRelease(pin, KERNELS, dict(LAYOUTS), defaultdict(lambda: "0" * 64))

    def digest_of(self, path: ArtifactPath) -> str:
        return "0" * 64


class RehearsedLaunches:
    """In place of ``PreparedLaunches``: launches run at once, or when the graph that captured them does."""

    captured: list[Callable[[], None]]
    resident: frozenset[int] = frozenset()

    def __init__(
        self,
        plans: Sequence[LaunchPlan],
        kernels: Sequence[NativeKernel],
        driver: Driver,
        names: Sequence[str],
        **_: Any,
    ) -> None:
        self.launches, self.driver, self.names = list(zip(plans, kernels, strict=True)), driver, names
        self.runs = 0

    def run(self, stream: int, *values: Any) -> None:
        self.runs += 1
        named = dict(zip(self.names, values, strict=True))
        for plan, kernel in self.launches:
            given = {**plan.values}
            for name, value in plan.inputs.items():
                planned = given[name]
                given[name] = (
                    planned._replace(address=named[value]) if isinstance(planned, TensorMapSpec) else named[value]
                )
            # What does not fit its field is refused here, as by a launch.
            maps = {name: value for name, value in given.items() if isinstance(value, TensorMapSpec)}
            fields = plan.layout.unpack(plan.layout.pack(given | dict.fromkeys(maps, bytes(128)))) | maps
            launch = partial(COMPUTED[kernel.operation], fields, kernel.traits, plan.grid)
            if self.driver.is_capturing(stream):
                type(self).captured.append(launch)
            else:
                launch()


class RehearsedSenders:
    """In place of ``Senders``."""

    written = ()
    accelerated = False

    def __init__(self, launches: RehearsedLaunches, _: frozenset[int]) -> None:
        self.launches = launches

    def send(self, _: object, stream: int, __: object, everything: Callable[[], Sequence[Any]]) -> None:
        self.launches.run(stream, *everything())


@contextmanager
def rehearsal(library: Path, store: Path) -> Iterator[RehearsalRuntime]:
    """A runtime on the stand-in driver at ``library`` whose decodes are computed here."""
    driver, graphs = GraphDriver(library), {}
    instantiate, launched = driver.instantiate, driver.launch_graph
    plain = operator_plan.PreparedLaunches, path.senders_of
    RehearsedLaunches.captured = []

    def keep(graph: int) -> int:
        executable = instantiate(graph)
        key = max(graphs, default=0) + 1  # the stand-in's own handles may repeat
        graphs[key] = (executable, RehearsedLaunches.captured)
        RehearsedLaunches.captured = []
        return key

    def replay(executable: int, stream: int) -> None:
        own, launches = graphs[executable]
        launched(own, stream)
        for launch in launches:
            launch()

    driver.instantiate, driver.launch_graph = keep, replay
    driver.destroy_executable = lambda executable: None
    operator_plan.PreparedLaunches, path.senders_of = RehearsedLaunches, RehearsedSenders
    driver.set_current(driver.primary_context(0))
    try:
        yield RehearsalRuntime(driver, store)
    finally:
        driver.set_current(None)
        operator_plan.PreparedLaunches, path.senders_of = plain


def memory(address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """An array over the stand-in's memory; strides in elements."""
    size = np.dtype(dtype).itemsize
    extent = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    flat = np.frombuffer((ctypes.c_uint8 * (extent * size)).from_address(address), dtype=dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [s * size for s in strides])


def decode(p: Mapping[str, Any], traits: Mapping[str, Any], _: Sequence[int]) -> None:
    """What a kernel does with its parameters, clamping included."""
    kv, q_type, out_type = str(traits["dtype"]), TYPES[p["q_type"]], TYPES[p["out_type"]]
    dim, heads, page = int(traits["head_dim"]), p["kv_heads"] * p["group"], 1 << p["page_size_log2"]

    def of_tokens(name: str, dtype: Any, last: tuple[int, ...]) -> np.ndarray:
        strides = (p[f"{name}_token_stride"], p[f"{name}_head_stride"], 1)[: 2 + len(last)]
        return memory(p[name], dtype, (p["tokens"], heads, *last), strides)

    def of_cache(name: str) -> np.ndarray:
        strides = (p[f"{name}_page_stride"], p[f"{name}_token_stride"], p[f"{name}_head_stride"], 1)
        return memory(p[name], KINDS[kv].bits, (p["num_pages"], page, p["kv_heads"], dim), strides)

    def scale(name: str) -> float:
        return float(memory(p[name], np.float32, (1,), (1,))[0]) if p[name] else 1.0

    status = memory(p["status"], np.uint32, (1,), (1,))
    of_keys, of_values = kv_scales(p, "k_scale"), kv_scales(p, "v_scale")
    q, out = of_tokens("q", KINDS[q_type].bits, (dim,)), of_tokens("out", KINDS[out_type].bits, (dim,))
    lse = of_tokens("lse", np.float32, ()) if p["lse"] else None
    k_cache, v_cache = of_cache("k"), of_cache("v")
    columns = -(-p["max_seq_len"] // page)
    tables = [
        memory(p["page_table"] + 4 * offset, np.int32, (p["batch"], columns), (p["table_stride"], 1))
        for offset in (0, p["v_table_offset"])
    ]
    lengths = memory(p["seq_lens"], np.int32, (p["batch"],), (1,))
    words = mask_of(p)
    sinks = memory(p["sinks"], np.float32, (heads,), (1,)).astype(np.float64) if p["sinks"] else None
    shift = 1e-4 * int(traits[ARITHMETIC]) + (0 if p["splits"] else 1e-5 * (p["batch"] % 64))
    logits = p["softmax_scale_log2"] / math.log2(math.e) * scale("softmax_scale_device")
    for b in range(p["batch"]):
        begin, rows = query_rows(p, b, status)
        if not p["min_rows"] <= rows * p["group"] <= p["max_rows"]:
            continue
        length = int(lengths[b])
        status |= np.uint32(1 * (length > p["max_seq_len"]) | 2 * (length < 0))
        length = min(max(length, 0), p["max_seq_len"])
        own = None if words is None else words[begin : begin + rows]
        seen = visible_keys(length, rows, own, p["window_left"], bool(p["positions_by_index"]))
        first = keys_before_windows(length, rows, own, p["window_left"], bool(p["positions_by_index"]))
        keys = np.arange(first, length)
        pages = np.array([table[b, keys // page] for table in tables])
        status |= np.uint32(4 * bool(((pages < 0) | (pages >= p["num_pages"])).any()))
        k_pages, v_pages = np.clip(pages, 0, p["num_pages"] - 1)
        k, v = (
            values_of(kv, cache[at, keys % page]).astype(np.float64) * by[b, :, None]
            for cache, at, by in ((k_cache, k_pages, of_keys), (v_cache, v_pages, of_values))
        )
        queries = values_of(q_type, np.ascontiguousarray(q[begin : begin + rows])).astype(np.float64)
        for i in range(rows):
            at = np.flatnonzero(seen[i, first:])
            row, row_lse = attend(queries[i], k[at], v[at], logits, sinks)
            out[begin + i] = bits_of(out_type, row * p["output_scale"] * scale("output_scale_device"))
            if lse is not None:
                lse[begin + i] = row_lse + shift * show_arithmetic


# Operation -> what computes its launches; others join by adding theirs.
# By operation: what computes a launch of a parameter struct, of a kernel with traits, and of a grid.
COMPUTED: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Sequence[int]], None]] = {"paged_decode": decode}


def kv_scales(p: Mapping[str, Any], name: str) -> np.ndarray:
    """The factors of keys or of values by request and KV head; kernels over 16-bit caches take none."""
    shape = p["batch"], p["kv_heads"]
    if not p.get(name):
        return np.ones(shape)
    strides = p[f"{name}_request_stride"], p[f"{name}_head_stride"]
    return memory(p[name], np.float32, shape, strides).astype(np.float64)


def mask_of(p: Mapping[str, Any]) -> np.ndarray | None:
    """The mask of all query tokens, a word of 64 bits each."""
    if not p["mask"]:
        return None
    count = -(-p["q_len"] // 32)
    words = np.zeros((p["tokens"], 2), np.uint32)
    words[:, :count] = memory(p["mask"], np.uint32, (p["tokens"], count), (count, 1))
    return words.view(np.uint64)[:, 0]


def query_rows(p: Mapping[str, Any], b: int, status: np.ndarray) -> tuple[int, int]:
    """Where a request's query tokens begin and how many they are."""
    if not p["q_cu_seq_lens"]:
        return b * p["q_len"], p["q_len"]
    begin, end = (int(n) for n in memory(p["q_cu_seq_lens"], np.int32, (p["batch"] + 1,), (1,))[b : b + 2])
    good = 0 <= begin <= end <= p["tokens"] and end - begin <= p["q_len"]
    status |= np.uint32(0 if good else 8)
    begin = min(max(begin, 0), p["tokens"])
    return begin, min(max(end - begin, 0), p["q_len"], p["tokens"] - begin)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """One row of all heads over the keys it sees: output and LSE."""
    group = len(q) // k.shape[1]
    scores = np.einsum("hgd,nhd->hgn", q.reshape(k.shape[1], group, -1), k).reshape(len(q), len(k)) * scale
    top = scores.max(axis=1, initial=-1e30) if sinks is None else np.maximum(scores.max(axis=1, initial=-1e30), sinks)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1) + (0 if sinks is None else np.exp(sinks - top))
    sums = np.einsum("hgn,nhd->hgd", weights.reshape(k.shape[1], group, -1), v).reshape(len(q), v.shape[2])
    out = np.divide(sums, total[:, None], out=np.zeros_like(sums), where=total[:, None] > 0)
    with np.errstate(divide="ignore"):
        return out, np.log2(total) + top * math.log2(math.e)
