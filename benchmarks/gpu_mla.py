"""MLA decode beside FlashInfer's fa3 on the same tensors: times, bandwidth, ratios, bars.

Run: ``python benchmarks/gpu_mla.py --out DIR`` on a machine with a Hopper GPU, torch and triton; where
flashinfer-python is installed it is measured in the same run. Ratio = the peer's time / ours, so above 1 is faster.
Times are medians of triton's do_bench, which clears the L2 cache before each call; short cases are also timed as
graph replays that go round several page tables; "read alone" is the time of a kernel of ours that only reads as many
bytes. ``--compile`` only compiles the peer's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from decode.mla_cases import mla_cases
from decode.mla_measuring import MlaBench, MlaProblem, fa3_of
from decode.peers import describe
from decode.problem import Pool
from decode.reading import StreamingReads
from decode.rows import disagreements, line_of, tally
from decode.timing import SmClock, matrix_tflop_per_s, median_us
from gpu_environment import built_sources, gpu_environment

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

POOL_BYTES = 2 << 30
REP_MS = 60


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default="fa3", help="whom to measure beside; empty: nobody")
    parser.add_argument("--rep", type=float, default=REP_MS, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="only compile the peer's kernels, measure nothing")
    return parser.parse_args()


def compile_peer(pool: Pool) -> dict[str, Any]:
    """Compile the peer's kernel by planning with it; a failure is a result."""
    began, error = time.perf_counter(), ""
    try:
        fa3_of(MlaProblem(next(case for case in mla_cases() if case.peer), pool))
    except Exception as failure:
        error = describe(failure)
    return {"seconds": round(time.perf_counter() - began, 1), "error": error}


def measure(chosen: argparse.Namespace, runtime: Runtime, pool: Pool, result: dict[str, Any]) -> None:
    """Fill ``result`` with the ceilings and, as they come, the rows; each row is printed too."""
    with SmClock() as clock:
        matrix = result["matrix_tflop_per_s"] = matrix_tflop_per_s()
        sums = torch.empty(8 * runtime.driver.device(0).multiprocessors, dtype=torch.int32, device="cuda")
        reads = StreamingReads(runtime, sums.data_ptr(), torch.cuda.current_stream().cuda_stream, median_us)
        read = result["read"] = reads.bandwidth(pool.flat("bf16").data_ptr(), POOL_BYTES)
        print(f"read {read['tb_per_s']:.3f} TB/s, matrix product {matrix:.0f} TFLOP/s", flush=True)
        bench = MlaBench(runtime, pool, reads, read["tb_per_s"], matrix, chosen.rep)
        for case in mla_cases(bool(chosen.peers)):
            before = len(clock.samples)
            row = bench.row(case)
            row["sm_mhz"] = clock.summary(before).get("median") or (clock.samples[-1] if clock.samples else None)
            result["rows"].append(row)
            print(line_of(row), flush=True)
        result["sm_clock_mhz"] = clock.summary()


def main() -> int:
    """Measure all cases and write ``mla.json``; 1 if a call of ours failed or an output differs from the peer's."""
    chosen = options()
    torch.manual_seed(0)
    pool = Pool(POOL_BYTES)
    compiled = compile_peer(pool) if chosen.peers else {}
    print(f"peer compiled: {compiled}", flush=True)
    if chosen.compile:
        return 0
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    result = {"schema": 1, "question": "MLA decode beside the peer", "environment": gpu_environment()}
    result |= {"peer_compiled": compiled, "rows": []}
    chosen.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        measure(chosen, runtime, pool, result)
    finally:  # what was measured before a fault is kept
        result["bars"] = tally(result["rows"])
        result["seconds"] = round(time.perf_counter() - began, 1)
        (chosen.out / "mla.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"bars: {result['bars']}; seconds: {result['seconds']}")
    differing = disagreements(result["rows"])
    print(f"outputs that differ from the peer's: {differing or 'none'}")
    return int(bool(differing) or any("us" not in row["ours"] for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
