"""MLA decode beside FlashMLA and FlashInfer's fa3 on the same tensors: times, bandwidth, ratios, bars.

Run: ``python benchmarks/gpu_mla.py --out DIR`` on a machine with a Hopper GPU, torch and triton; where
flashinfer-python is installed it is measured in the same run, and FlashMLA where ``--flashmla`` names its library,
which ``decode/flash_mla_build.py`` makes.
Ratio = the best of the peers' times / ours, so above 1 is faster. Times are those in a sequence of layers
(``sequence/timing.py``), ``us``; beside them stand medians of single calls, ``single_us``, before each of which
triton's do_bench fills L2 with zeros. "Read alone" is the time in the same sequence of a kernel of ours that only reads
as many bytes. ``--compile`` only compiles the peers' kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode import flash_mla
from decode.measuring import reading
from decode.mla_cases import MlaCase, mla_cases
from decode.mla_measuring import MlaBench, MlaMaker, fa3_of
from decode.mla_page import SCHEMA
from decode.peers import describe
from decode.problem import Pool
from decode.reading import StreamingReads
from decode.rows import disagreements, line_of, tally
from decode.timing import SmClock, matrix_tflop_per_s
from gpu_environment import built_sources, gpu_environment
from row_origin import keep
from sequence.timing import Method

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

POOL_BYTES = 8 << 30
READ_BYTES = 2 << 30  # a layer
HIDDEN = 7168
REP_MS = 60


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What a script measures: the name of its JSON, the question that this answers, the peers, cases, and tensors."""

    name: str
    question: str
    peers: str
    cases: Callable[[bool], list[MlaCase]]
    bench: type[MlaBench]
    pool: type[Pool]
    flashmla: Callable[[CDLL], MlaMaker]


MLA = Benchmark("mla", "MLA decode beside the peers", "fa3,flashmla", mla_cases, MlaBench, Pool, flash_mla.maker)


def options(benchmark: Benchmark) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=benchmark.question)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=benchmark.peers, help="whom to measure beside; empty: nobody")
    parser.add_argument("--flashmla", type=Path, help="the library of decode/flash_mla_build.py")
    parser.add_argument("--rep", type=float, default=REP_MS, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="only compile the peers' kernels, measure nothing")
    return parser.parse_args()


def peers_of(
    benchmark: Benchmark, chosen: argparse.Namespace, pool: Pool
) -> tuple[dict[str, MlaMaker], dict[str, Any]]:
    """The peers, compiled by planning with them, and how that went; a failure is a result."""
    makers: dict[str, MlaMaker] = {}
    report: dict[str, Any] = {}
    problem = benchmark.bench.problem_type(next(case for case in benchmark.cases(True) if case.peer), pool)
    for name in filter(None, chosen.peers.split(",")):
        began = time.perf_counter()
        report[name] = {}
        try:
            if name == "flashmla":
                library = flash_mla.load(chosen.flashmla)
                report[name] = {"commit": flash_mla.commit_of(library)}
            make = fa3_of if name == "fa3" else benchmark.flashmla(library)
            make(problem)[0]()
            torch.cuda.synchronize()
            makers[name] = make
            report[name] |= {"seconds": round(time.perf_counter() - began, 1)}
        except Exception as failure:
            report[name] |= {"error": describe(failure)}
    return makers, report


def measure(
    benchmark: Benchmark,
    chosen: argparse.Namespace,
    runtime: Runtime,
    pool: Pool,
    peers: dict[str, MlaMaker],
    result: dict[str, Any],
) -> None:
    """Fill ``result`` with the ceilings and, as they come, the rows; each row is written and printed too."""
    began = time.perf_counter()
    with SmClock() as clock:
        matrix = result["matrix_tflop_per_s"] = matrix_tflop_per_s()
        memory = torch.zeros(2 + 8 * runtime.driver.device(0).multiprocessors, dtype=torch.int32, device="cuda")
        reads, method = StreamingReads(runtime, memory.data_ptr()), Method(**result["method"])
        makers = reads.makers(pool.flat("bf16").data_ptr(), READ_BYTES, method.layers)
        read = result["read"] = reading(makers, READ_BYTES, method)
        print(f"read {read['tb_per_s']:.3f} TB/s, matrix product {matrix:.0f} TFLOP/s", flush=True)
        bench = benchmark.bench(runtime, pool, reads, read["tb_per_s"], matrix, chosen.rep, method)
        for case in benchmark.cases(bool(peers)):
            before = len(clock.samples)
            row = bench.row(case, peers)
            row["sm_mhz"] = clock.summary(before).get("median") or (clock.samples[-1] if clock.samples else None)
            result["rows"].append(row)
            result |= {"sm_clock_mhz": clock.summary(), "bars": tally(result["rows"])}
            result["seconds"] = round(time.perf_counter() - began, 1)
            keep(result, chosen.out / f"{benchmark.name}.json")
            print(line_of(row), flush=True)


def run(benchmark: Benchmark) -> int:
    """Measure all cases and write the JSON; 1 if a call of ours failed or an output differs from a peer's."""
    chosen = options(benchmark)
    torch.manual_seed(0)
    pool = benchmark.pool(POOL_BYTES)
    peers, compiled = peers_of(benchmark, chosen, pool)
    print(f"peers compiled: {compiled}", flush=True)
    if chosen.compile:
        return 0
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    result = {"schema": SCHEMA, "question": benchmark.question, "environment": gpu_environment()}
    result |= {"peers_compiled": compiled, "rows": []}
    result["method"] = Method(rounds=chosen.rounds, hidden=HIDDEN).record()
    measure(benchmark, chosen, runtime, pool, peers, result)
    print(f"bars: {result['bars']}; seconds: {result['seconds']}")
    differing = disagreements(result["rows"])
    print(f"outputs that differ: {differing or 'none'}")
    return int(bool(differing) or any("us" not in row["ours"] for row in result["rows"]))


if __name__ == "__main__":
    raise SystemExit(run(MLA))
