"""The float64 reference of context attention against a sum written out, and against that of paged decode."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.attention.reference import paged_decode_reference

RNG = np.random.default_rng(7)
Q, K, V = (RNG.standard_normal((9, heads, 8)) for heads in (4, 2, 2))


def row(q: np.ndarray, k: np.ndarray, v: np.ndarray, cap: float = 0.0, sink: float | None = None) -> tuple:
    scores = [0.3 * sum(a * b for a, b in zip(q, key, strict=True)) for key in k]
    scores = [cap * math.tanh(s / cap) for s in scores] if cap else scores
    weights = [math.exp(s) for s in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    return sum(w * value for w, value in zip(weights, v, strict=True)) / total, math.log(total)


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        ({}, 0, 6),
        ({"window_left": 2}, 3, 6),
        ({"causal": False}, 0, 9),
        ({"causal": False, "window_left": 1, "window_right": 2}, 4, 8),
    ],
)
def test_a_row_sees_the_keys_around_its_position(options: dict, begin: int, end: int) -> None:
    # token 1 of 5 over 9 keys stands at position 5
    out, lse = context_attention_reference(Q[:5], K, V, [5], [9], 0.3, lse_base="e", **options)
    expected, total = row(Q[1, 3], K[begin:end, 1], V[begin:end, 1])
    np.testing.assert_allclose(out[1, 3], expected)
    assert lse[1, 3] == pytest.approx(total)


def test_caps_and_sinks() -> None:
    sinks = np.array([0.5, -1.0, 2.0, 1.0])
    out, lse = context_attention_reference(Q[:1], K, V, [1], [9], 0.3, logit_soft_cap=0.7, sinks=sinks)
    expected, total = row(Q[0, 2], K[:, 1], V[:, 1], cap=0.7, sink=2.0)
    np.testing.assert_allclose(out[0, 2], expected)
    assert lse[0, 2] == pytest.approx(total / math.log(2))
    _, without = context_attention_reference(
        Q[:1], K, V, [1], [9], 0.3, logit_soft_cap=0.7, sinks=sinks, lse_sink=False
    )
    assert 2.0 ** lse[0, 2] == pytest.approx(2.0 ** without[0, 2] + math.exp(2.0))


def test_rows_without_keys_are_zero() -> None:
    out, lse = context_attention_reference(Q[:5], K[:2], V[:2], [3, 2], [2, 0], 0.3)
    assert not out[0].any()
    assert not out[3:].any()
    assert np.isneginf(lse[[0, 3, 4]]).all()
    assert np.isfinite(lse[1:3]).all()


def test_drafts_agree_with_the_reference_of_paged_decode() -> None:
    pages = RNG.standard_normal((2, 5, 16, 2, 8))
    table, q_lens, kv_lens = np.array([[3, 0], [2, 4]]), [2, 3], [20, 9]
    options = {"sinks": [0.1, 0.2, 0.3, 0.4], "window_left": 12, "output_scale": 0.5}
    own = context_attention_reference(Q[:5], *pages, q_lens, kv_lens, 0.3, page_table=table, **options)
    other = paged_decode_reference(Q[:5], *pages, table, kv_lens, 0.3, q_cu_seq_lens=[0, 2, 5], **options)
    for mine, theirs in zip(own, other, strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_values_in_pages_of_their_own_are_found() -> None:
    k, v = RNG.standard_normal((2, 5, 16, 2, 8))
    table, moved = np.array([[3, 0], [2, 4]]), np.array([4, 2, 0, 1, 3])
    q_lens, kv_lens = [2, 3], [20, 9]
    tables = np.stack([table, moved[table]], axis=1)
    apart = np.empty_like(v)
    apart[moved] = v
    together = context_attention_reference(Q[:5], k, v, q_lens, kv_lens, 0.3, page_table=table)
    for own in (
        context_attention_reference(Q[:5], k, apart, q_lens, kv_lens, 0.3, page_table=tables),
        paged_decode_reference(Q[:5], k, apart, tables, kv_lens, 0.3, q_cu_seq_lens=[0, 2, 5]),
    ):
        for mine, theirs in zip(own, together, strict=True):
            np.testing.assert_allclose(mine, theirs)
