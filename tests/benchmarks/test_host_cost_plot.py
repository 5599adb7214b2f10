"""The picture of host costs can be drawn from the measurement that is kept."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_host_cost import TARGETS

ROOT = Path(__file__).resolve().parents[2]
REPORT = json.loads((ROOT / "benchmarks" / "results" / "host_cost.json").read_text())


def test_every_target_is_of_a_row() -> None:
    assert TARGETS.keys() <= REPORT["microseconds"].keys()


def test_the_page_shows_it() -> None:
    assert "(../host_cost.png)" in (ROOT / "docs" / "results" / "host.md").read_text()
    assert (ROOT / "docs" / "host_cost.png").is_file()
