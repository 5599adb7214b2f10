from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.attention.reference import paged_decode_reference

HEAD_DIM = 8
PAGE_SIZE = 4


@dataclass(frozen=True)
class Case:
    """A small decode of requests of any lengths, its pages in no order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    lens: np.ndarray
    cu: np.ndarray

    @property
    def all(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k, self.v, self.table, self.lens


def make_case(q_lens: list[int], kv_lens: list[int], kv_heads: int = 2, group: int = 2, seed: int = 7) -> Case:
    rng = np.random.default_rng(seed)
    columns = max(1, -(-max(kv_lens) // PAGE_SIZE))
    pages = len(kv_lens) * columns
    cache = rng.standard_normal((2, pages, PAGE_SIZE, kv_heads, HEAD_DIM))
    return Case(
        q=rng.standard_normal((sum(q_lens), kv_heads * group, HEAD_DIM)),
        k=cache[0],
        v=cache[1],
        table=rng.permutation(pages).reshape(len(kv_lens), columns),
        lens=np.array(kv_lens),
        cu=np.concatenate([[0], np.cumsum(q_lens)]),
    )


def sees(row: int, q_len: int, key: int, kv_len: int, word: int, window_left: int, by_index: bool) -> bool:
    """The rule for one query token and one key, as it is written down."""
    draft = key - (kv_len - q_len)
    position = kv_len - q_len + (row if by_index else sum(word >> j & 1 for j in range(q_len)) - 1)
    if row < q_len - kv_len:
        return False
    if draft >= 0 and not word >> int(draft) & 1:
        return False
    return window_left < 0 or key >= position - window_left


def slow(
    case: Case,
    scale: float,
    mask: Any = None,
    sinks: Any = None,
    window_left: int = -1,
    output_scale: float = 1.0,
    draft_position: str = "depth",
) -> tuple[np.ndarray, np.ndarray]:
    """Attention one token, one head and one key at a time."""
    out, lse = np.zeros(case.q.shape), np.full(case.q.shape[:2], -math.inf)
    group = case.q.shape[1] // case.k.shape[2]
    for b, kv_len in enumerate(case.lens):
        q_len = case.cu[b + 1] - case.cu[b]
        for row in range(q_len):
            token = case.cu[b] + row
            word = (2 << row) - 1 if mask is None else int(mask[token])
            rule = word, window_left, draft_position == "index"
            keys = [key for key in range(kv_len) if sees(row, q_len, key, kv_len, *rule)]
            for head in range(case.q.shape[1]):
                place = [(case.table[b, key // PAGE_SIZE], key % PAGE_SIZE, head // group) for key in keys]
                weights = [math.exp(scale * (case.q[token, head] @ case.k[at])) for at in place]
                total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[head]))
                if total:
                    lse[token, head] = math.log2(total)
                for weight, at in zip(weights, place, strict=True):
                    out[token, head] += output_scale * weight / total * case.v[at]
    return out, lse


def assert_same(case: Case, uniform: bool = False, **options: Any) -> None:
    cu = None if uniform else case.cu
    got = paged_decode_reference(*case.all, 0.4, q_cu_seq_lens=cu, **options)
    for ours, theirs in zip(got, slow(case, 0.4, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def random_words(case: Case, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, len(case.q), dtype=np.uint32)


# Two branches of two: a tree over four drafts after their root.
TREE = np.array([0b00001, 0b00011, 0b00101, 0b01011, 0b10101], dtype=np.uint32)
SINKS = np.array([0.3, -1.0, 2.0, -30.0])


def test_one_token_sees_all_keys_over_the_pages_in_order() -> None:
    assert_same(make_case([1, 1, 1], [9, 4, 1]), uniform=True)


def test_several_tokens_see_one_another_causally() -> None:
    assert_same(make_case([5, 5], [9, 14]), uniform=True)


def test_requests_may_differ_in_query_tokens_down_to_none() -> None:
    assert_same(make_case([0, 3, 0, 1, 16, 0], [5, 9, 0, 30, 17, 3]))


def test_a_tree_sees_its_branches() -> None:
    assert_same(make_case([5, 5], [9, 12]), mask=np.tile(TREE, 2))


@pytest.mark.parametrize("window_left", [0, 1, 2, 5, 100])
def test_a_window_counts_from_the_position(window_left: int) -> None:
    assert_same(make_case([1, 4, 2], [9, 11, 2]), window_left=window_left)


@pytest.mark.parametrize("window_left", [0, 1, 3])
def test_a_window_counts_from_the_depth_in_a_tree(window_left: int) -> None:
    assert_same(make_case([5, 5], [9, 12]), mask=np.tile(TREE, 2), window_left=window_left)


@pytest.mark.parametrize("window_left", [0, 1, 3])
def test_a_window_may_count_from_the_index_of_a_query_token(window_left: int) -> None:
    case = make_case([3, 16, 7, 1], [20, 16, 5, 5])
    assert_same(case, mask=random_words(case), window_left=window_left, draft_position="index")


def test_any_pattern_is_a_mask_and_bits_over_the_query_tokens_mean_nothing() -> None:
    case = make_case([3, 16, 7, 1], [20, 16, 9, 5])
    assert_same(case, mask=random_words(case), window_left=4, sinks=SINKS)


def test_a_mask_of_64_query_tokens() -> None:
    case = make_case([33, 64, 1], [70, 64, 5])
    words = np.random.default_rng(4).integers(0, 1 << 64, len(case.q), dtype=np.uint64)
    assert_same(case, mask=words, window_left=40)


def test_a_mask_of_no_bits_leaves_what_is_in_front() -> None:
    assert_same(make_case([2], [6]), mask=np.zeros(2, np.uint32))


@pytest.mark.parametrize("kv_len", [0, 1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_fewer_keys_than_query_tokens_leave_the_first_rows_empty(kv_len: int, masked: bool) -> None:
    case = make_case([4, 1], [kv_len, 6])
    assert_same(case, mask=random_words(case) if masked else None)
    out, lse = paged_decode_reference(*case.all, 0.4, q_cu_seq_lens=case.cu)
    assert not out[: 4 - kv_len].any()
    assert np.isneginf(lse[: 4 - kv_len]).all()


def test_sinks_enter_the_denominator_and_the_lse() -> None:
    assert_same(make_case([1, 4], [9, 6]), sinks=SINKS)


def test_sinks_by_kv_head_are_the_same_sinks() -> None:
    case = make_case([1], [9])
    flat, shaped = (paged_decode_reference(*case.all, 0.4, sinks=s) for s in (SINKS, SINKS.reshape(2, 2)))
    np.testing.assert_array_equal(flat[0], shaped[0])


def test_an_empty_row_with_a_sink_has_the_sink_as_lse() -> None:
    case = make_case([2, 1], [1, 0])
    out, lse = paged_decode_reference(*case.all, 0.4, q_cu_seq_lens=case.cu, sinks=SINKS)
    np.testing.assert_allclose(lse[[0, 2]], np.tile(SINKS * math.log2(math.e), (2, 1)), rtol=1e-15)
    assert not out[[0, 2]].any()


def test_the_output_scale_leaves_the_lse_alone() -> None:
    assert_same(make_case([2, 1], [7, 3]), output_scale=-2.5, sinks=SINKS)


def test_everything_together() -> None:
    case = make_case([0, 16, 2, 5, 1], [9, 33, 1, 0, 12], kv_heads=1, group=4)
    assert_same(case, mask=random_words(case), sinks=SINKS, window_left=7, output_scale=0.5)


@given(
    lens=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 13)), min_size=1, max_size=4),
    masked=st.booleans(),
    sinks=st.sampled_from([None, SINKS]),
    window_left=st.integers(-1, 8),
    seed=st.integers(0, 1000),
)
def test_any_mixture(
    lens: list[tuple[int, int]], masked: bool, sinks: np.ndarray | None, window_left: int, seed: int
) -> None:
    case = make_case([q_len for q_len, _ in lens], [kv_len for _, kv_len in lens], seed=seed)
    assert_same(case, mask=random_words(case, seed) if masked else None, sinks=sinks, window_left=window_left)


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_large_scores_do_not_overflow(sinks: Any) -> None:
    case = make_case([2, 1], [9, 4])
    out, lse = paged_decode_reference(
        case.q * 1e4, *case.all[1:], 1.0, q_cu_seq_lens=case.cu, sinks=sinks, window_left=3
    )
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_pages_past_a_length_and_out_of_the_window_are_not_read() -> None:
    case = make_case([1], [10])
    table = np.array([[10**6, case.table[0, 1], case.table[0, 2], -1]])
    k, v = case.k.copy(), case.v.copy()
    for cache in (k, v):
        cache[table[0, 2], 2:] = np.nan
        cache[table[0, 1], :2] = np.nan
    out, lse = paged_decode_reference(case.q, k, v, table, case.lens, 0.4, window_left=3)
    expected = slow(case, 0.4, window_left=3)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12)
