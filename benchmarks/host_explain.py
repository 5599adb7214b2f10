"""Time of planning on the host: one trtllm-gen launch from loaded metadata, and a file of them by the verb.

Run ``python benchmarks/host_explain.py`` with the published wheel at hand (``make test-release`` gets it). The
cases are those of the tests. "decide" is from the arguments to kernel, grid, attributes, descriptors and every
parameter; "fresh kernels" has no row of the index decoded yet. Results go to benchmarks/results/host_explain.json.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from parts.published_wheel import PIN, report_on_wheel

from cubin_runtime import Config, __version__
from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.releases.catalog import open_kernel_index
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, index_of_header
from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.cli.recorded_decisions import decision_record
from cubin_runtime.kernels.trtllm_gen.decision import decide
from cubin_runtime.kernels.trtllm_gen.kernel_finder import KernelFinder
from cubin_runtime.kernels.trtllm_gen.traits import Policy

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "data" / "trtllm_gen_cases.jsonl.xz"
ROUNDS = 5
WHOLE_RUNS = 5


def measure(wheel: Path, folder: Path) -> dict[str, object]:
    """All figures."""
    library = Library(Config(store=folder / "store", sources=(str(wheel),), offline=True, lazy_fetch=False))
    pin = library.pins.get(PIN)
    index = open_kernel_index(library, pin, fetch=False)
    header = library.load(pin.path.child(HEADER_PATH), fetch=False).data
    with lzma.open(CASES) as opened:
        cases = [record["case"] for record in map(json.loads, opened) if record["ok"]]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]},
        "versions": {"cubin_runtime": __version__, "python": platform.python_version(), "release": PIN},
        "cases_that_plan": len(cases),
        "one_decision_us": decision_figures(index, cases),
        "open_index_ms": milliseconds(lambda: MetadataIndex(index_of_header(header)), 5),
        "verb_on_the_file_s": verb_figures(wheel, folder),
    }


def decision_figures(index: MetadataIndex, cases: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Microseconds of one decision, over all cases; each case counts with its median of several rounds."""
    kernels = KernelFinder(index)
    stages: dict[str, list[list[float]]] = {name: [[] for _ in cases] for name in ("arguments", "decide", "record")}
    fresh = []
    for round_ in range(ROUNDS + 1):
        for place, case in enumerate(cases):
            begin = time.perf_counter()
            problem, occupancy = problem_of(case), occupancy_of(case)
            read = time.perf_counter()
            made = decide(problem, kernels, occupancy, Policy.REFERENCE)
            decided = time.perf_counter()
            decision_record(made)
            done = time.perf_counter()
            if round_ == 0:  # every kernel is met for the first time
                fresh.append(decided - read)
                continue
            for name, spent in zip(stages, (read - begin, decided - read, done - decided), strict=True):
                stages[name][place].append(spent)
    figures: dict[str, object] = {
        name: spread([statistics.median(times) for times in measured]) for name, measured in stages.items()
    }
    figures["decide, fresh kernels"] = spread(fresh)
    return figures


def verb_figures(wheel: Path, folder: Path) -> dict[str, object]:
    """Seconds of ``explain --cases`` as a process of its own: header parsed, then with the index in the store."""
    command = "import sys; from cubin_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    shared = [sys.executable, "-c", command, "explain", "--offline", "--source", str(wheel), "--cases", str(CASES)]
    results: dict[str, object] = {}
    for name, store, more in (
        ("without an index in the store", folder / "absent", []),
        ("with an index in the store", folder / "filled", []),
        ("with --both", folder / "filled", ["--both"]),
    ):
        if "absent" not in store.name:
            store.mkdir(exist_ok=True)
        call = [*shared, "--store", str(store), "--out", str(folder / "out.jsonl"), *more]
        seconds = []
        for _ in range(WHOLE_RUNS + 1):
            begin = time.perf_counter()
            subprocess.run(call, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            seconds.append(time.perf_counter() - begin)
        kept = seconds[1:]
        results[name] = {"median": round(statistics.median(kept), 3), "min": round(min(kept), 3), "runs": len(kept)}
    return results


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest, in microseconds."""
    return {
        "median": round(statistics.median(seconds) * 1e6, 1),
        "p95": round(statistics.quantiles(seconds, n=20)[-1] * 1e6, 1),
        "max": round(max(seconds) * 1e6, 1),
    }


def milliseconds(work: Callable[[], object], runs: int) -> float:
    """The median of several runs."""
    measured = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        measured.append(time.perf_counter() - begin)
    return round(statistics.median(measured) * 1e3, 1)


if __name__ == "__main__":
    report_on_wheel("host_explain", __doc__, measure)
