"""Context attention beside FlashInfer's fa3 and fa2 and cuDNN (through torch) on the same tensors: times and ratios.

Run: ``python benchmarks/gpu_prefill.py --out DIR`` on a machine with a Hopper GPU, torch and triton; where
flashinfer-python is installed it is measured in the same run. Ratio = the best peer's time / ours, so above 1 is
faster. Times are those in a sequence of layers (``sequence/timing.py``), ``us``, in whose rounds ours and the peers
take turns, because compute-bound times follow the card's temperature; beside them stand medians of single calls,
``single_us``, before each of which triton's do_bench fills L2 with zeros. ``--compile`` only compiles the peers'
kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
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
from prefill.problem import PrefillProblem, problems_of_layers
from row_origin import keep, origin_of
from sequence.timing import Layers, Maker, Method, sequence_times
from triton.testing import do_bench

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

# bf16 outputs of two right kernels differ by an ulp of values below 4.
MOST_DIFFERENCE = 0.04
COMPILATIONS = 8  # at a time
HIDDEN = 4096


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default=",".join(PEERS), help="whom to measure beside (%(default)s); empty: nobody")
    parser.add_argument("--sections", default="", help="of the cases, by comma; empty: all")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    parser.add_argument("--rep", type=float, default=60, help="ms of device time for one median (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="only compile the peers' kernels, measure nothing")
    return parser.parse_args()


def makers_of(
    problems: list[PrefillProblem], runtime: Runtime, peers: list[str]
) -> tuple[dict[str, Maker], dict[str, str]]:
    """Contestants by name, ours first, and why a peer is none."""

    def ours(ragged: bool) -> Maker:
        return lambda _: [problem.ours(runtime, ragged=ragged) for problem in problems]

    makers = {"ours": ours(False)}
    if problems[0].case.page:
        makers["ours, ragged keys"] = ours(True)
    errors: dict[str, str] = {}
    for name in peers:
        try:
            calls = [PEERS[name](problem) for problem in problems]
            if calls[0] is not None:
                calls[0]()
                torch.cuda.synchronize()
                makers[name] = lambda _, calls=calls: calls
        except Exception as error:
            errors[name] = describe(error)
    return makers, errors


def singles(calls: Mapping[str, Callable[[], Any]], rep: float) -> dict[str, float]:
    """Microseconds of single calls."""
    return {name: do_bench(call, warmup=10, rep=rep, return_mode="median") * 1e3 for name, call in calls.items()}


def in_sequence(row: dict[str, Any], layers: Layers, makers: Mapping[str, Maker], method: Method) -> dict[str, float]:
    """The times in a sequence, and in ``row`` their rounds and what failed."""
    found = sequence_times(layers, makers, method)
    row["rounds_us"] = {name: one["rounds_us"] for name, one in found.items() if "us" in one}
    row["errors"] |= {name: one["error"] for name, one in found.items() if "error" in one}
    return {name: found[name]["us"] for name in makers if "us" in found[name]}


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


def row_of(case: PrefillCase, runtime: Runtime, chosen: argparse.Namespace, method: Method) -> dict[str, Any]:
    problems = problems_of_layers(case, method.layers)
    makers, errors = makers_of(problems, runtime, [name for name in chosen.peers.split(",") if name])
    plan, _ = problems[0].planned(runtime)
    row: dict[str, Any] = {"section": case.section, "case": case.name, **origin_of(plan), "bar": case.bar}
    row["errors"] = errors
    stream = torch.cuda.current_stream()
    calls = {name: make(stream)[0] for name, make in makers.items()}
    ours = calls["ours"]().float()
    row["largest_difference"] = {
        name: (call().float() - ours).abs().max().item() for name, call in calls.items() if name != "ours"
    }
    row["single_us"] = singles(calls, chosen.rep)
    value = problems[0].v
    out = value.new_empty(len(problems[0].q), case.heads, case.value_dim)
    times = row["us"] = in_sequence(row, Layers(problems[0].q, out, method), makers, method)
    row["tflop_per_s"] = {name: case.flop / us / 1e6 for name, us in times.items()}
    peers = {name: us for name, us in times.items() if not name.startswith("ours")}
    if peers:
        row["ratio"] = min(peers.values()) / times["ours"]
    if case.page:
        row["of_ragged"] = times["ours, ragged keys"] / times["ours"]
    return row


def mixed_row(runtime: Runtime, chosen: argparse.Namespace, method: Method) -> dict[str, Any]:
    """Chunks and decodes in two launches: ours in the best of its ways beside the peers' best two."""
    problem = mixed.MixedProblem(runtime)
    theirs, errors = problem.peers() if chosen.peers else ({}, {})
    ours = problem.ours(torch.cuda.current_stream())
    makers: dict[str, Maker] = {name: lambda _, call=call: [call] for name, call in theirs.items()}
    makers |= {name: lambda stream, name=name: [problem.ours(stream)[name]] for name in ours}
    row: dict[str, Any] = {"section": "mixed", "case": f"{mixed.CHUNKS.name} and {mixed.DECODES.label}"}
    row |= {"errors": errors, "bar": mixed.BAR, "tflop_per_s": {}, "largest_difference": {}}
    row |= origin_of(*problem.plans())
    row["single_us"] = singles(ours | theirs, chosen.rep)
    out = torch.empty_like(problem.chunks.q)
    times = row["us"] = in_sequence(row, Layers(problem.chunks.q, out, method), makers, method)
    whole = {name: us for name, us in times.items() if name in ours and not name.endswith("alone")}
    best = row["best"] = min(whole, key=whole.__getitem__)
    if theirs:
        of_peers = min(times[name] for name in theirs if name in times)
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
    result: dict[str, Any] = {"schema": SCHEMA, "question": "context attention beside the peers"}
    method = Method(rounds=chosen.rounds, hidden=HIDDEN)
    result |= {"method": method.record(), "environment": gpu_environment(), "rows": []}
    result["matrix_tflop_per_s"] = matrix_tflop_per_s()
    calls = [partial(row_of, case, runtime, chosen, method) for case in cases]
    if not sections or "mixed" in sections:
        calls.append(partial(mixed_row, runtime, chosen, method))
    began = time.perf_counter()
    with SmClock() as clock:
        for call in calls:
            first = len(clock.samples)
            row = call()
            result["rows"].append(row | {"sm_clock_mhz": clock.summary(first)})
            result["seconds"] = round(time.perf_counter() - began, 1)
            keep(result, chosen.out / "prefill.json")
            print(line_of(row), flush=True)
    differing = [
        row["case"] for row in result["rows"] if max(row["largest_difference"].values(), default=0.0) > MOST_DIFFERENCE
    ]
    print(f"outputs that differ from the peers': {differing or 'none'}")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
