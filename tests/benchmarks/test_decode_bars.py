"""The bars of the decode benchmark: every case has the one that was set, and rows are judged by it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.decode.bars import NO_BAR, Bar, at_least, at_most, ratio_or_share
from benchmarks.decode.cases import PUBLISHED_BATCHES, SECTIONS, Case, cases_of, same, sections_of
from benchmarks.decode.rows import add_figures, disagreements, is_out_of_reach, judge, line_of, tally
from tests.benchmarks.decode_results import made_up_row, time_us

PART = (at_least("ratio_fa2", 0.97), at_least("read_share", 0.95))


def bars_of(section: str) -> dict[str, str]:
    return {case.label: str(case.bar) for case in SECTIONS[section]()}


def test_one_query_token_has_the_bars_that_were_set() -> None:
    assert bars_of("gqa") == {
        "1 x 1024": "1.50x or 93% of read",
        "1 x 16384": "1.40x or 93% of read",
        "8 x 4096": "1.25x or 93% of read",
        "32 x 4096": "1.04x or 93% of read",
        "64 x 8192": "0.99x and 95% of read",
        "128 x 2048": "1.03x or 93% of read",
    }


@pytest.mark.parametrize(
    ("head_dim", "q_len", "ratios"),
    [
        (128, 1, (None, None, None, None)),
        (128, 2, (1.06, 0.99, 0.99, 0.99)),
        (128, 4, (1.06, 0.99, 0.99, 0.99)),
        (128, 8, (1.55, 1.55, 1.55, 1.55)),
        (64, 1, (1.05, 1.05, 1.0, 1.0)),
        (64, 2, (1.05, 1.05, 1.0, 1.0)),
        (64, 4, (1.05, 1.05, 1.0, 1.0)),
        (64, 8, (1.7, 1.7, 1.7, 1.7)),
    ],
)
def test_several_query_tokens_have_the_bars_that_were_set(
    head_dim: int, q_len: int, ratios: tuple[float | None, ...]
) -> None:
    found = [case for case in SECTIONS["speculative"]() if (case.head_dim, case.q_len) == (head_dim, q_len)]
    assert [case.batch for case in found] == [8, 16, 32, 64]
    assert [case.bar for case in found] == [ratio_or_share(ratio) for ratio in ratios]


def test_grouping_covers_the_published_table_with_one_token_first() -> None:
    cases = SECTIONS["grouped"]()
    assert [(case.batch, case.q_len) for case in cases[:20]] == [
        (b, n) for b in PUBLISHED_BATCHES for n in (1, 2, 4, 8)
    ]
    assert {(case.model, case.q_heads, case.kv_heads, case.head_dim) for case in cases} == {
        ("Qwen3-480B", 96, 8, 128),
        ("GPT-OSS", 64, 8, 64),
    }
    assert {str(case.bar) for case in cases} == {
        "",
        "at most 1.10x one token or 70% of matrix",
        "at most 1.25x one token or 70% of matrix",
    }


def test_ragged_lengths_are_the_same_in_every_run() -> None:
    first, second = (SECTIONS["ragged"]()[0].lengths for _ in range(2))
    assert first == second
    assert (len(first), min(first) >= 1, max(first) <= 16384) == (64, True, True)


def test_bytes_of_a_call_are_those_of_its_keys_and_values() -> None:
    case = Case("gqa", "", same(64, 8192))
    assert case.kv_bytes == 64 * 8192 * 8 * 128 * 2 * 2
    assert case.pages * case.page_bytes == case.kv_bytes


@pytest.mark.parametrize(
    ("row", "met"),
    [
        ({"ratio_fa2": 1.0, "read_share": 0.96}, True),
        ({"ratio_fa2": 1.0, "read_share": 0.94}, False),
        ({"read_share": 0.96}, None),
        ({"read_share": 0.94}, False),
        ({"time_over_q1": 1.1}, True),
    ],
)
def test_alternatives_are_or_and_their_conditions_and(row: dict[str, float], met: bool | None) -> None:
    bar = Bar((PART, (at_most("time_over_q1", 1.1),))) if "time_over_q1" in row else Bar((PART,))
    assert bar.met(row) is met


def test_no_bar_is_neither_met_nor_missed() -> None:
    assert NO_BAR.met({"ratio": 2.0}) is None


@pytest.mark.parametrize(
    ("bar", "time"),
    [
        (ratio_or_share(1.5, 0.9), 10.0 * 1.2 / 1.5),
        (ratio_or_share(4.0, 0.6), 10.0 * 0.45 / 0.6),
        (Bar((PART,)), 10.0 * 0.45 / 0.95),
        (Bar(((at_most("over_default", 1.2),),)), 10.0 * 1.2 / 1.6),
        (Bar((PART, (at_least("over_bf16", 2.0),))), None),
        (NO_BAR, None),
    ],
)
def test_a_bar_allows_the_time_of_its_easiest_alternative(bar: Bar, time: float | None) -> None:
    row = {"ratio": 1.2, "ratio_fa2": 1.1, "read_share": 0.45, "over_default": 1.6}
    assert bar.time_us(row, 10.0) == (None if time is None else pytest.approx(time))


@pytest.mark.parametrize(("alone", "below"), [(8.1, True), (7.9, False)])
def test_a_bar_is_out_of_reach_where_every_alternative_asks_for_less_than_reading_alone(
    alone: float, below: bool
) -> None:
    row = {"ours": {"us": 10.0}, "ratio": 1.2, "read_share": 0.3, "read_alone_us": alone}
    judge(row, ratio_or_share(1.5))
    assert row["over_read_alone"] == pytest.approx(10.0 / alone)
    assert row.get("bar_below_read_alone", False) is below
    assert is_out_of_reach(row) is below


def test_a_bar_that_is_met_is_not_out_of_reach() -> None:
    row = {"ours": {"us": 10.0}, "ratio": 1.6, "read_alone_us": 11.0}
    judge(row, Bar(((at_least("ratio", 1.5),),)))
    assert (row["met"], is_out_of_reach(row)) == (True, False)


def test_a_bar_out_of_reach_is_printed_as_such() -> None:
    assert line_of(made_up_row(SECTIONS["gqa"]()[0])).endswith("[1.50x or 93% of read: not met, below read alone]")


def test_planning_anew_is_no_faster_peer() -> None:
    case = SECTIONS["ragged"]()[0]
    row = made_up_row(case)
    row["peers"]["fa2_plan_run"]["us"] = 1.0
    add_figures(row, case.bar, 4.5, 800.0)
    assert row["best_peer"] == "xqa"
    assert row["ratio"] == pytest.approx(time_us(case, "xqa") / time_us(case, "ours"))


def failing_row() -> dict[str, Any]:
    case = SECTIONS["gqa"]()[0]
    row = made_up_row(case) | {"ours": {"error": "UsageError: no kernel"}}
    add_figures(row, case.bar, 4.5, 800.0)
    return row


def test_a_failure_of_ours_misses_its_bar_and_is_printed() -> None:
    row = failing_row()
    assert row["met"] is False
    assert "UsageError: no kernel" in line_of(row)
    assert tally([row]) == {"met": 0, "not_met": 1, "undecided": 0}


def test_a_failed_peer_is_printed_beside_the_others() -> None:
    line = line_of(made_up_row(SECTIONS["gqa"]()[0]))
    assert "cudnn failed" in line
    assert "xqa 11.0" in line


def test_an_output_that_differs_from_a_peers_is_named() -> None:
    right, wrong, broken = (made_up_row(SECTIONS["fp8"]()[i]) for i in range(3))
    wrong["peers"]["xqa"]["difference"] = 0.3
    broken["peers"]["fa2"]["difference"] = math.nan
    assert disagreements([right, wrong, broken]) == [
        "fp8 q bf16, 32 x 4096: xqa 0.3",
        "fp8 q bf16, 128 x 2048: fa2 nan",
    ]
    assert "DISAGREES by 0.3" in line_of(wrong)
    assert "DISAGREES" not in line_of(right)


def test_sections_come_in_the_order_of_the_table() -> None:
    assert sections_of("fp8,gqa,") == ["gqa", "fp8"]
    assert sections_of(",".join(SECTIONS)) == list(SECTIONS)


@pytest.mark.parametrize("text", ["", ",", "gqa,other"])
def test_an_unknown_section_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected some of gqa,speculative,fp8"):
        sections_of(text)


def test_only_wanted_peers_are_measured_beside() -> None:
    assert {case.peers for case in cases_of(["gqa", "ragged"], ["fa2", "cudnn"])} == {("fa2", "cudnn"), ("fa2",)}
