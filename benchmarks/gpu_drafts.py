"""Verifying 1 to 64 draft tokens per request: paged decode with a tree's mask, beside context attention without one.

Run: ``python benchmarks/gpu_drafts.py --out DIR`` on a machine with a Hopper GPU, torch and triton. A time is the
median over rounds of triton's do_bench median, which clears L2 before each call; in a round all rows take turns.
Rows named ``context`` are causal context attention over the same pages and query tokens, ``batch N`` and ``head_dim N``
those of others than 64 requests and 128 columns. ``kernel`` is the kernel of a decode and its predicted time.
``mask_rows`` are the times of packing the masks on the device, each of a launch among 20 in a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of, origin_of_calls
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import (
    Runtime,
    context_attention,
    draft_mask,
    paged_decode,
    plan_draft_mask,
    plan_paged_decode,
)

PAGE = 64
BATCH, KEYS, KV_HEADS, HEAD_DIM = 64, 16384, 8, 128
TOKENS = (1, 4, 8, 16, 24, 32, 48, 64)
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, nargs="*", default=[32, 64], help="query heads over 8 KV heads (32 64)")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="query tokens per request")
    parser.add_argument("--batches", type=int, nargs="*", default=[BATCH], help=f"requests ({BATCH})")
    parser.add_argument("--head-dims", type=int, nargs="*", default=[HEAD_DIM], help=f"columns of a head ({HEAD_DIM})")
    parser.add_argument("--rep", type=float, default=40, help="ms of device time for one median (%(default)s)")
    return parser.parse_args()


def integers(values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def tree_masks(runtime: Runtime, batch: int, q_len: int) -> torch.Tensor:
    """Random trees, packed."""
    generator = torch.Generator().manual_seed(q_len)
    columns = [torch.randint(-1, max(token, 0), (batch,), generator=generator) for token in range(q_len)]
    parents = torch.stack(columns, 1).int().cuda()
    return draft_mask(parents=parents, runtime=runtime)


def rows_of(
    runtime: Runtime, batch: int, heads: int, head_dim: int, tokens: Sequence[int]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Every row's call by its name, and what a decode's plan chose."""
    columns = KEYS // PAGE
    cache = [torch.randn(batch * columns, PAGE, KV_HEADS, head_dim, device="cuda").bfloat16() for _ in range(2)]
    caches = {"bf16": cache, "e4m3": [part.to(torch.float8_e4m3fn) for part in cache]}
    table = torch.randperm(batch * columns, device="cuda").int().reshape(batch, columns)
    lengths = integers([KEYS] * batch)
    calls: dict[str, Callable[[], Any]] = {}
    kernels: dict[str, str] = {}
    of_sizes = ("" if head_dim == HEAD_DIM else f"head_dim {head_dim} ") + ("" if batch == BATCH else f"batch {batch} ")
    for q_len in tokens:
        q = torch.randn(batch, q_len, heads, head_dim, device="cuda").bfloat16()
        out = torch.empty_like(q)
        common = {"max_seq_len": KEYS, "runtime": runtime, "out": out}
        mask = tree_masks(runtime, batch, q_len)
        for dtype, (k, v) in caches.items():
            for invariant in (False, True) if dtype == "bf16" else (False,):
                name = f"{of_sizes}{dtype} {heads}/8 heads q_len {q_len}{' invariant' if invariant else ''}"
                options = {"mask": mask, "batch_invariant": invariant, **common}
                calls[name] = partial(paged_decode, q, k, v, table, lengths, **options)
                (selection,) = plan_paged_decode(q, k, v, table, lengths, **options).selections
                kernels[name] = f"{selection.kernel.symbol}, {selection.microseconds:.1f} us predicted"
        flat = {**common, "out": out.flatten(0, 1), "max_q_len": q_len}
        starts = integers([q_len * i for i in range(batch + 1)])
        pages = {"page_table": table, "seq_lens": lengths, "q_cu_seq_lens": starts}
        calls[f"{of_sizes}context {heads}/8 heads q_len {q_len}"] = partial(
            context_attention, q.flatten(0, 1), *cache, **pages, **flat
        )
    return calls, kernels


def packing(runtime: Runtime, batch: int, q_len: int, **tree: torch.Tensor) -> dict[str, Any]:
    """A launch that packs the masks of a batch: ``us``, the median of graphs of 20, and what was launched."""
    out = torch.empty(batch, q_len, 2 * -(-q_len // 32), device="cuda", dtype=torch.uint16)
    plan, stream, graph = plan_draft_mask(out, runtime=runtime, **tree), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    plan.preload()
    plan.prepare(stream, graphs=1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(20):
            plan.run(out, stream=stream, **tree)
    return {"us": do_bench(graph.replay, warmup=5, rep=20, return_mode="median") * 1e3 / 20, **origin_of(plan)}


def mask_rows(runtime: Runtime) -> list[dict[str, Any]]:
    """The time of packing chains, booleans and causal masks."""
    rows = []
    for batch, q_len in ((1, 64), (64, 16), (64, 64), (512, 64)):
        parents = torch.arange(-1, q_len - 1, device="cuda", dtype=torch.int32).repeat(batch, 1)
        allowed = torch.ones(batch, q_len, q_len, device="cuda").tril().bool()
        for name, tree in (("parents", {"parents": parents}), ("allowed", {"allowed": allowed}), ("causal", {})):
            row = {"case": f"{name}, {batch} x {q_len}", **packing(runtime, batch, q_len, **tree)}
            rows.append(row)
            print(f"{row['case']}: {row['us']:.2f} us", flush=True)
    return rows


def main() -> int:
    """Measure all rows and write ``drafts.json``."""
    chosen = options()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    result: dict[str, Any] = {"schema": 1, "question": "what more draft tokens per request cost"}
    result |= {"release": runtime.native_release().pin.manifest_sha256, "environment": gpu_environment()}
    result |= {"batch": BATCH, "keys": KEYS, "rounds": chosen.rounds, "mask_rows": mask_rows(runtime), "rows": []}
    for head_dim, batch, heads in product(chosen.head_dims, chosen.batches, chosen.heads):
        calls, kernels = rows_of(runtime, batch, heads, head_dim, chosen.tokens)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(chosen.rounds):
            for name, call in calls.items():
                times[name].append(do_bench(call, warmup=5, rep=chosen.rep, return_mode="median") * 1e3)
        for name, found in times.items():
            us, q_len = statistics.median(found), int(name.split("q_len ")[1].split()[0])
            flops = 4 * batch * KEYS * heads * head_dim * q_len
            kernel = {"kernel": kernels[name]} if name in kernels else {}
            kernel |= origin_of_calls(runtime.driver, calls[name])
            result["rows"].append({"case": name, "us": us, "tflop_per_s": flops / us / 1e6, **kernel})
            print(f"{name}: {us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s", kernel.get("kernel", ""), flush=True)
        keep(result, chosen.out / "drafts.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
