"""Pages hold what their JSON says, and a made-up measurement is summed up rightly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from decode.l2_page import figures
from decode.regime import other_methods
from decode.summary import slower
from decode.tables import rewrite
from figures import DOCS, PICTURES, RESULTS
from parts.pages import PAGES

PEERS: dict[str, Any] = {"fa2": {"us": 9.0}}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_says_what_the_json_says(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert text == rewrite(text, PAGES[name](RESULTS)), "run: make figures"


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_has_a_measurement_and_is_there(name: str) -> None:
    assert (RESULTS / f"{PICTURES[name][0]}.json").is_file()
    assert (DOCS / f"{name}.png").is_file()


@pytest.mark.parametrize(("cubins", "words"), [("a", ""), ("b", "Measured with an earlier release of the kernels.")])
def test_figures_of_rows_that_are_not_of_the_pinned_release_say_so(cubins: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "checksums.txt").write_text("a  kernel.cubin\n")
    row = {"case": "decode", "default_us": 1.0, "invariant_us": 1.0, "ratio": 1.0, "cubins": {"kernel": cubins}}
    environment = {"gpu": {"name": "GPU"}, "packages": {}, "date": "2026-01-02T03:04"}
    (tmp_path / "invariant.json").write_text(json.dumps({"environment": environment, "rows": [row]}))
    assert PAGES["batch_invariance"](tmp_path).partition("GPU")[0].strip() == words


def test_rows_of_which_a_peer_is_faster_are_named_from_the_slowest_on() -> None:
    rows = [
        {"label": "8 x 64", "ratio": 0.97, "best_peer": "fa2"},
        {"label": "even", "ratio": 0.997, "best_peer": "fa2"},
        {"case": "prompt", "ratio": 0.9, "us": {"ours": 10.0, "fa3": 9.0, "cudnn": 9.5}},
        {"label": "16 x 64", "ratio": 0.95, "best_peer": "fa2"},
        {"label": "alone"},
    ]
    assert slower({"rows": rows}) == (
        "**Where another implementation is faster**, in 3 of the 4 rows with one: fa3 at prompt (0.90); "
        "fa2 at 16 x 64 (0.95), 8 x 64 (0.97).",
    )
    assert slower({"rows": rows[1:2]}) == (
        "**Where another implementation is faster**: in none of the 1 rows with one.",
    )
    assert slower({"rows": rows[4:]}) == slower({}) == ()


def test_other_methods_say_how_far_their_ratios_are_from_the_first() -> None:
    us = {"one": {"ours": 10.0, "fa2": 11.0}, "two": {"ours": 10.0, "fa2": 9.0}, "three": {"fa2": 1.0}}
    even = {"one": {"ours": 10.0, "fa2": 12.0}, "two": {"ours": 10.0, "fa2": 12.1}}
    assert other_methods({"rows": [{"label": "x", "us": us}, {"label": "y", "us": even}]})[-1] == (
        "Ratios are at most 0.20 from that of the first column; the least of all is 0.90. "
        "Who is faster changes in 1 of 2 cells: x, two (1.10 to 0.90)."
    )
    assert other_methods({"rows": [{"label": "x", "us": {"one": {}, "two": us["two"]}}]})[-1] == "No row has a ratio."


def test_the_table_of_l2_policies_has_a_line_for_each_family_and_what_the_kernels_have_now() -> None:
    rows = [
        {"family": "decode", "ratio": {"r-unchanged": ratio, "r-first": 1.0}, "same_bits": {"r": True}}
        for ratio in (0.98, 0.99, 1.02)
    ]
    rows += [
        {"family": name, "ratio": {"r-unchanged": 1.0, "r-first": 1.0}, "same_bits": {}}
        for name in ("few heads", "MLA groups", "append", "merge")
    ]
    times = {"r": {"us": 10.0, "rounds_us": [9.0, 10.5]}, "r-unchanged": {"us": 11.0, "rounds_us": [11.0]}}
    of_prefill = {"family": "prefill", "label": "a prompt", "times": times, "same_bits": {"r": True}}
    rows.append(of_prefill | {"ratio": {"r-unchanged": 0.9091, "r-first": 1.0}})
    report = {
        "environment": {"gpu": {"name": "GPU"}, "date": "2026-01-02T03:04"},
        "method": {"rounds": 5},
        "rows": rows,
    }
    operations = ("paged_decode", "paged_mla_decode", "groups of paged_mla_decode", "context_attention", "loads")
    text = figures(report, dict.fromkeys(operations, "evict_first"))
    assert "| 3 | evict_first | 0.990 (0.98 to 1.02) | 1.000 (1.00 to 1.00) | evict_first |" in text
    assert "| 1 | `__ldcs` | 1.000 (1.00 to 1.00) | - | evict_first |" in text
    assert "All outputs are bitwise identical." in text
    assert "An `evict_normal` hint was faster than none in 1 of 2 rows: a prompt (0.909, rounds 15% apart)." in text


@pytest.mark.parametrize("name", ["decode", "decode_groups", "mla", "decode_h100", "mla_h100"])
def test_no_row_is_faster_than_reading_alone_in_the_same_sequence(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert [row["label"] for row in rows if row["ours"]["us"] < row["read_alone_us"]] == []
    assert rows
