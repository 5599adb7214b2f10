"""The page of the decode holds the figures of its JSON, and the pictures can be drawn."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.decode.page import SINGLE_CALLS, figures
from benchmarks.decode.tables import BEGIN, END, NOT_MEASURED, rewrite
from tests.benchmarks.decode_results import made_up_report

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "results" / "decode.md"


def test_every_picture_of_the_page_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", PAGE.read_text())
    assert [name for name in pictures if not (PAGE.parent / name).is_file()] == []


def test_figures_are_written_between_the_markers_and_nowhere_else() -> None:
    text = rewrite(f"before\n{BEGIN}\nfigures of before\n{END}\nafter\n", "new figures")
    assert text == f"before\n{BEGIN}\nnew figures\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_one_pair_of_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one"):
        rewrite(text, "")


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    lines = figures(made_up_report()).splitlines()
    tables = [(above, line) for above, line in pairwise(lines) if above.startswith("|")]
    assert [pair for pair in tables if pair[1].startswith("|") and pair[0].count("|") != pair[1].count("|")] == []


@pytest.mark.parametrize(
    "line",
    [
        "Read bandwidth 4.50 TB/s, bf16 matrix product 790 TFLOP/s.",
        "| 1 x 1024 | 8.0 us | 0.53 | 12% | 7.4 us | 11.0 us | 12.1 us | failed | 1.38 |",
        "| D 128, q_len 8, 8 x 16384 | 133 us | 4.05 | 90% | 126 us | 143 us | 147 us | 1.08 |",
        "| 8 | 38.4 us | 1.00x, 2.00 (1.70) | 1.00x, 4.00 (2.61) | 1.00x, 8.00 (4.82) |",
        "Below the published speedup, of 30 cells: none.",
        "| 8 x 4096 | 34.9 us | 38.4 us | 1.10x |",
        "| gqa: 1 x 1024 | 3.0 us | 6.0 us | 2.01 |",
        "| cuDNN | `RuntimeError: no engine / configuration` | 6: gqa 1 x 1024 ... |",
    ],
)
def test_figures_show_ratios_groupings_and_failures(line: str) -> None:
    assert line in figures(made_up_report())


def test_a_row_without_the_time_of_only_reading_has_its_other_figures() -> None:
    report = made_up_report()
    for row in report["rows"]:
        del row["read_alone_us"]
    assert "| 1 x 1024 | 8.0 us | 0.53 | 12% | - | 11.0 us | " in figures(report)


def test_an_older_report_has_no_figures_for_the_page() -> None:
    assert figures({"schema": SINGLE_CALLS - 1}) == NOT_MEASURED


def test_single_calls_stand_beside_times_in_a_sequence() -> None:
    report = made_up_report()
    for row in report["rows"]:
        row["ours"]["single_us"] = 10.0
        row["peers"] = {name: found | {"single_us": 12.5} for name, found in row["peers"].items()}
    assert "| 1.38 | 10.0 us / 12.5 us (1.25) |" in figures(report)


@pytest.mark.parametrize("name", ["draw_bandwidth", "draw_roofline"])
def test_pictures_are_drawn_with_failed_rows_and_without_peers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.decode import plots

    report = made_up_report()
    for row in report["rows"][::3]:
        row["ours"] = {"error": "UsageError: no kernel"}
        row.pop("tflop_per_s", None)
    for row in report["rows"][::2]:
        row["peers"] = {}
    image = tmp_path / "image.png"
    getattr(plots, name)(report, image)
    assert image.read_bytes().startswith(b"\x89PNG")
