"""What benchmarks over the published trtllm-gen release share: its wheel, and where their result goes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
PIN = "trtllm-gen-0.6.13"
WHEEL = "flashinfer_cubin-0.6.13-py3-none-any.whl"


def report_on_wheel(name: str, question: str | None, measure: Callable[[Path, Path], Mapping[str, object]]) -> None:
    """Write what ``measure(wheel, scratch folder)`` finds to ``NAME.json`` of the results, and print it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubin-runtime-test"
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--wheel", type=Path, default=cache / WHEEL)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"no wheel at {given.wheel}; `make test-release` gets it")
    with tempfile.TemporaryDirectory(prefix="cubin-runtime-bench-") as folder:
        report = measure(given.wheel, Path(folder))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
