"""Pages mark rows that were not measured with the pinned release's cubins."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from decode_results import made_up_report
from mla_results import made_up_mla_report

from benchmarks.decode import mla_page, page, regime
from benchmarks.decode.freshness import EARLIER, LEGEND, MARK, NAMES, SWEEP, explained, is_fresh, marked, pinned
from cubin_runtime.artifacts.pins.pin import BUILTIN_PINS, parse_pins
from tools.readme_figures import headlines

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
DIGESTS = frozenset({"a", "b"})
# Pages by the reports whose rows say which cubins they launched, or would, had they been measured lately.
BY_ROW = {
    "decode": ("decode", "engine_regime", "method_check"),
    "mla": ("mla",),
    "prefill": ("prefill",),
    "h100": ("decode_h100", "mla_h100", "prefill_h100"),
}
WHOLE = ("context_parallel", "transformers", "results/serving")
PROFILED = ("results/decode", "results/mla", "results/prefill")


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def name_of(row: dict[str, Any]) -> str:
    return next(row[name] for name in NAMES if name in row)


def test_the_digests_beside_the_results_are_the_pinned_releases() -> None:
    pins = {pin.name: pin.manifest_sha256 for pin in parse_pins(BUILTIN_PINS.read_bytes(), "pins.toml")}
    digest = hashlib.sha256((RESULTS / "checksums.txt").read_bytes()).hexdigest()
    assert digest == pins["hopper-0.1.0"], "copy the release's checksums.txt to benchmarks/results"


@pytest.mark.parametrize("page_name", BY_ROW)
def test_no_page_shows_a_stale_row_unmarked(page_name: str) -> None:
    digests = pinned(RESULTS)
    rows = [row for name in BY_ROW[page_name] for row in rows_of(name)]
    fresh = {name_of(row) for row in rows if is_fresh(row, digests)}
    stale = {name_of(row) for row in rows} - fresh
    text = (DOCS / "results" / f"{page_name}.md").read_text()
    by_row = text.partition("### Profiler")[0].partition("## Balance")[0]
    shown = re.findall(r"^\| ([^|]*?) \|", by_row, re.MULTILINE)
    assert [name for name in shown if name in stale] == []


@pytest.mark.parametrize("name", [*WHOLE, *PROFILED])
def test_figures_without_cubins_are_said_to_be_of_an_earlier_release(name: str) -> None:
    assert EARLIER in (DOCS / f"{name}.md").read_text()


@pytest.mark.parametrize(
    ("cubins", "fresh"), [({"k": "a"}, True), ({"k": "a", "l": "c"}, False), ({}, False), (None, False)]
)
def test_a_row_is_fresh_if_the_release_has_all_cubins_that_it_launched(
    cubins: dict[str, str] | None, fresh: bool
) -> None:
    assert is_fresh({"cubins": cubins} if cubins is not None else {}, DIGESTS) is fresh


@pytest.mark.parametrize("module", [page, mla_page])
def test_every_table_of_stale_rows_has_the_mark_in_each_line(module: Any) -> None:
    report = made_up_report() if module is page else made_up_mla_report()
    lines = [
        line
        for line in module.figures(marked(report, DIGESTS)).partition("### What failed")[0].splitlines()
        if line.startswith("| ") and not line.startswith(("|  |", "| batch"))
    ]
    assert lines
    assert [line for line in lines if MARK not in line.split("|")[1] + "|"] == []


def test_fresh_rows_have_no_mark_and_a_page_without_marks_no_explanation() -> None:
    report = made_up_report()
    for row in report["rows"]:
        row["cubins"] = {"kernel": "a"}
    text = page.figures(marked(report, DIGESTS))
    assert MARK not in text
    assert explained(text) == text
    assert explained(f"x{MARK}") == f"{LEGEND}\n\nx{MARK}"


def test_a_stale_headline_says_so(tmp_path: Path) -> None:
    for name in ("decode", SWEEP, "prefill", "fetch", "host_cost"):
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    (tmp_path / "checksums.txt").write_text("0000  other.cubin\n")
    assert headlines(tmp_path).count("measured with an earlier kernel") == 4


def test_tables_of_regimes_and_methods_mark_stale_rows_and_say_ratios() -> None:
    row = {"section": "few heads", "label": "8 x 1024", "us": {"ours, 64": 8.0, "fa2": 10.0}}
    environment = {"gpu": {"name": "GPU"}, "packages": {"vllm": "0.26.0"}, "date": "2026-01-02T03:04"}
    report = {"page": 16, "bounds": [64], "rows": [row], "environment": environment, "method": {"rounds": 5}}
    _, where, lines = regime.planned(marked(report | {"skipped": {"fa2": "ImportError: x"}}, DIGESTS))
    assert f"| few heads, 8 x 1024{MARK} | 8.0 us | 10.0 us | 1.25 |" in lines
    assert where == (
        "GPU; FlashAttention-3 of vLLM 0.26.0; 2026-01-02. Medians of 5 rounds. fa2 was not there (`ImportError: x`)."
    )
    other = {"label": "8 x 1024", "us": {"one way": {"ours": 8.0, "fa2": 10.0}, "another": {"fa2": 9.0}}}
    assert f"| 8 x 1024{MARK} | 8.0 us, 1.25 | failed |" in regime.other_methods(marked({"rows": [other]}, DIGESTS))[1]
