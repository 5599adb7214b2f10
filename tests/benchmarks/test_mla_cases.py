"""The cases of the MLA benchmark: sizes, and bars that a row of figures meets or does not."""

from __future__ import annotations

import pytest

from benchmarks.decode.mla_cases import MlaCase, mla_cases

CASES = {(case.section, case.label, case.batch_invariant): case for case in mla_cases()}


def found(section: str, label: str) -> MlaCase:
    return CASES[section, label, section == "invariant"]


def test_no_case_comes_twice() -> None:
    assert len(CASES) == len(mla_cases())


def test_bytes_and_products_of_a_case() -> None:
    case = found("bf16", "128 heads, 64 x 4096, q_len 2")
    assert case.kv_bytes == 64 * 4096 * 576 * 2
    assert case.flops == 2 * 64 * 2 * 128 * 4096 * (576 + 512)


@pytest.mark.parametrize(
    ("section", "label", "figures", "met"),
    [
        ("bf16", "128 heads, 1 x 4096", {"ratio": 1.61}, True),
        ("bf16", "128 heads, 1 x 4096", {"ratio": 1.59}, False),
        ("bf16", "128 heads, 128 x 8192", {"ratio": 1.11}, True),
        ("bf16", "128 heads, 128 x 8192", {}, None),
        ("bf16", "16 heads, 128 x 8192", {"ratio": 1.1, "read_share": 0.86}, True),
        ("bf16", "16 heads, 128 x 1024", {"ratio": 1.1, "read_share": 0.84}, False),
        ("bf16", "16 heads, 128 x 4096", {"ratio": 1.14, "read_share": 0.99}, False),
        ("bf16", "64 heads, 128 x 4096", {"ratio": 1.09}, True),
        ("fp8", "128 heads, 128 x 8192, e4m3 q, e4m3 KV", {"over_bf16": 1.26}, True),
        ("fp8", "128 heads, 128 x 8192, bf16 q, e4m3 KV", {"over_bf16": 0.84}, False),
        ("fp8", "16 heads, 128 x 8192, bf16 q, e4m3 KV", {"over_bf16": 1.5}, True),
        ("invariant", "128 heads, 16 x 4096", {"over_default": 1.14}, True),
        ("invariant", "128 heads, 1 x 4096", {"over_default": 2.0}, None),
    ],
)
def test_bars(section: str, label: str, figures: dict[str, float], met: bool | None) -> None:
    assert found(section, label).bar.met(figures) is met


def test_types_come_after_what_they_are_compared_with() -> None:
    seen = set()
    for case in mla_cases():
        if case.kv_dtype == "bf16":
            seen.add(case.sizes)
        assert case.sizes in seen


def test_without_the_peer_nothing_is_beside_it() -> None:
    assert not any(case.peer for case in mla_cases(peer=False))
