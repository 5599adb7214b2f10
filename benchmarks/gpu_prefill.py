"""Context attention beside FlashInfer's fa3 and fa2 and cuDNN (through torch) on the same tensors: times and ratios.

Run: ``python benchmarks/gpu_prefill.py --out DIR`` on a machine with a Hopper GPU, torch and triton; where
flashinfer-python is installed it is measured in the same run. Ratio = the best peer's time / ours, so above 1 is
faster. A time is the median over rounds of triton's do_bench median; in a round ours and the peers take turns, because
compute-bound times follow the card's temperature. ``--compile`` only compiles the peers' kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from decode.peers import compile_ahead, describe
from decode.timing import SmClock, matrix_tflop_per_s
from gpu_environment import built_sources, gpu_environment
from prefill import mixed
from prefill.cases import PrefillCase, prefill_cases
from prefill.page import SCHEMA
from prefill.peers import PEERS
from prefill.problem import PrefillProblem
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

# bf16 outputs of two right kernels differ by an ulp of values below 4.
MOST_DIFFERENCE = 0.04
COMPILATIONS = 8  # at a time


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS), help="whom to measure beside (%(default)s); empty: nobody")
    parser.add_argument("--sections", default="", help="of the cases, by comma; empty: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=float, default=60, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="only compile the peers' kernels, measure nothing")
    return parser.parse_args()


def calls_of(problem: PrefillProblem, runtime: Runtime, peers: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Functions that compute the case by who does, ours first, and why a peer has none."""
    calls: dict[str, Any] = {"ours": problem.ours(runtime)}
    if problem.case.page:
        calls["ours, ragged keys"] = problem.ours(runtime, ragged=True)
    errors: dict[str, str] = {}
    for name in peers:
        try:
            call = PEERS[name](problem)
            if call is not None:
                call()
                torch.cuda.synchronize()
                calls[name] = call
        except Exception as error:
            errors[name] = describe(error)
    return calls, errors


def measured(calls: dict[str, Callable[[], Any]], rounds: int, rep: float) -> dict[str, float]:
    """Microseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(do_bench(call, warmup=10, rep=rep, return_mode="median") * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def compile_peers(cases: list[PrefillCase], peers: list[str]) -> None:
    """Compile the kernels of all cases side by side, by calling each once; a failure is printed, and fails again."""
    alike = {(case.head_dim, case.page > 0, case.window_left >= 0): case.small() for case in cases}

    def call(wanted: tuple[str, PrefillCase]) -> None:
        name, case = wanted
        try:
            made = PEERS[name](PrefillProblem(case))
            if made is not None:
                made()
        except Exception as error:
            print(f"{name}, {case.name}: {describe(error)}", flush=True)

    with ThreadPoolExecutor(COMPILATIONS) as pool:
        of_decodes = pool.submit(compile_ahead, [mixed.DECODES])
        list(pool.map(call, product(peers, alike.values())))
        print(of_decodes.result(), flush=True)


def row_of(case: PrefillCase, runtime: Runtime, chosen: argparse.Namespace) -> dict[str, Any]:
    problem = PrefillProblem(case)
    calls, errors = calls_of(problem, runtime, [name for name in chosen.peers.split(",") if name])
    ours = calls["ours"]().float()
    differences = {name: (call().float() - ours).abs().max().item() for name, call in calls.items() if name != "ours"}
    times = measured(calls, chosen.rounds, chosen.rep)
    peers = {name: us for name, us in times.items() if not name.startswith("ours")}
    row = {
        "section": case.section,
        "case": case.name,
        "us": times,
        "tflop_per_s": {name: case.flop / us / 1e6 for name, us in times.items()},
        "largest_difference": differences,
        "errors": errors,
        "bar": case.bar,
    }
    if peers:
        row["ratio"] = min(peers.values()) / times["ours"]
    if case.page:
        row["of_ragged"] = times["ours, ragged keys"] / times["ours"]
    return row


def mixed_row(runtime: Runtime, chosen: argparse.Namespace) -> dict[str, Any]:
    """Chunks and decodes in two launches: ours in the best of its ways beside the peers' best two."""
    problem = mixed.MixedProblem(runtime)
    ours = problem.ours()
    theirs, errors = problem.peers() if chosen.peers else ({}, {})
    times = measured(ours | theirs, chosen.rounds, chosen.rep)
    whole = {name: us for name, us in times.items() if name in ours and not name.endswith("alone")}
    best = min(whole, key=whole.__getitem__)
    row: dict[str, Any] = {"section": "mixed", "case": f"{mixed.CHUNKS.name} and {mixed.DECODES.label}", "us": times}
    row |= {"errors": errors, "bar": mixed.BAR, "best": best, "tflop_per_s": {}, "largest_difference": {}}
    if theirs:
        of_peers = min(times[name] for name in theirs)
        row["ratio"] = of_peers / times[best]
        row["ratio_one_after_the_other"] = of_peers / times["ours, one after the other"]
    return row


def line_of(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {us:.1f} us {row['tflop_per_s'].get(name, 0):.0f} TF" for name, us in row["us"].items())
    ratio = f"  ratio {row['ratio']:.3f} (bar {row['bar']})" if "ratio" in row else ""
    return f"{row['case']}: {times}{ratio}{''.join(f'  {n}: {e}' for n, e in row['errors'].items())}"


def main() -> int:
    """Measure all cases and write ``prefill.json``; 1 if an output differs from a peer's."""
    chosen = options()
    torch.manual_seed(0)
    sections = [name for name in chosen.sections.split(",") if name]
    cases = [case for case in prefill_cases() if not sections or case.section in sections]
    if chosen.compile:
        compile_peers(cases, [name for name in chosen.peers.split(",") if name])
        return 0
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    chosen.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"schema": SCHEMA, "question": "context attention beside the peers"}
    result |= {"environment": gpu_environment(), "rows": []}
    result["matrix_tflop_per_s"] = matrix_tflop_per_s()
    calls = [partial(row_of, case, runtime, chosen) for case in cases]
    if not sections or "mixed" in sections:
        calls.append(partial(mixed_row, runtime, chosen))
    began = time.perf_counter()
    with SmClock() as clock:
        for call in calls:
            first = len(clock.samples)
            row = call()
            result["rows"].append(row | {"sm_clock_mhz": clock.summary(first)})
            result["seconds"] = round(time.perf_counter() - began, 1)
            # What was measured is kept, whatever ends the run.
            (chosen.out / "prefill.json").write_text(json.dumps(result, indent=1) + "\n")
            print(line_of(row), flush=True)
    differing = [
        row["case"] for row in result["rows"] if max(row["largest_difference"].values(), default=0.0) > MOST_DIFFERENCE
    ]
    print(f"outputs that differ from the peers': {differing or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
