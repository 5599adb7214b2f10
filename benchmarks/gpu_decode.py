"""Paged decode beside FlashInfer's XQA and fa2 on the same tensors: medians, bandwidth of KV read, ratios, host cost.

Run: ``python benchmarks/gpu_decode.py --out DIR`` on a machine with a GPU, torch and triton; where flashinfer-python
is installed it is measured in the same run. Ratio = best of the peer's / ours, so above 1 is faster than the peer.
Times are medians of triton's do_bench, which clears the L2 cache before each call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_environment import gpu_environment
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, plan_paged_decode

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 128, 64
CASES = ((1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 8192), (128, 2048))
HOST_CALLS, HOST_ROUNDS = 50, 9
BUILT = Path(__file__).resolve().parents[1] / "build" / "artifacts"


def median_us(call: Callable[[], Any]) -> float:
    """Device time of one call, L2 cleared before each."""
    return 1e3 * do_bench(call, warmup=25, rep=200, return_mode="median")


def host_us(call: Callable[[], Any]) -> float:
    """Median over rounds of the host time of one call, with the device never the limit for long."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


class Problem:
    """Random tensors of one case; the KV cache is one tensor ``[pages, 2, page, heads, dim]``, pages permuted."""

    def __init__(self, batch: int, length: int) -> None:
        columns = length // PAGE
        pages = batch * columns
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.batch, self.length = batch, length
        self.kv = torch.randn(pages, 2, PAGE, KV_HEADS, HEAD_DIM, **options)
        self.q = torch.randn(batch, Q_HEADS, HEAD_DIM, **options)
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, columns)
        self.lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        self.scale = 1 / math.sqrt(HEAD_DIM)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        return self.kv.numel() * self.kv.element_size()


def ours(problem: Problem, runtime: Runtime) -> Callable[[], None]:
    """Our call, planned and with its workspace."""
    p = problem
    tensors = (p.q, p.kv[:, 0], p.kv[:, 1], p.table, p.lens, p.out)
    plan = plan_paged_decode(*tensors, max_seq_len=p.length, runtime=runtime)
    stream = torch.cuda.current_stream().cuda_stream
    workspace = plan.prepare(stream)
    return lambda: plan.run(*tensors, workspace=workspace, stream=stream)


def peers(problem: Problem) -> dict[str, Callable[[], Any]]:
    """The peer's calls, each writing an output of its own; empty without flashinfer."""
    try:
        import flashinfer
    except ImportError:
        return {}
    p = problem
    scratch = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(p.q)

    def xqa() -> torch.Tensor:
        return flashinfer.decode.xqa_batch_decode_with_kv_cache(
            p.q, p.kv, scratch, p.table, p.lens, p.length, p.scale, 1.0, out=out
        )

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True, backend="fa2"
    )
    columns = p.length // PAGE
    wrapper.plan(
        torch.arange(0, p.batch + 1, device="cuda", dtype=torch.int32) * columns,
        p.table.flatten(),
        torch.full((p.batch,), PAGE, device="cuda", dtype=torch.int32),
        Q_HEADS,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return {"xqa": xqa, "fa2": lambda: wrapper.run(p.q, p.kv)}


def measure(batch: int, length: int, runtime: Runtime) -> dict[str, Any]:
    """One row of the result."""
    problem = Problem(batch, length)
    call = ours(problem, runtime)
    call()
    row: dict[str, Any] = {"batch": batch, "length": length, "kv_bytes": problem.kv_bytes}
    times = {}
    for name, peer in peers(problem).items():
        theirs = peer()
        difference = (theirs.float() - problem.out.float()).norm() / theirs.float().norm()
        row[f"{name}_difference"] = float(difference)
        times[name] = row[f"{name}_us"] = median_us(peer)
        row[f"{name}_host_us"] = host_us(peer)
    row["ours_us"] = median_us(call)
    row["ours_host_us"] = host_us(call)
    row["ours_tb_per_s"] = problem.kv_bytes / row["ours_us"] / 1e6
    if times:
        row["ratio_to_xqa"] = times["xqa"] / row["ours_us"]
        row["ratio_to_best"] = min(times.values()) / row["ours_us"]
    return row


def main() -> None:
    """Measure all cases and write ``decode.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    sources = tuple(os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT)).split())
    runtime = Runtime(Config(store=store, sources=sources, offline=True))
    rows = []
    for batch, length in CASES:
        rows.append(measure(batch, length, runtime))
        row = rows[-1]
        print(
            f"{batch:4d} x {length:6d}  ours {row['ours_us']:7.1f} us {row['ours_tb_per_s']:5.2f} TB/s"
            + "".join(f"  {name} {row[f'{name}_us']:7.1f}" for name in ("xqa", "fa2") if f"{name}_us" in row)
            + f"  host {row['ours_host_us']:5.1f} us"
            + (f"  ratio to XQA {row['ratio_to_xqa']:.3f}" if "ratio_to_xqa" in row else ""),
            flush=True,
        )
    sizes = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE, "dtype": "bf16"}
    chosen.out.mkdir(parents=True, exist_ok=True)
    result = {"schema": 1, "question": "paged decode beside the peers", "environment": gpu_environment()}
    (chosen.out / "decode.json").write_text(json.dumps(result | {"sizes": sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
