"""The cases of the sparse MLA benchmark: sizes, and bars that a row of figures meets or does not."""

from __future__ import annotations

import pytest

from benchmarks.decode.rows import disagreements
from benchmarks.decode.sparse_mla_cases import sparse_mla_cases
from tests.benchmarks.mla_results import made_up_mla_row

CASES = {(case.section, case.label): case for case in sparse_mla_cases()}


def test_no_case_comes_twice() -> None:
    assert len(CASES) == len(sparse_mla_cases())


@pytest.mark.parametrize(("section", "row_bytes"), [("e4m3", 656), ("bf16", 1152)])
def test_bytes_and_products_of_a_case_are_those_of_the_listed_rows(section: str, row_bytes: int) -> None:
    case = CASES[section, "16 heads, 64 tokens"]
    assert case.kv_bytes == 64 * 2048 * row_bytes
    assert case.flops == 2 * 64 * 16 * 2048 * (576 + 512)


def test_query_tokens_of_a_request_have_lists_of_their_own() -> None:
    assert CASES["e4m3", "128 heads, 128 x 2 tokens"].kv_bytes == 256 * 2048 * 656


@pytest.mark.parametrize(
    ("section", "label", "figures", "met"),
    [
        ("e4m3", "16 heads, 64 tokens", {"time_us": 31.9, "ratio": 2.1}, True),
        ("e4m3", "8 heads, 64 tokens", {"time_us": 31.9, "ratio": 1.9}, False),
        ("e4m3", "16 heads, 64 tokens", {"time_us": 32.1, "ratio": 2.1}, False),
        ("e4m3", "16 heads, 64 tokens", {"time_us": 31.9}, None),
        ("e4m3", "8 heads, 256 tokens", {"time_us": 105.0}, True),
        ("e4m3", "16 heads, 1 token", {"time_us": 13.1}, False),
        ("e4m3", "32 heads, 64 tokens", {"time_us": 43.9}, True),
        ("e4m3", "64 heads, 128 x 2 tokens", {"ratio": 1.39}, False),
        ("e4m3", "128 heads, 128 x 2 tokens", {"ratio": 1.0}, True),
        ("bf16", "16 heads, 64 tokens", {"read_share": 0.74}, False),
        ("invariant", "16 heads, 1 token", {"over_default": 1.9}, True),
        ("invariant", "16 heads, 16 tokens", {"over_default": 1.16}, False),
        ("invariant", "16 heads, 64 tokens", {"over_default": 1.15}, True),
    ],
)
def test_bars(section: str, label: str, figures: dict[str, float], met: bool | None) -> None:
    assert CASES[section, label].bar.met(figures) is met


def test_rows_of_one_type_come_together() -> None:
    types = [case.kv_dtype for case in sparse_mla_cases()]
    assert types == sorted(types, key=["e4m3", "bf16"].index)


def test_without_the_peer_nothing_is_beside_it() -> None:
    assert not any(case.peer for case in sparse_mla_cases(peer=False))


@pytest.mark.parametrize(("difference", "named"), [(0.002, []), (0.02, ["bf16 16 heads, 64 tokens: float64 0.02"])])
def test_an_output_that_differs_from_the_reference_is_named(difference: float, named: list[str]) -> None:
    row = made_up_mla_row(CASES["bf16", "16 heads, 64 tokens"]) | {"reference_difference": difference}
    assert disagreements([row]) == named
