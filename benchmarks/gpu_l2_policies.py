"""L2 policies beside each other: experiments of the build and the release, in sequences of layers, in one process.

Run: ``python benchmarks/gpu_l2_policies.py --out DIR --experiments unchanged,first`` on a machine with a Hopper GPU and
torch, after ``python -m kernels_src.experiment`` for each name. A ratio is the release's time by the experiment's:
above 1 the experiment is faster. Outputs are compared bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode.cases import Case, same
from decode.mla_cases import MlaCase
from decode.mla_measuring import MlaProblem, ours_of
from decode.ours import Ours
from decode.problem import Pool, Problem
from gpu_append import AppendBench, AppendProblem, MergeBench, MergeProblem
from gpu_environment import built_sources, gpu_environment
from prefill.cases import PrefillCase, prefill_cases
from prefill.problem import problems_of_layers
from row_origin import keep, origin_of_calls
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.runtime import NATIVE_RELEASE

EXPERIMENTS = Path(__file__).resolve().parents[1] / "build" / "experiments"
POOL_BYTES = 10 << 30
DECODES = [
    *(Case("decode", f"{b} x {n}", same(b, n)) for b, n in ((1, 1024), (1, 16384), (8, 4096), (32, 4096))),
    *(Case("decode", f"{b} x {n}", same(b, n)) for b, n in ((64, 8192), (128, 2048))),
    Case("decode", "D 64, 32 x 16384", same(32, 16384), head_dim=64),
    Case("decode", "q_len 8, 16 x 16384", same(16, 16384), q_len=8),
    *(Case("decode", f"e4m3, {b} x {n}", same(b, n), kv_dtype="e4m3") for b, n in ((1, 8192), (32, 4096), (128, 2048))),
]
MLAS = [
    *(MlaCase("MLA groups", b, n) for b, n in ((1, 4096), (16, 4096), (64, 4096), (128, 4096), (128, 8192))),
    MlaCase("MLA groups", 64, 4096, q_len=2),
    MlaCase("MLA groups", 128, 8192, q_dtype="e4m3", kv_dtype="e4m3"),
    *(MlaCase("few heads", 128, n, heads=heads) for heads, n in ((16, 1024), (16, 4096), (16, 8192), (64, 4096))),
]
SHORT = PrefillCase("short", "64 x 128 tokens", 128, (128,) * 64, (128,) * 64)
Makers = dict[str, Maker]
Outputs = dict[str, torch.Tensor]


def decode_row(case: Case, runtimes: Mapping[str, Runtime], pool: Pool, method: Method) -> tuple[Layers, Makers, Any]:
    problem = Problem(case, pool, method.layers)

    def maker(runtime: Runtime) -> Maker:
        return lambda stream: Ours(problem, runtime).calls(stream.cuda_stream)

    layers = Layers(problem.q, problem.out, method)
    return layers, {name: maker(runtime) for name, runtime in runtimes.items()}, lambda: problem.out


def mla_row(case: MlaCase, runtimes: Mapping[str, Runtime], pool: Pool, method: Method) -> tuple[Layers, Makers, Any]:
    problem = MlaProblem(case, pool, method.layers)

    def maker(runtime: Runtime) -> Maker:
        return lambda stream: ours_of(problem, runtime, stream.cuda_stream, False)[1]

    layers = Layers(problem.q, problem.out, replace(method, hidden=7168))
    return layers, {name: maker(runtime) for name, runtime in runtimes.items()}, lambda: problem.out


def prefill_row(case: PrefillCase, runtimes: Mapping[str, Runtime], method: Method) -> tuple[Layers, Makers, Any]:
    problems = problems_of_layers(case, method.layers)
    outputs: list[torch.Tensor] = []

    def maker(runtime: Runtime) -> Maker:
        def make(stream: torch.cuda.Stream) -> list[Callable[[], Any]]:
            return [keeping(problem.ours(runtime), outputs) for problem in problems]

        return make

    layers = Layers(problems[0].q, torch.empty_like(problems[0].q), replace(method, hidden=4096))
    return layers, {name: maker(runtime) for name, runtime in runtimes.items()}, lambda: outputs[-1]


def copying_row(
    problem_of: Callable[[Runtime], Any], runtimes: Mapping[str, Runtime], method: Method, written: str
) -> Any:
    """Of an append or a merge; ``written``: what is written before it."""
    problems = {name: [problem_of(runtime) for _ in range(method.layers)] for name, runtime in runtimes.items()}
    first = next(iter(problems.values()))[0]
    source = getattr(first, written)
    for problem in (each for own in problems.values() for each in own):
        problem.given[written] = source

    def maker(own: list[Any]) -> Maker:
        return lambda stream: [lambda p=p: p.plan.run(**p.given) for p in own]

    out = torch.empty(len(source), 4096, device="cuda", dtype=torch.bfloat16)
    layers = Layers(source, out, replace(method, hidden=1024))
    return layers, {name: maker(own) for name, own in problems.items()}, None


def keeping(call: Callable[[], torch.Tensor], outputs: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        outputs[:] = [call()]

    return run


def rows(runtimes: Mapping[str, Runtime], families: list[str]) -> Iterator[tuple[str, str, Callable[[Method], Any]]]:
    """Family, label and what makes the row, for all that are chosen."""
    pool = Pool(POOL_BYTES)
    for case in DECODES:
        yield case.section, case.label, lambda method, case=case: decode_row(case, runtimes, pool, method)
    for mla in MLAS:
        yield mla.section, mla.label, lambda method, mla=mla: mla_row(mla, runtimes, pool, method)
    for prefill in (*prefill_cases(), SHORT):
        if prefill.section != "window":
            yield "prefill", prefill.name, lambda method, case=prefill: prefill_row(case, runtimes, method)
    for tokens in (64, 4096, 65536):
        append = AppendBench("D 128", tokens, batch=min(tokens, 64))
        of_append = lambda runtime, case=append: AppendProblem(case, runtime)  # noqa: E731
        yield "append", f"{tokens} tokens", lambda m, make=of_append: copying_row(make, runtimes, m, "key")
        merge = MergeBench("2 parts", tokens, 2)
        of_merge = lambda runtime, case=merge: MergeProblem(case, runtime)  # noqa: E731
        yield "merge", f"2 parts, {tokens} tokens", lambda m, make=of_merge: copying_row(make, runtimes, m, "v")


def measured(make: Callable[[Method], Any], method: Method, driver: Any) -> dict[str, Any]:
    layers, makers, output = make(method)
    stream = torch.cuda.current_stream()
    row: dict[str, Any] = origin_of_calls(driver, makers[NATIVE_RELEASE](stream)[0])
    if output is not None:
        bits: Outputs = {}
        layers.before(0)
        for name, maker in makers.items():
            maker(stream)[0]()
            bits[name] = output().clone()
        release = bits[NATIVE_RELEASE].view(torch.uint8)
        row["same_bits"] = {name: torch.equal(own.view(torch.uint8), release) for name, own in bits.items()}
    row["times"] = sequence_times(layers, makers, method)
    ours = row["times"][NATIVE_RELEASE]
    row["ratio"] = {
        name: round(ours["us"] / found["us"], 4)
        for name, found in row["times"].items()
        if name in makers and name != NATIVE_RELEASE and "us" in found and "us" in ours
    }
    return row


def main() -> int:
    """Measure and write ``l2_policies.json``; 1 if an experiment's bits differ or a call failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experiments", default="unchanged,first", help="names, by comma (%(default)s)")
    parser.add_argument("--families", default="", help="by comma; empty: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row later than this")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    chosen.out.mkdir(parents=True, exist_ok=True)
    releases = [NATIVE_RELEASE, *(f"{NATIVE_RELEASE}-{name}" for name in chosen.experiments.split(","))]
    sources = (*built_sources(), str(EXPERIMENTS))
    config = Config(store=chosen.out / "store", sources=sources, pin_files=(EXPERIMENTS / "pins.toml",), offline=True)
    runtimes = {name: Runtime(config, release=name) for name in releases}
    method = Method(rounds=chosen.rounds)
    result: dict[str, Any] = {"schema": 1, "method": method.record(), "environment": gpu_environment(), "rows": []}
    families, began = [name for name in chosen.families.split(",") if name], time.monotonic()
    for family, label, make in rows(runtimes, families):
        if (families and family not in families) or time.monotonic() - began > chosen.seconds:
            continue
        try:
            row = {"family": family, "label": label, **measured(make, method, runtimes[NATIVE_RELEASE].driver)}
        except Exception as failure:  # one row that fails must not cost the others
            row = {"family": family, "label": label, "error": f"{type(failure).__name__}: {failure}"[:600]}
        result["rows"].append(row)
        keep(result, chosen.out / "l2_policies.json")
        us = {name: found.get("us", found.get("error")) for name, found in row.get("times", {}).items()}
        print(family, label, us, row.get("ratio"), row.get("same_bits"), row.get("error", ""), flush=True)
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    bad = [row for row in result["rows"] if "error" in row or not all(row.get("same_bits", {}).values())]
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
