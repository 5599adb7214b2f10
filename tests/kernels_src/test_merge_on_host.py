"""Merging of partial results, planned as the operator does and compiled for the host, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import plan_merge_states
from tests.gpu.merge_cases import MergeArrays, MergeCase, random_case
from tests.kernels_src.host_operators import SMALL, HostOperators, aligned, view_on

RANDOM_CASES = 60


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostOperators:
    return HostOperators(tmp_path_factory.mktemp("host"))


def merge(host: HostOperators, arrays: MergeArrays) -> None:
    tensors, options = arrays.arguments(view_on)
    host.run(plan_merge_states(**tensors, **options, runtime=host.runtime, device_facts=SMALL), tensors)


def merged(host: HostOperators, case: MergeCase, seed: Any) -> MergeArrays:
    arrays = MergeArrays(case, np.random.default_rng(seed), aligned)
    merge(host, arrays)
    arrays.check()
    return arrays


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_parts_merge_to_float64(host: HostOperators, index: int) -> None:
    merged(host, random_case(np.random.default_rng((11, index))), (12, index))


def test_more_rows_than_the_grid_has_lanes(host: HostOperators) -> None:
    merged(host, MergeCase(tokens=300, heads=33, dim=64, mask=True), 1)


@pytest.mark.parametrize(("parts", "other"), [(2, False), (2, True), (4, False), (5, True)])
def test_rows_that_are_merged_side_by_side_have_the_bits_of_others(
    host: HostOperators, parts: int, other: bool
) -> None:
    # Of few parts without a mask, as many rows as fill a CTA are merged at a time; others one after the other.
    results = []
    for masked in (False, True):
        case = MergeCase(tokens=40, parts=parts, other=other, out="float32", sinks=True, base="e")
        arrays = MergeArrays(case, np.random.default_rng(6), aligned)
        arrays.mask = np.ones(case.tokens, bool) if masked else None
        merge(host, arrays)
        results.append((arrays.out.tobytes(), np.ascontiguousarray(arrays.lse).tobytes()))
    assert results[0] == results[1]


def test_a_part_alone_keeps_its_bits(host: HostOperators) -> None:
    arrays = MergeArrays(MergeCase(empty=0.0), np.random.default_rng(2), aligned)
    arrays.s[:, 1:] = -np.inf
    arrays.v[:, 1:] = 0x7FC0
    first = arrays.v[:, 0].copy()
    merge(host, arrays)
    assert np.array_equal(arrays.out, first)
    assert np.array_equal(arrays.lse, arrays.s[:, 0])


def test_nothing_at_all_is_0_and_minus_infinity(host: HostOperators) -> None:
    arrays = merged(host, MergeCase(empty=1.0, out="float32"), 3)
    assert not arrays.out.any()
    assert np.isneginf(arrays.lse).all()


def test_a_nan_of_a_part_that_counts_stays(host: HostOperators) -> None:
    arrays = MergeArrays(MergeCase(empty=0.0, out="float32"), np.random.default_rng(4), aligned)
    arrays.s[0, 1] = np.nan
    merge(host, arrays)
    assert np.isnan(arrays.out[0]).all()
    assert np.isfinite(arrays.out[1:]).all()


def test_extreme_log_sum_exps_do_not_overflow(host: HostOperators) -> None:
    arrays = MergeArrays(MergeCase(empty=0.0), np.random.default_rng(5), aligned)
    arrays.s[...] *= 1e30
    arrays.given = arrays.s.copy()
    merge(host, arrays)
    arrays.check()
