"""A decode whose keys are divided over ranks, with float64 in the place of the kernels."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np

from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.distributed import ContextParallelMerge, HeadGather, KvPartition
from tests.attention.append_reference import merge_states_reference

PAGE = 16


@dataclass(frozen=True)
class DividedCase:
    """``lens``: keys of each request on all ranks. ``mla``: one KV head, the first ``head_dim`` columns are values."""

    name: str
    lens: tuple[int, ...]
    heads: int = 12
    kv_heads: int = 2
    head_dim: int = 16
    mla: bool = False
    exchange: str = "all_to_all"
    interleave: int = 1
    blocked: bool = False
    sinks: bool = False
    lse_base: str = "2"
    dtype: str = "float32"
    reduce_dtype: str | None = None

    @property
    def key_dim(self) -> int:
        return self.head_dim + 8 if self.mla else self.head_dim

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.key_dim)

    def partition(self, world: int, rank: int) -> KvPartition:
        if self.blocked:
            return KvPartition.blocked(world, rank, max(self.lens))
        return KvPartition(world, rank, self.interleave)


@dataclass(frozen=True)
class Problem:
    """Queries ``[tokens, heads, key_dim]``, keys and values of each request ``[keys, kv_heads, dim]``, sinks."""

    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    sinks: np.ndarray | None


def problem_of(case: DividedCase) -> Problem:
    rng = np.random.default_rng(len(case.name))
    kv_heads = 1 if case.mla else case.kv_heads
    keys = [rng.normal(size=(length, kv_heads, case.key_dim)) for length in case.lens]
    values = [k[..., : case.head_dim] if case.mla else rng.normal(size=k.shape) for k in keys]
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    return Problem(rng.normal(size=(len(case.lens), case.heads, case.key_dim)), keys, values, sinks)


def paged(parts: list[np.ndarray], dim: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """A pool with the rows of each request in pages of its own, NaN behind them, and the page table."""
    columns = max(1, max(-(-len(part) // PAGE) for part in parts))
    pool = np.full((len(parts) * columns, PAGE, kv_heads, dim), np.nan)
    for request, part in enumerate(parts):
        pool[request * columns : (request + 1) * columns].reshape(-1, kv_heads, dim)[: len(part)] = part
    return pool, np.arange(len(parts) * columns).reshape(len(parts), columns)


def attend(case: DividedCase, problem: Problem, own: list[np.ndarray], sinks: np.ndarray | None) -> Any:
    """Output and base-2 log-sum-exp of the queries on the keys ``own`` of each request."""
    kv_heads = 1 if case.mla else case.kv_heads
    keys, table = paged([k[i] for k, i in zip(problem.keys, own, strict=True)], case.key_dim, kv_heads)
    values, _ = paged([v[i] for v, i in zip(problem.values, own, strict=True)], case.head_dim, kv_heads)
    lens = [len(i) for i in own]
    return paged_decode_reference(problem.q, keys, values, table, lens, case.scale, sinks=sinks)


def merge_on_host(v: Any, s: Any, *, other: Any = None, other_lse: Any = None, **rest: Any) -> None:
    """As ``merge_states``, in float64 on host tensors."""
    parts, exponents = v.double().numpy(), s.double().numpy()
    if other is not None:
        parts = np.concatenate([parts, other.double().numpy()[:, None]], axis=1)
        exponents = np.concatenate([exponents, other_lse.double().numpy()[:, None]], axis=1)
    sinks = None if rest.get("sinks") is None else rest["sinks"].numpy()
    out, lse = merge_states_reference(parts, exponents, sinks=sinks, lse_base=rest["lse_base"])
    copy(rest["out"], out)
    if rest["lse"] is not None:
        copy(rest["lse"], lse)


def copy(to: Any, array: np.ndarray) -> None:
    import torch

    to.copy_(torch.from_numpy(array))


def largest_error(came: Any, expected: np.ndarray) -> float:
    """Infinities have to be the same ones; NaN differs from everything."""
    values = came.double().numpy()
    if not np.array_equal(np.isinf(values), np.isinf(expected)):
        return math.inf
    finite = np.isfinite(expected)
    error = np.abs(values[finite] - expected[finite]).max(initial=0.0)
    return math.inf if math.isnan(error) else float(error)


def run_case(rank: int, world: int, case: DividedCase) -> dict[str, float]:
    """The largest errors of a rank's output and log-sum-exp, and its own keys."""
    import torch

    problem, partition = problem_of(case), case.partition(world, rank)
    lens = torch.tensor(case.lens, dtype=torch.int32)
    own_lens = partition.own_lens(lens)
    positions = [partition.own_positions(torch.arange(length)).numpy() for length in case.lens]
    own = [np.flatnonzero(index >= 0) for index in positions]
    assert [len(i) for i in own] == own_lens.tolist()
    for index in positions:
        assert np.array_equal(index[index >= 0], np.arange((index >= 0).sum()))
    tokens = len(case.lens)
    step = ContextParallelMerge(
        None,
        tokens=tokens,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=getattr(torch, case.dtype),
        device="cpu",
        exchange=case.exchange,
        lse_base=case.lse_base,
        reduce_dtype=None if case.reduce_dtype is None else getattr(torch, case.reduce_dtype),
        merge=merge_on_host,
    )
    unit = math.log(2) if case.lse_base == "e" else 1.0
    partial, partial_lse = attend(case, problem, own, None)
    step.out.fill_(math.nan)
    copy(step.out, partial)
    copy(step.lse, partial_lse * unit)
    out = torch.empty(tokens, step.own_heads, case.head_dim, dtype=getattr(torch, case.dtype))
    lse = torch.empty(tokens, step.own_heads)
    step.merge(out, lse, sinks=None if problem.sinks is None else torch.from_numpy(problem.sinks))
    whole = [np.arange(length) for length in case.lens]
    expected, expected_lse = attend(case, problem, whole, problem.sinks)
    heads = slice(rank * step.own_heads, (rank + 1) * step.own_heads)
    return {
        "out": largest_error(out, expected[:, heads]),
        "lse": largest_error(lse, expected_lse[:, heads] * unit),
        "keys": int(own_lens.sum()),
    }


def gathered_heads(rank: int, world: int) -> list[int]:
    """The heads that a rank receives, each of whose queries are the head's number; twice, into one buffer."""
    import torch

    gather = HeadGather(None, tokens=3, own_heads=2, head_dim=8, dtype=torch.bfloat16, device="cpu")
    for more in (100, 0):
        own = torch.arange(rank * 2, rank * 2 + 2) + more
        q = gather(own[None, :, None].expand(3, 2, 8).to(torch.bfloat16))
    assert tuple(q.shape) == (3, 2 * world, 8)
    assert torch.equal(q, q[:1, :, :1].expand_as(q))
    heads: list[int] = q[0, :, 0].long().tolist()
    return heads


def run_cases(rank: int, world: int, cases: list[DividedCase]) -> dict[str, Any]:
    return {"heads": gathered_heads(rank, world), **{case.name: run_case(rank, world, case) for case in cases}}


def left_of_a_merge(rank: int, exchange: str) -> bool:
    """Whether anything of a merge that was dropped is there while the collector is off."""
    import torch

    gc.collect()
    gc.disable()
    shape = {"tokens": 2, "heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    merge = ContextParallelMerge(None, **shape, exchange=exchange, merge=merge_on_host)
    out, steps = torch.empty(2, 4, 16), None
    merge.out.fill_(1)
    merge.lse.fill_(1)
    for _ in range(3):
        merge.merge(out)
        steps = merge.steps(out)
    gone = [ref(merge._buffers), ref(merge.out.untyped_storage()), ref(out)]
    del merge, out, steps
    # gloo's own thread lets go of a finished exchange shortly after the wait for it has returned.
    deadline = time.monotonic() + 5
    while (is_left := any(reference() is not None for reference in gone)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_left
