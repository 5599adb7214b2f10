"""Paged decode beside FlashInfer's XQA and fa2 and cuDNN on the same tensors: times, bandwidth, ratios, bars.

Run: ``python benchmarks/gpu_decode.py --out DIR [--sections gqa,fp8]`` on a machine with a GPU, torch and triton; where
flashinfer-python is installed it is measured in the same run. Ratio = best of the peers' / ours, so above 1 is faster.
Times are those in a sequence of layers (``sequence/timing.py``), ``us``; beside them stand medians of single calls,
``single_us``, before each of which triton's do_bench fills L2 with zeros. The read bandwidth is that of a kernel of
ours that only reads, in such a sequence over 4 GiB a layer; "read alone" is its time over as many bytes as a row's keys
and values.
``--compile`` only compiles the peers' kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from decode import peers
from decode.cases import SECTIONS, Case, cases_of, sections_of
from decode.measuring import Bench, reading
from decode.page import SCHEMA
from decode.problem import Pool
from decode.reading import StreamingReads
from decode.rows import disagreements, line_of, tally
from decode.timing import REP_MS, SmClock, matrix_tflop_per_s
from gpu_environment import built_sources, gpu_environment
from row_origin import keep
from sequence.timing import Method

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

READ_BYTES = 4 << 30


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", type=sections_of, default=",".join(SECTIONS), help="default: %(default)s")
    parser.add_argument("--peers", default="xqa,fa2,fa2_plan_run,cudnn", help="whom to measure beside; empty: nobody")
    parser.add_argument("--rep", type=float, default=REP_MS, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="only compile the peers' kernels, measure nothing")
    return parser.parse_args()


def measure(cases: list[Case], runtime: Runtime, rep: float, method: Method, result: dict[str, Any], out: Path) -> None:
    """Fill ``result`` with the ceilings and, as they come, the rows; each row is written to ``out`` and printed too."""
    pool = Pool(method.layers * max(READ_BYTES, *(case.pages * case.page_bytes for case in cases)))
    rows, seconds = result["rows"], result["seconds"]
    with SmClock() as clock:
        matrix = result["matrix_tflop_per_s"] = matrix_tflop_per_s()
        memory = torch.zeros(2 + 8 * runtime.driver.device(0).multiprocessors, dtype=torch.int32, device="cuda")
        reads = StreamingReads(runtime, memory.data_ptr())
        makers = reads.makers(pool.flat(cases[0].kv_dtype).data_ptr(), READ_BYTES, method.layers)
        read = result["read"] = reading(makers, READ_BYTES, method)
        print(f"read {read['tb_per_s']:.3f} TB/s, matrix product {matrix:.0f} TFLOP/s", flush=True)
        bench = Bench(runtime, pool, reads, read["tb_per_s"], matrix, rep, method)
        for case in cases:
            began, before = time.perf_counter(), len(clock.samples)
            row = bench.row(case)
            row["sm_mhz"] = clock.summary(before).get("median") or (clock.samples[-1] if clock.samples else None)
            rows.append(row)
            seconds[case.section] = round(seconds.get(case.section, 0.0) + time.perf_counter() - began, 2)
            result |= {"sm_clock_mhz": clock.summary(), "bars": tally(rows)}
            keep(result, out)
            print(line_of(row), flush=True)


def main() -> int:
    """Measure the chosen sections and write ``decode.json``; 1 if a call of ours failed."""
    chosen = options()
    torch.manual_seed(0)
    cases = cases_of(chosen.sections, chosen.peers.split(","))
    compiled = peers.compile_ahead(cases)
    print(f"peers compiled in {compiled['seconds']} s: {compiled['errors'] or 'all'}", flush=True)
    if chosen.compile:
        return 0
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    result = {"schema": SCHEMA, "question": "paged decode beside the peers", "environment": gpu_environment()}
    method = Method(rounds=chosen.rounds)
    result["method"] = method.record()
    result |= {"sections": chosen.sections, "peers_compiled": compiled, "seconds": {}, "rows": []}
    measure(cases, runtime, chosen.rep, method, result, chosen.out / "decode.json")
    print(f"outputs that differ from a peer's: {disagreements(result['rows']) or 'none'}")
    print(f"bars: {result['bars']}; seconds: {result['seconds']}")
    return int(any("us" not in row["ours"] for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
