"""Pages mark rows that were not measured with the pinned release's cubins."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.decode_results import made_up_report
from tests.benchmarks.mla_results import made_up_mla_report

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from parts.pages import PAGES

from benchmarks.decode import mla_page, page, regime
from benchmarks.decode.freshness import EARLIER, LEGEND, MARK, NAMES, explained, is_fresh, marked, pinned
from cubin_runtime.artifacts.pins.pin import BUILTIN_PINS, parse_pins
from tools.readme_figures import headlines

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
DIGESTS = frozenset({"a", "b"})
# Pages by the reports whose rows say which cubins they launched, or would, had they been measured lately.
BY_ROW = {
    "results/decode": ("decode", "decode_groups", "engine_regime", "method_check"),
    "results/mla": ("mla", "engine_regime_mla", "sparse_mla", "sparse_mla_soak"),
    "results/prefill": ("prefill", "engine_chunks", "context_e4m3"),
    "results/h100": ("decode_h100", "mla_h100", "prefill_h100"),
}
# Pages whose figures are said to be of an earlier release if one row is, by the reports.
WHOLE = {
    "append": ("append", ("append", "merge")),
    "batch_invariance": ("invariant", ("rows",)),
    "results/l2_policies": ("l2_policies", ("rows",)),
    "results/decode": ("profile", ("rows",)),
    "results/mla": ("profile", ("rows",)),
    "results/prefill": ("prefill_profile", ("rows",)),
}
WITHOUT_CUBINS = ("context_parallel", "results/serving")
OVERVIEW = ("decode", "mla", "prefill", "host_cost")
RELEASED = "0000"


def copied(folder: Path) -> Path:
    """A copy of all results, as measured with a release that has the cubin ``RELEASED`` alone."""
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "checksums.txt").write_text(f"{RELEASED}  one.cubin\n")
    return folder


def name_of(row: dict[str, Any]) -> str:
    return next(name for name in NAMES if name in row)


def test_the_digests_beside_the_results_are_the_pinned_releases() -> None:
    pins = {pin.name: pin.manifest_sha256 for pin in parse_pins(BUILTIN_PINS.read_bytes(), "pins.toml")}
    digest = hashlib.sha256((RESULTS / "checksums.txt").read_bytes()).hexdigest()
    assert digest == pins["hopper-0.1.0"], "copy the release's checksums.txt to benchmarks/results"


@pytest.mark.parametrize("report", sorted({name for names in BY_ROW.values() for name in names}))
def test_every_row_says_which_cubins_it_launched_and_of_which_commit(report: str) -> None:
    rows = json.loads((RESULTS / f"{report}.json").read_text())["rows"]
    digests = [digest for row in rows for digest in row["cubins"].values()]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert all(row["cubins"] and re.fullmatch("[0-9a-f]{40}", row["commit"]) for row in rows)


@pytest.mark.parametrize("page_name", BY_ROW)
def test_a_page_marks_every_mention_of_a_row_whose_cubin_is_not_the_releases_and_no_other(
    page_name: str, tmp_path: Path
) -> None:
    results, ages = copied(tmp_path), {}
    for report in BY_ROW[page_name]:
        content = json.loads((results / f"{report}.json").read_text())
        for row in content["rows"]:
            stamp = f"<{len(ages)}>"
            ages[stamp] = len(ages) % 3 == 0
            row["cubins"] = {"one": RELEASED, "two": "ffff" if ages[stamp] else RELEASED}
            row[name_of(row)] += stamp
        (results / f"{report}.json").write_text(json.dumps(content))
    mentions = re.findall(rf"(<\d+>)({re.escape(MARK)})?", PAGES[page_name](results))
    assert len(mentions) > len(ages) / 3
    assert [stamp for stamp, mark in mentions if bool(mark) != ages[stamp]] == []


@pytest.mark.parametrize("page_name", WHOLE)
def test_figures_that_share_a_statement_of_their_age_are_as_old_as_their_oldest_row(
    page_name: str, tmp_path: Path
) -> None:
    results, (report, keys) = copied(tmp_path), WHOLE[page_name]
    content = json.loads((results / f"{report}.json").read_text())
    for row in (row for key in keys for row in content[key]):
        row["cubins"] = {"one": RELEASED}
    (results / f"{report}.json").write_text(json.dumps(content))
    beside = results / "invariant_e4m3_h200.json"  # of the page on batch invariance
    beside.write_text(json.dumps({**content, "rows": []}))
    fresh = PAGES[page_name](results).count(EARLIER)
    content[keys[-1]][-1]["cubins"]["two"] = "ffff"
    (results / f"{report}.json").write_text(json.dumps(content))
    assert (fresh, PAGES[page_name](results).count(EARLIER)) == (0, 1)


@pytest.mark.parametrize("name", WITHOUT_CUBINS)
def test_figures_without_cubins_are_said_to_be_of_an_earlier_release(name: str) -> None:
    assert EARLIER in (DOCS / f"{name}.md").read_text()


def test_the_overview_and_the_readme_cite_rows_of_the_release_alone(tmp_path: Path) -> None:
    results = copied(tmp_path)
    assert PAGES["results/index"](results).count("measured with an earlier release") == len(OVERVIEW)
    for report in OVERVIEW:
        content = json.loads((results / f"{report}.json").read_text())
        rows = content["microseconds"].values() if report == "host_cost" else content["rows"]
        for ratio, row in enumerate(rows, 2):
            row["cubins"] = {"one": RELEASED if ratio == 2 else "ffff"}
            row["ratio"] = row["read_share"] = float(ratio)
        (results / f"{report}.json").write_text(json.dumps(content))
    lines = PAGES["results/index"](results)
    assert lines.count("in sequences of layers 2.00 to 2.00 times") == len(OVERVIEW) - 1
    assert "up to 200% of the read bandwidth" in lines
    assert headlines(results).startswith("| figure | what was measured | details |\n| --- | --- | --- |\n| **200% of")


def test_steps_of_transformers_that_are_not_of_the_release_are_said_to_be_of_an_earlier_one() -> None:
    steps = json.loads((RESULTS / "transformers.json").read_text())["steps"]
    fresh = all(is_fresh(row, pinned(RESULTS)) for row in steps)
    assert (EARLIER in (DOCS / "transformers.md").read_text()) is not fresh


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


def test_a_stale_headline_is_left_out(tmp_path: Path) -> None:
    text = headlines(copied(tmp_path))
    assert text.count("**") == 2
    assert "faster cold fetch" in text
    assert text.endswith("The picture was measured with an earlier kernel.")


def test_tables_of_regimes_and_methods_mark_stale_rows_and_say_ratios() -> None:
    row = {"section": "few heads", "label": "8 x 1024", "us": {"ours, 64": 8.0, "fa2": 10.0}}
    environment = {"gpu": {"name": "GPU"}, "packages": {"vllm": "0.26.0"}, "date": "2026-01-02T03:04"}
    report = {"page": 16, "bounds": [64], "rows": [row], "environment": environment, "method": {"rounds": 5}}
    _, where, lines = regime.planned(marked(report | {"skipped": {"fa2": "ImportError: x"}}, DIGESTS))
    assert f"| few heads, 8 x 1024{MARK} | 8.0 us | 10.0 us | 1.25 |" in lines
    assert where == (
        "GPU; FlashAttention-3 of vLLM 0.26.0; 2026-01-02. Medians of 5 rounds. fa2 was not there (`ImportError: x`)."
    )
    behind = {"us": {"ours, tight": 9.0, "ours, 64": 8.0, "fa3": 10.0}, "errors": {"fa3": "x"}}
    less = row | {"us": {"ours, tight": 8.0}}
    lines = regime.chunks(
        marked(report | {"skipped": {}, "rows": [row | behind, less | {"errors": {"fa3": "x"}}]}, DIGESTS)
    )[2]
    assert f"| few heads, 8 x 1024{MARK} | 9.0 us | 8.0 us | 10.0 us | 1.11 |" in lines
    assert f"| few heads, 8 x 1024{MARK} | 8.0 us | - | failed |  |" in lines
    other = {"label": "8 x 1024", "us": {"one way": {"ours": 8.0, "fa2": 10.0}, "another": {"fa2": 9.0}}}
    assert f"| 8 x 1024{MARK} | 8.0 us, 1.25 | failed |" in regime.other_methods(marked({"rows": [other]}, DIGESTS))[1]
