"""What the profiler prints becomes figures of the rows that were launched."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode.profile_table import profiled

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_profile

HEAD = (
    "ID",
    "Kernel Name",
    "gpu__time_duration.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.per_cycle_active",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
)
UNITS = ("", "", "us", "%", "Mbyte", "%", "%", "inst/cycle", "inst", "inst", "inst", "inst", "inst")
LAUNCH = (
    "0",
    "a kernel, templated<1>",
    "1,234.5",
    "88.1",
    "4,295.0",
    "61.5",
    "0",
    "0.125",
    "1",
    "0.9",
    "0.2",
    "7.25",
    "n/a",
)
FIGURES = {
    "us": 1234.5,
    "dram_share": 88.1,
    "dram_read_mb": 4295.0,
    "tensor_share": 61.5,
    "issue_share": 12.5,
    "stalls_per_issue": {"long_scoreboard": 7.25, "wait": 0.9, "barrier": 0.2},
}


def printed(*lines: tuple[str, ...]) -> str:
    """What the profiler prints: its own remarks, then a quoted table."""
    quoted = (",".join(f'"{cell}"' for cell in line) for line in lines)
    return "==PROF== Connected\n" + "\n".join(quoted) + "\n==PROF== Disconnected\n"


def test_a_launch_becomes_figures() -> None:
    (launch,) = gpu_profile.launches_in(printed(HEAD, UNITS, LAUNCH))
    assert gpu_profile.figures_of(launch) == FIGURES


@pytest.mark.parametrize(("unit", "microseconds"), [("ns", 1.2), ("nsecond", 1.2), ("ms", 1234500.0)])
def test_times_are_microseconds_whatever_the_unit(unit: str, microseconds: float) -> None:
    units = (*UNITS[:2], unit, *UNITS[3:])
    (launch,) = gpu_profile.launches_in(printed(HEAD, units, LAUNCH))
    assert gpu_profile.figures_of(launch)["us"] == microseconds


def test_every_row_that_is_profiled_is_one_of_the_benchmarks() -> None:
    cases = gpu_profile.chosen_cases()
    assert len({(case.section, case.label) for case in cases}) == len(gpu_profile.DECODE) + len(gpu_profile.MLA)


def report() -> dict[str, Any]:
    row = FIGURES | {"benchmark": "decode", "section": "gqa", "label": "8 x 4096", "kv_mb": 134.2}
    other = FIGURES | {"benchmark": "mla", "section": "bf16", "label": "128 heads, 1 x 4096", "kv_mb": 4.7}
    environment = {"gpu": {"name": "A GPU", "driver_version": "1.2"}, "date": "2026-01-02T03:04:05+00:00"}
    return {"schema": 1, "environment": environment, "rows": [row, other]}


def test_the_table_has_the_rows_of_its_page_alone() -> None:
    _, where, table = profiled(report(), "decode")
    assert where == "A GPU, driver 1.2; 2026-01-02."
    assert "8 x 4096" in table
    assert "128 heads" not in table
    assert "| 8 x 4096 | 1234 us | 134 MB | 4295 MB | - | 88% | - | 62% | long scoreboard 7.2, wait 0.9" in table
    assert all(one.count("|") == two.count("|") for one, two in pairwise(table.splitlines()))


def test_nothing_is_shown_where_nothing_was_profiled() -> None:
    assert profiled({}, "mla") == ()
