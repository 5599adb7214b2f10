"""Whether the method of the attention benchmarks decides who is faster: the same decodes timed in other ways.

Run: ``python benchmarks/gpu_method_check.py --out DIR`` on a machine with a Hopper GPU, torch, triton and
flashinfer-python. Sequences of 2 and 8 layers, with narrower and wider projections, launched call by call without a
graph, with one cache for all layers (which small ones find in L2), and single calls with L2 cleared.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode.cases import Case, same
from decode.ours import Ours
from decode.peers import MAKERS
from decode.problem import Pool, Problem
from decode.timing import median_us
from gpu_environment import built_sources, gpu_environment
from row_origin import keep, origin_of
from sequence.timing import Layers, Maker, Method, sequence_times

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

SCHEMA = 1
SIZES = ((1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 8192), (128, 2048))
STANDARD, ONE_CACHE, SINGLE = "4 layers, one graph, hidden 8,192", "one cache for all layers", "single calls"
WAYS: Mapping[str, Method] = {
    STANDARD: Method(),
    "2 layers": Method(layers=2),
    "8 layers": Method(layers=8),
    "hidden 4,096": Method(hidden=4096),
    "hidden 16,384": Method(hidden=16384),
    "no graph": Method(graph=False),
    ONE_CACHE: Method(),
}
MOST_LAYERS = max(method.layers for method in WAYS.values())
REP_MS = 20


def makers_of(problem: Problem, runtime: Runtime, peers: list[str]) -> dict[str, Maker]:
    """Ours and the peers."""
    makers: dict[str, Maker] = {name: lambda _, make=MAKERS[name]: make(problem) for name in peers}
    return makers | {"ours": lambda stream: Ours(problem, runtime).calls(stream.cuda_stream)}


def row_of(case: Case, runtime: Runtime, pool: Pool, peers: list[str], rounds: int) -> dict[str, Any]:
    """Microseconds by way and contestant."""
    row: dict[str, Any] = {"label": case.label, "kv_bytes": case.kv_bytes, "us": {}, "rounds_us": {}, "errors": {}}
    for way, method in WAYS.items():
        problem = Problem(case, pool, 1 if way == ONE_CACHE else method.layers)
        makers = makers_of(problem, runtime, peers)
        times = sequence_times(Layers(problem.q, problem.out, method), makers, replace(method, rounds=rounds))
        row["us"][way] = {name: times[name]["us"] for name in makers if "us" in times[name]}
        row["rounds_us"][way] = {name: found["rounds_us"] for name, found in times.items() if "us" in found}
        row["errors"] |= {name: found["error"] for name, found in times.items() if "error" in found}
    problem, stream = Problem(case, pool), torch.cuda.current_stream()
    row["us"][SINGLE] = {
        name: median_us(make(stream)[0], REP_MS)
        for name, make in makers_of(problem, runtime, peers).items()
        if name not in row["errors"]
    }
    return row | origin_of(Ours(problem, runtime).plan)


def line_of(row: dict[str, Any]) -> str:
    """A row as one line: by way the best peer's time over ours."""
    parts = []
    for way, us in row["us"].items():
        theirs = {name: time for name, time in us.items() if name != "ours"}
        ratio = f", {min(theirs.values()) / us['ours']:.3f} of {min(theirs, key=theirs.__getitem__)}" if theirs else ""
        parts.append(f"{way} {us.get('ours', float('nan')):.1f} us{ratio}")
    return f"{row['label']}: {'; '.join(parts)} {row['errors'] or ''}"


def main() -> int:
    """Measure and write ``method_check.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", default="xqa,fa2", help="by comma (%(default)s); empty: nobody")
    parser.add_argument("--rounds", type=int, default=Method().rounds, help="of a sequence (%(default)s)")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", chosen.out / "store"))
    runtime = Runtime(Config(store=store, sources=built_sources(), offline=True))
    cases = [Case("method", f"{batch} x {length}", same(batch, length)) for batch, length in SIZES]
    pool = Pool(MOST_LAYERS * max(case.kv_bytes for case in cases))
    result: dict[str, Any] = {"schema": SCHEMA, "question": "whether other methods rank alike"}
    result |= {"standard": STANDARD, "methods": {name: method.record() for name, method in WAYS.items()}}
    result |= {"environment": gpu_environment(), "rows": []}
    for case in cases:
        row = row_of(case, runtime, pool, [name for name in chosen.peers.split(",") if name], chosen.rounds)
        result["rows"].append(row)
        keep(result, chosen.out / "method_check.json")
        print(line_of(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
