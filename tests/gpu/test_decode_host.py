"""The GPU tests' own helpers, on the host: cases cover what they should, and a wrong result is found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from cubin_runtime.attention.reference import bfloat16_bits, e4m3_bits, e4m3_values
from tests.gpu.decode_cases import DecodeCase, HostTensors, make_host, reference_of
from tests.gpu.decode_compare import assert_close, assert_lse_close, assert_rounded, score_error
from tests.gpu.decode_masks import keys_before_windows, mask_words, visible_keys
from tests.gpu.decode_means import make_means, means_of
from tests.gpu.decode_random import random_case
from tests.gpu.decode_values import KINDS, bits_of, e4m3_table, normal_bits, values_of
from tests.gpu.sanitizer_cases import spread_cases

SEEN = Callable[[int, int, "np.ndarray | None", int], np.ndarray]
SMALL = (1, 17, 64, 130)
BUSY = DecodeCase((300, 129, 65), 300, group=3, q_len=5, mask="tree", sinks=True, window_left=64, page_size=16)


def attention_by_pages(
    case: DecodeCase, host: HostTensors, seen: SEEN | None = None, sinks: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Attention row by row, each key read from its page where the tables say it is: what a kernel would do."""
    seen = seen or partial(visible_keys, by_index=case.by_index)
    outs, lses = [], []
    for b, request in enumerate(host.requests):
        visible = seen(len(request.k), len(request.q), request.mask, case.window_left)
        for queries, row in zip(values_of(case.q_type, request.q), visible, strict=True):
            out, lse = one_row(case, host, b, queries, np.flatnonzero(row), sinks)
            outs.append(out)
            lses.append(lse)
    bits = bits_of(case.out_type, np.array(outs).reshape(-1, case.q_heads, case.head_dim))
    return bits, np.array(lses, dtype=np.float32).reshape(-1, case.q_heads)


def one_row(case, host, b, queries, keys, sinks):
    found = host.page_table[b][..., keys // case.page_size]
    assert (found >= 0).all(), "a page that some row sees is not in the table"
    places = zip((host.k, host.v), found if case.separate else (found, found), strict=True)
    k, v = (values_of(case.kv_dtype, cache[at, keys % case.page_size]).astype(np.float64) for cache, at in places)
    assert not np.isnan(k).any(), "a key that some row sees is NaN"
    if host.kv_scales is not None:
        shape = case.batch, case.kv_heads
        k, v = (x * np.broadcast_to(by, shape)[b, :, None] for x, by in zip((k, v), host.kv_scales, strict=True))
    k, v = (np.repeat(cache, case.group, axis=1) for cache in (k, v))
    weights = np.exp(np.einsum("hd,nhd->nh", queries.astype(np.float64), k) * case.softmax_scale)
    total = weights.sum(axis=0)
    if sinks and host.sinks is not None:
        total = total + np.exp(host.sinks.astype(np.float64))
    sums = np.einsum("nh,nhd->hd", weights, v)
    out = np.divide(sums, total[:, None], out=np.zeros_like(sums), where=total[:, None] > 0) * case.output_scale
    with np.errstate(divide="ignore"):
        return out, np.log2(total)


@pytest.mark.parametrize("index", range(60))
def test_attention_by_pages_agrees_with_the_reference(index: int) -> None:
    rng = np.random.default_rng((4, index))
    case = random_case(rng, spans=SMALL, scale=0.1)
    case = replace(case, head_dim=min(case.head_dim, 128))
    host = make_host(case, rng)
    assert_close(case, attention_by_pages(case, host), reference_of(case, host))


@pytest.mark.parametrize("index", range(60))
def test_means_agree_with_attention_by_pages(index: int) -> None:
    rng = np.random.default_rng((5, index))
    case = random_case(rng, spans=SMALL)
    host = make_means(case, rng)
    want, want_lse = means_of(case, host)
    bits, lse = attention_by_pages(case, host)
    assert_rounded(case, bits, want)
    assert_lse_close(lse, want_lse)


def causal(kv_len, q_len, words, window):
    return visible_keys(kv_len, q_len, None, window)


def windowless(kv_len, q_len, words, window):
    return visible_keys(kv_len, q_len, words, -1)


def wider(kv_len, q_len, words, window):
    return visible_keys(kv_len, q_len, words, window + 1)


def narrower(kv_len, q_len, words, window):
    return visible_keys(kv_len, q_len, words, window - 1)


def one_key_lost(kv_len, q_len, words, window):
    seen = visible_keys(kv_len, q_len, words, window)
    seen[:, kv_len - q_len - 1] = False
    return seen


WRONG = {"causal": causal, "windowless": windowless, "wider": wider, "narrower": narrower, "a key lost": one_key_lost}


@pytest.mark.parametrize("kv_dtype", list(KINDS))
@pytest.mark.parametrize("wrong", list(WRONG))
def test_rows_that_see_other_keys_are_found_by_means(wrong: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(6)
    # Pages that a wider window needs are not freed here.
    case = replace(BUSY, kv_dtype=kv_dtype, out_dtype="fp16", page_size=256, sinks=False)
    host = make_means(case, rng)
    want, _ = means_of(case, host)
    assert_rounded(case, attention_by_pages(case, host)[0], want)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_rounded(case, attention_by_pages(case, host, WRONG[wrong])[0], want)


@pytest.mark.parametrize("wrong", ["causal", "windowless", "a key lost"])
def test_rows_that_see_other_keys_are_found_by_tolerance(wrong: str) -> None:
    rng = np.random.default_rng(7)
    case = replace(BUSY, page_size=256)
    host = make_host(case, rng)
    with pytest.raises(AssertionError, match="off"):
        assert_close(case, attention_by_pages(case, host, WRONG[wrong]), reference_of(case, host))


def test_forgotten_sinks_are_found() -> None:
    host = make_host(BUSY, np.random.default_rng(8))
    with pytest.raises(AssertionError, match="off"):
        assert_close(BUSY, attention_by_pages(BUSY, host, sinks=False), reference_of(BUSY, host))


@pytest.mark.parametrize("change", [{"scale": 0.09}, {"output_scale": 1.05}])
def test_another_scale_is_found(change: dict[str, float]) -> None:
    host = make_host(BUSY, np.random.default_rng(9))
    with pytest.raises(AssertionError, match="off"):
        assert_close(BUSY, attention_by_pages(replace(BUSY, **change), host), reference_of(BUSY, host))


@pytest.mark.parametrize("out_dtype", list(KINDS))
def test_nan_a_lost_row_and_a_wrong_lse_are_found(out_dtype: str) -> None:
    case = replace(BUSY, out_dtype=out_dtype)
    host = make_host(case, np.random.default_rng(10))
    bits, lse = attention_by_pages(case, host)
    expected = reference_of(case, host)
    for value in (KINDS[out_dtype].nan, 0):
        damaged = bits.copy()
        damaged[3, 2] = value
        with pytest.raises(AssertionError, match=r"NaN|off"):
            assert_close(case, (damaged, lse), expected)
    for value in (np.nan, -np.inf, lse[2, 1] + 0.01):
        damaged = lse.copy()
        damaged[2, 1] = value
        with pytest.raises(AssertionError, match=r"LSE|inf"):
            assert_close(case, (bits, damaged), expected)


def test_an_lse_may_be_off_by_what_scores_are_and_no_more() -> None:
    want = np.array([3.0, -np.inf, 40.0])
    of_scores = score_error(128, 1.0)
    assert of_scores == pytest.approx(0.0451, rel=1e-2)
    off = want + np.array([of_scores, 0.0, -of_scores])
    assert_lse_close(off, want, of_scores)
    with pytest.raises(AssertionError, match="LSE"):
        assert_lse_close(off, want)
    with pytest.raises(AssertionError, match="LSE"):
        assert_lse_close(want + np.array([2 * of_scores, 0.0, 0.0]), want, of_scores)


def test_rows_may_be_off_by_what_scores_are_and_no_more() -> None:
    host = make_host(BUSY, np.random.default_rng(10))
    want, want_lse = reference_of(BUSY, host)
    bits, lse = attention_by_pages(BUSY, host)
    assert_close(BUSY, (bits, lse), (want * 1.015, want_lse), 0.02)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(BUSY, (bits, lse), (want * 1.015, want_lse))


def test_the_matrix_covers_every_pair_of_options() -> None:
    names = [field.name for field in fields(DecodeCase)]
    free = {"lengths", "max_seq_len", "q_lens", "max_q_len", "spare_tokens", "spare_pages", "group", "q_len"}
    names = [name for name in names if name not in free]
    values: dict[str, set] = defaultdict(set)
    pairs = set()
    for index in range(3000):
        case = random_case(np.random.default_rng((11, index)))
        follows = {"page_size", "spare_columns"} if case.whole_pages else set()
        drawn = [(name, getattr(case, name)) for name in names if name not in follows]
        drawn += [("ragged", case.q_lens is not None), ("speculative", case.q_bound > 1)]
        for name, value in drawn:
            values[name].add(value)
        pairs |= set(combinations(drawn, 2))

    def impossible(a: tuple[str, object], b: tuple[str, object]) -> bool:
        if (a[0], b[0]) == ("kv_dtype", "q_dtype"):
            return a[1] != b[1] and a[1] != "e4m3"
        if (a[0], b[0]) == ("kv_dtype", "kv_scales"):
            return a[1] != "e4m3" and b[1] != ""
        return ("whole_pages", True) in (a, b) and not {"page_size", "spare_columns"}.isdisjoint((a[0], b[0]))

    order = list(values)
    wanted = [((a, x), (b, y)) for a, b in combinations(order, 2) for x in values[a] for y in values[b]]
    missing = [pair for pair in wanted if pair not in pairs and not impossible(*pair)]
    assert not missing, f"{len(missing)} of {len(wanted)}: {missing[:10]}"


def test_groups_and_query_lengths_are_all_drawn() -> None:
    cases = [random_case(np.random.default_rng((12, index))) for index in range(3000)]
    assert {case.group for case in cases} == set(range(1, 33))
    assert {case.q_bound for case in cases} == set(range(1, 65))
    assert any(0 in (case.q_lens or ()) for case in cases)
    assert any(max(case.lengths) >= 3000 for case in cases)
    assert any(0 < n < q for case in cases for n, q in zip(case.lengths, case.query_lens, strict=True))


def test_the_same_seed_draws_the_same_case() -> None:
    assert random_case(np.random.default_rng((1, 2))) == random_case(np.random.default_rng((1, 2)))


def test_fp8_agrees_with_the_package() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(e4m3_values(codes), e4m3_table())
    drawn = np.random.default_rng(13).standard_normal(10_000).astype(np.float32) * 30
    np.testing.assert_array_equal(bits_of("e4m3", drawn), e4m3_bits(drawn))
    np.testing.assert_array_equal(bits_of("bf16", drawn), bfloat16_bits(drawn))


@pytest.mark.parametrize("name", list(KINDS))
def test_drawn_values_are_normal(name: str) -> None:
    values = values_of(name, normal_bits(name, np.random.default_rng(14), (100, 100)))
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05


def test_trees_see_their_ancestors_alone() -> None:
    words = mask_words("tree", np.random.default_rng(15), 16)
    for i, word in enumerate(words):
        ancestors = [j for j in range(16) if int(word) >> j & 1]
        assert max(ancestors) == i
        assert all(words[j] & ~word == 0 for j in ancestors)


def test_freed_pages_lie_before_every_window() -> None:
    words = np.array([1, 3, 5], dtype=np.uint64)
    assert keys_before_windows(100, 3, words, 10) == 100 - 3 - 10
    assert keys_before_windows(100, 3, None, -1) == 0
    case = replace(BUSY, lengths=(300,), max_seq_len=300, window_left=64)
    host = make_host(case, np.random.default_rng(16))
    freed = np.flatnonzero(host.page_table[0] < 0)
    assert list(freed) == list(range((300 - 5 - 64) // 16))


def test_sanitizer_cases_spread_every_option() -> None:
    wide = {"dtype": "bf16", "q_dtypes": "bf16", "head_dim": 128, "rows": 8, "arithmetic": "warps"}
    narrow = {"dtype": "e4m3", "q_dtypes": "bf16,fp16,e4m3", "head_dim": 64, "rows": 16, "arithmetic": "warps"}
    cases = spread_cases(wide, 30) + spread_cases(narrow, 30)
    assert {case.q_type for case in cases} == {"bf16", "fp16", "e4m3"}
    assert {case.mask for case in cases} == {"none", "chain", "tree", "any"}
    assert {case.batch_invariant for case in cases} == {case.sinks for case in cases} == {False, True}
    assert any(case.q_lens for case in cases)
    assert any(case.window_left >= 0 for case in cases)
    assert sum(max(case.lengths) > 256 for case in cases) >= 10, "too few that are split"
