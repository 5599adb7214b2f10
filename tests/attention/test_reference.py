from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values, paged_decode_reference


def one_request(length: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 4, 8))
    cache = rng.standard_normal((2, 6, 4, 2, 8))
    return q, cache[0], cache[1], np.array([[5, 0, 3, -1]]), np.array([length])


def test_it_is_softmax_of_the_scores_over_the_pages_in_order() -> None:
    q, k, v, table, lens = one_request(9)
    out, lse = paged_decode_reference(q, k, v, table, lens, 0.5)
    for head in range(4):
        keys = np.concatenate([k[5], k[0], k[3]])[:9, head // 2]
        values = np.concatenate([v[5], v[0], v[3]])[:9, head // 2]
        weights = np.exp(keys @ q[0, head] * 0.5)
        np.testing.assert_allclose(out[0, head], weights @ values / weights.sum(), rtol=1e-12)
        assert lse[0, head] == pytest.approx(math.log2(weights.sum()), rel=1e-12)


def test_an_empty_request_is_zero_with_lse_of_minus_infinity() -> None:
    q, k, v, table, _ = one_request(0)
    out, lse = paged_decode_reference(q, k, v, table, np.array([0]), 0.5)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v, table, lens = one_request(9)
    out, lse = paged_decode_reference(q * 1e4, k, v, table, lens, 1.0)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


@given(st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80))
def test_finite_bfloat16_survives_a_round_trip(bits: int) -> None:
    assert int(bfloat16_bits(bfloat16_values(np.array([bits])))[0]) == bits


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (float("nan"), 0x7FC0), (float("inf"), 0x7F80)],
)
def test_rounding_is_to_nearest_even(value: float, bits: int) -> None:
    assert int(bfloat16_bits(np.array([value]))[0]) == bits
