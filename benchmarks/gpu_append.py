"""KV append and merging beside torch's copy and FlashInfer: bandwidth on the same bytes, in one run, interleaved.

Run: ``python benchmarks/gpu_append.py --out DIR`` on a machine with a Hopper GPU, torch and triton; where
flashinfer-python is installed it is measured too, where it takes the case. A row's ``of_copy`` is our bandwidth over
that of ``Tensor.copy_`` which moves as many bytes; bytes are those read and written. Times are medians of triton's
do_bench, which clears the L2 cache before each call, and the median of the rounds is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from decode.timing import SmClock, median_us
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_append_kv, plan_merge_states

REP_MS, ROUNDS = 40, 3
TOKENS = (64, 1024, 4096, 16384, 65536)
BAR, BAR_FROM = 0.85, 16384  # of the copy's bandwidth, from so many tokens on
Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class AppendBench:
    """One append: new tokens of ``batch`` requests of equal length, behind as many keys, pages at random."""

    name: str
    tokens: int
    kv_heads: int = 8
    dims: tuple[int, int] = (128, 128)
    page: int = 64
    layout: str = "NHD"
    cache: str = "bfloat16"
    batch: int = 8


def append_cases(sizes: Iterable[int]) -> Iterator[AppendBench]:
    for tokens in sizes:
        batch = min(tokens, 64 if tokens == TOKENS[0] else 8)
        yield AppendBench("D 128", tokens, batch=batch)
        yield AppendBench("D 128, HND", tokens, layout="HND", batch=batch)
        yield AppendBench("D 128, pages of 16", tokens, page=16, batch=batch)
        yield AppendBench("D 128, pages of 1", tokens, page=1, batch=batch)
        yield AppendBench("D 64", tokens, dims=(64, 64), batch=batch)
        yield AppendBench("D 256, 4 heads", tokens, kv_heads=4, dims=(256, 256), batch=batch)
        yield AppendBench("192/128, 16 heads", tokens, kv_heads=16, dims=(192, 128), batch=batch)
        yield AppendBench("MLA 512 + 64", tokens, kv_heads=1, dims=(512, 64), batch=batch)
        yield AppendBench("D 128 to e4m3", tokens, cache="float8_e4m3fn", batch=batch)


class AppendProblem:
    """The tensors of a case and what is timed on them."""

    def __init__(self, case: AppendBench, runtime: Runtime) -> None:
        heads, page, (dk, dv) = case.kv_heads, case.page, case.dims
        dtype, device = getattr(torch, case.cache), "cuda"
        new = case.tokens // case.batch
        columns = -(-2 * new // page)
        pages = case.batch * columns
        self.case = case
        self.key, self.value = (
            torch.randn(case.tokens, heads, dim, device=device, dtype=torch.bfloat16) for dim in (dk, dv)
        )
        if heads == 1:  # the columns of one latent cache
            whole = torch.zeros(pages, page, 1, dk + dv, device=device, dtype=dtype)
            self.k_cache, self.v_cache = whole[..., :dk], whole[..., dk:]
        else:
            middle = (page, heads) if case.layout == "NHD" else (heads, page)
            self.k_cache, self.v_cache = (torch.zeros(pages, *middle, d, device=device, dtype=dtype) for d in (dk, dv))
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(case.batch, columns)
        self.lens = torch.full((case.batch,), 2 * new, device=device, dtype=torch.int32)
        self.offsets = torch.arange(case.batch + 1, device=device, dtype=torch.int32) * new
        self.requests = torch.arange(case.batch, device=device).repeat_interleave(new)
        self.positions = torch.arange(new, 2 * new, device=device).repeat(case.batch)
        self.given = {
            "k": self.key,
            "v": self.value,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "page_table": self.table,
            "seq_lens": self.lens,
            "q_cu_seq_lens": self.offsets,
        }
        self.plan = plan_append_kv(**self.given, kv_layout=case.layout, runtime=runtime)

    @property
    def bytes_moved(self) -> int:
        elements = self.key.numel() + self.value.numel()
        return elements * (2 + self.k_cache.element_size())

    def wrong(self) -> int:
        """Elements of the caches that are not as torch puts them there, after an append of ours."""
        self.plan.run(**self.given)
        column, slot = self.positions // self.case.page, self.positions % self.case.page
        page = self.table[self.requests, column].long()
        found = 0
        for source, cache in ((self.key, self.k_cache), (self.value, self.v_cache)):
            by_token = cache if self.case.layout == "NHD" else cache.transpose(1, 2)
            stored = by_token[page, slot]
            found += int((stored.view(torch.uint8) != source.to(cache.dtype).view(torch.uint8)).sum())
        return found

    def calls(self) -> Calls:
        moved = self.bytes_moved // 4
        source = torch.empty(moved, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda: self.plan.run(**self.given),
            "copy": lambda: target.copy_(source),
        }
        peer = self.peer()
        return {**calls, **({"flashinfer": peer} if peer else {})}

    def peer(self) -> Callable[[], Any] | None:
        """FlashInfer's append of the same tokens, where it has one."""
        try:
            import flashinfer
        except ImportError:
            return None
        case = self.case
        if case.cache != "bfloat16" or (case.dims[0] != case.dims[1] and case.kv_heads != 1):
            return None
        requests, positions = self.requests.to(torch.int32), self.positions.to(torch.int32)
        indices = self.table.flatten()
        indptr = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * self.table.shape[1]
        last = torch.full((case.batch,), (int(self.lens[0]) - 1) % case.page + 1, device="cuda", dtype=torch.int32)
        table = (indices, indptr, last)
        if case.kv_heads == 1:
            caches = (self.k_cache.squeeze(2), self.v_cache.squeeze(2))
            new = (self.key.squeeze(1), self.value.squeeze(1))
            return lambda: flashinfer.append_paged_mla_kv_cache(*new, requests, positions, *caches, *table)
        pair = (self.k_cache, self.v_cache)
        return lambda: flashinfer.append_paged_kv_cache(
            self.key, self.value, requests, positions, pair, *table, kv_layout=case.layout
        )


@dataclass(frozen=True)
class MergeBench:
    """A merge of ``parts`` states."""

    name: str
    tokens: int
    parts: int
    heads: int = 32
    dim: int = 128


class MergeProblem:
    """The tensors of a merge and what is timed on them."""

    def __init__(self, case: MergeBench, runtime: Runtime) -> None:
        self.case = case
        self.v = torch.randn(case.tokens, case.parts, case.heads, case.dim, device="cuda", dtype=torch.bfloat16)
        self.s = torch.randn(case.tokens, case.parts, case.heads, device="cuda")
        self.out = torch.empty(case.tokens, case.heads, case.dim, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.empty(case.tokens, case.heads, device="cuda")
        self.given = {"parts": self.v, "part_lses": self.s, "out": self.out, "lse": self.lse}
        self.plan = plan_merge_states(**self.given, runtime=runtime)

    @property
    def bytes_moved(self) -> int:
        return 2 * (self.v.numel() + self.out.numel()) + 4 * (self.s.numel() + self.lse.numel())

    def wrong(self) -> int:
        self.plan.run(**self.given)
        weights = torch.softmax(self.s * 0.6931471805599453, 1)
        want = (weights[..., None] * self.v).sum(1)
        return int(((self.out - want).abs() > 0.02).sum())

    def calls(self) -> Calls:
        source = torch.empty(self.bytes_moved // 4, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda: self.plan.run(**self.given),
            "copy": lambda: target.copy_(source),
        }
        try:
            import flashinfer
        except ImportError:
            return calls
        return {**calls, "flashinfer": lambda: flashinfer.merge_states(self.v, self.s)}


def measure(problem: AppendProblem | MergeProblem, rounds: int, rep: float) -> dict[str, Any]:
    """A row: microseconds and GB/s of each call, interleaved, and ours as a part of the copy's."""
    calls = problem.calls()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(median_us(call, rep))
    moved = problem.bytes_moved
    row: dict[str, Any] = {**asdict(problem.case), "bytes": moved, "wrong": problem.wrong()}
    row |= origin_of(problem.plan)
    for name, found in times.items():
        us = statistics.median(found)
        row[name] = {"us": round(us, 2), "gb_per_s": round(moved / us / 1e3, 1), "rounds": [round(x, 2) for x in found]}
    row["of_copy"] = round(row["copy"]["us"] / row["ours"]["us"], 3)
    if "flashinfer" in row:
        row["of_flashinfer"] = round(row["flashinfer"]["us"] / row["ours"]["us"], 3)
    return row


def main() -> int:
    """Measure all cases and write ``append.json``; 1 if a result is wrong or a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rep", type=float, default=REP_MS, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of a row (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="sizes of appends and merges")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    chosen.out.mkdir(parents=True, exist_ok=True)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    result: dict[str, Any] = {"schema": 1, "question": "KV append and merging beside a copy"}
    result |= {"environment": gpu_environment(), "append": [], "merge": []}
    with SmClock() as clock:
        for case in append_cases(chosen.tokens):
            result["append"].append(row := measure(AppendProblem(case, runtime), chosen.rounds, chosen.rep))
            keep(result, chosen.out / "append.json")
            print(json.dumps(row), flush=True)
        for tokens in (size for size in chosen.tokens if size != TOKENS[0]):
            for parts in (2, 4):
                merge = MergeBench(f"{parts} parts", tokens, parts)
                result["merge"].append(row := measure(MergeProblem(merge, runtime), chosen.rounds, chosen.rep))
                keep(result, chosen.out / "append.json")
                print(json.dumps(row), flush=True)
        result["sm_clock_mhz"] = clock.summary()
    missed = [row for row in result["append"] if row["tokens"] >= BAR_FROM and row["of_copy"] < BAR]
    result["missed"] = [f"{row['name']}, {row['tokens']} tokens: {row['of_copy']}" for row in missed]
    keep(result, chosen.out / "append.json")
    wrong = [row["name"] for row in (*result["append"], *result["merge"]) if row["wrong"]]
    print(f"wrong: {wrong or 'none'}; below {BAR} of the copy: {result['missed'] or 'none'}")
    return int(bool(wrong or missed))


if __name__ == "__main__":
    raise SystemExit(main())
