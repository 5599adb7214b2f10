"""The page of the MLA decode holds the figures of its JSON, or says that there are none."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.decode.mla_page import figures, sparse, sparse_soak
from benchmarks.decode.sparse_mla_cases import sparse_mla_cases
from benchmarks.decode.tables import NOT_MEASURED, report_of
from tests.benchmarks.mla_results import made_up_mla_report


def test_without_a_measurement_there_is_no_figure(tmp_path: Path) -> None:
    assert figures(report_of(tmp_path / "mla.json")) == NOT_MEASURED


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    lines = figures(made_up_mla_report()).splitlines()
    tables = [(above, line) for above, line in pairwise(lines) if above.startswith("|")]
    assert [pair for pair in tables if pair[1].startswith("|") and pair[0].count("|") != pair[1].count("|")] == []


@pytest.mark.parametrize(
    "line",
    [
        "Read bandwidth 4.50 TB/s, bf16 matrix product 790 TFLOP/s.",
        "|  | ours | TFLOP/s | TB/s | of read bandwidth | read-only time | fa3 | ratio |\n",
        "| 128 heads, 1 x 4096 | 9.9 us | 116 | 0.48 | 11% | 7.5 us | 13.9 us | 1.40 |",
        "| 128 heads, 64 x 4096, q_len 2 | 248 us | 588 | 1.22 | 27% | 73.6 us | failed |  |",
        "| 16 heads, 128 x 8192, bf16 q, e4m3 KV | 142 us | 257 | 4.25 | 94% | 141 us | 1.30x |",
        "| 128 heads, 16 x 4096 | 34.6 us | 38.0 us | 1.10x |",
        "| bf16: 128 heads, 1 x 4096 | 4.9 us | 7.9 us | 1.62 |",
        "| fa3 | `RuntimeError: refused` | 1: bf16 128 heads, 64 x 4096, q_len 2 |",
    ],
)
def test_figures_show_rates_ratios_and_failures(line: str) -> None:
    assert line in figures(made_up_mla_report())


def test_without_a_measurement_nothing_is_said_of_sparse_decode(tmp_path: Path) -> None:
    assert sparse(report_of(tmp_path / "sparse_mla.json")) == ()


@pytest.mark.parametrize(
    "line",
    [
        "## Sparse MLA decode beside FlashMLA\n",
        "| 16 heads, 64 tokens | 27.1 us | 168 | 3.17 | 70% | 25.6 us | 31.1 us | 1.15 |",
        "### Rows of bf16\n\n|  | ours | TFLOP/s | TB/s | of read bandwidth | read-only time |\n",
        "| 16 heads, 16 tokens | 11.6 us | 12.8 us | 1.10x |",
    ],
)
def test_sparse_decode_has_a_table_for_each_type_of_rows(line: str) -> None:
    assert line in "\n\n".join(sparse(made_up_mla_report(sparse_mla_cases())))


def test_tables_of_lists_say_how_fast_such_rows_are_only_read() -> None:
    report = made_up_mla_report(sparse_mla_cases())
    for row in report["rows"]:
        row["read_tb_per_s"] = {"e4m3": 3.93, "bf16": 4.5}[row["kv_dtype"]]
    page = "\n\n".join(sparse(report))
    assert "### Rows of 656 bytes, read-only 3.93 TB/s\n" in page
    assert "### Rows of bf16, read-only 4.50 TB/s\n" in page


def test_a_failure_of_ours_leaves_the_others_time() -> None:
    report = made_up_mla_report()
    row = report["rows"][0]
    row["ours"] = {"error": "UsageError: no kernel"}
    for key in ("tflop_per_s", "tb_per_s", "read_share", "ratio"):
        del row[key]
    assert "| 128 heads, 1 x 4096 | failed |  |  |  | " in figures(report)
    assert "| ours | `UsageError: no kernel` | 1: bf16 128 heads, 1 x 4096 |" in figures(report)


def test_the_page_says_which_commit_of_flashmla_was_measured() -> None:
    report = made_up_mla_report() | {"peers_compiled": {"flashmla": {"commit": "0123456789" * 4, "seconds": 0.1}}}
    assert ", FlashMLA 0123456, torch" in figures(report)


def test_the_soak_says_how_many_replays_what_differed_and_how_memory_grew() -> None:
    row = {"label": "16 heads, 7 x 2,048", "replays": 12000, "plans": 3}
    row |= {"comparisons": 240, "different_elements": 0, "largest_difference": 0.0017}
    environment = {"gpu": {"name": "GPU"}, "date": "2026-01-02T00:00"}
    growth = {"device": 0, "host": 4096}
    text = sparse_soak({"environment": environment, "seconds": 60.0, "rows": [row], "growth": growth})
    assert "| 16 heads, 7 x 2,048 | 12,000 | 3 | 240 | 0 | 1.7e-03 |" in text
    assert "changed by 0 bytes on the device and 4,096 in the process" in text
