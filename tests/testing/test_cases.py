"""Cases drawn by a seed, and the tolerances that outputs are compared with."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cubin_runtime.attention.tolerances import ROUNDING
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import (
    StandInDevice,
    assert_attention_close,
    assert_lse_close,
    from_bits,
    mla_case,
    paged_case,
    to_bits,
)

if TYPE_CHECKING:
    from cubin_runtime.protocols import DTypeName

LENGTHS = (130, 0, 1, 64)


def test_a_seed_gives_the_same_case_again() -> None:
    first, again, other = (paged_case(seed, LENGTHS) for seed in (7, 7, 8))
    assert np.array_equal(first.q, again.q)
    assert np.array_equal(first.cache[0], again.cache[0])
    assert not np.array_equal(first.q, other.q)


def test_no_page_is_shared_and_what_lies_past_a_length_is_nan() -> None:
    case = paged_case(0, LENGTHS, page_size=64)
    pages = [page for row in case.page_table for page in row if page >= 0]
    assert len(pages) == len(set(pages)) == 5
    keys = from_bits(case.dtype, case.cache[0])
    assert np.isfinite(keys[case.page_table[0, 2], : 130 - 128]).all()
    assert np.isnan(keys[case.page_table[0, 2], 130 - 128 :]).all()


@pytest.mark.parametrize("dtype", sorted(ROUNDING))
def test_a_reference_of_ragged_requests_reads_no_nan(dtype) -> None:
    case = paged_case(1, LENGTHS, q_lens=(3, 2, 0, 1), dtype=dtype)
    out, lse = case.reference()
    assert out.shape == (6, 32, 128)
    assert np.isfinite(out).all()
    assert np.isneginf(lse[3:5]).all()  # the request without keys
    assert np.isfinite(lse[:3]).all()


@pytest.mark.parametrize(("q_lens", "stated"), [(1, False), ((1, 1, 1), False), ((2, 0, 1), True), (2, True)])
def test_tokens_that_are_not_one_of_each_request_come_with_their_sums(
    cubin_standin_device: StandInDevice, q_lens: tuple[int, ...] | int, stated: bool
) -> None:
    case = paged_case(1, (5, 7, 3), q_lens=q_lens, q_heads=2, kv_heads=1, page_size=16)
    assert ("q_cu_seq_lens" in case.on(cubin_standin_device)) == stated


def test_a_latent_case_has_one_cache_and_the_latent_as_output() -> None:
    case = mla_case(2, (65, 3), heads=16)
    assert [cache.shape[-1] for cache in case.cache] == [576]
    assert case.reference()[0].shape == (2, 16, 512)


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (128, 32)])
def test_a_latent_case_of_another_width(latent: int, rope: int) -> None:
    case = mla_case(2, (65, 3), heads=16, latent=latent, rope=rope)
    assert [cache.shape[-1] for cache in case.cache] == [latent + rope]
    assert case.reference()[0].shape == (2, 16, latent)


@pytest.mark.parametrize("dtype", sorted(ROUNDING))
def test_a_rounded_reference_is_close(dtype) -> None:
    expected, lse = paged_case(3, LENGTHS, dtype=dtype).reference()
    assert_attention_close(to_bits(dtype, expected), expected, dtype=dtype, lse=lse, expected_lse=lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out.__setitem__((0, 1, 2), np.nan), r"NaN or infinity at \(0, 1, 2\)"),
        (
            lambda out: out.__setitem__((0, 1, 2), out.max() * 2),
            r"1 of 16384 elements are off, the first at \(0, 1, 2\)",
        ),
        (lambda out: out.__setitem__((2, 5), out[2, 5] * 1.02), r"1 of 128 rows are off, the first at \(2, 5\)"),
        (lambda out: out.__imul__(1.008), "relative error 8.00e-03, expected at most 6.00e-03"),
    ],
)
def test_a_wrong_output_is_named(change, message: str) -> None:
    expected, _ = paged_case(4, (200, 64, 65, 300)).reference()
    out = expected.copy()
    change(out)
    with pytest.raises(AssertionError, match=message):
        assert_attention_close(out, expected)


def test_a_wrong_log_sum_exp_is_named() -> None:
    expected, lse = paged_case(5, (65,)).reference()
    with pytest.raises(AssertionError, match=r"the LSE is off at \(0, 0\)"):
        assert_attention_close(expected, expected, lse=lse + 0.01, expected_lse=lse)


def test_a_log_sum_exp_is_never_close_to_nan() -> None:
    expected, lse = paged_case(5, (65,)).reference()
    with pytest.raises(AssertionError, match=r"the LSE is off at \(0, 0\)"):
        assert_attention_close(expected, expected, lse=lse, expected_lse=np.full_like(lse, np.nan))


@pytest.mark.parametrize("shape", [(1, 32), (32,), (2, 31), ()])
def test_a_log_sum_exp_of_another_shape_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"the LSE has shape (2, 32), expected {shape}")):
        assert_lse_close(np.zeros((2, 32)), np.zeros(shape))


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ((), {}, r"lengths=\[\]: expected 0 or more, of each of 1 request or more"),
        ((3, -1), {}, r"lengths=\[3, -1\]: expected 0 or more"),
        ((3, 4), {"q_lens": (1,)}, r"q_lens=\[1\]: expected 0 or more, of each"),
        ((3, 400), {"max_seq_len": 300}, "max_seq_len=300: expected at least 400"),
    ],
)
def test_requests_of_no_sense_are_refused(lengths: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    for case in (paged_case, mla_case):
        with pytest.raises(UsageError, match=message):
            case(0, lengths, **options)


def test_an_output_of_a_dtype_without_tolerances_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype='float32': expected one of bfloat16, float16, float8_e4m3fn"):
        assert_attention_close(np.ones((1, 1, 8)), np.ones((1, 1, 8)), dtype="float32")


@pytest.mark.parametrize(
    ("dtype", "off", "accepted"),
    [
        ("bfloat16", 0.026, False),
        ("float8_e4m3fn", 0.26, False),
        ("bfloat16", 0.016, True),
        ("float8_e4m3fn", 0.08, True),
    ],
)
def test_an_element_may_be_off_by_2_percent_of_the_largest_and_in_8_bits_by_its_rounding(
    dtype: DTypeName, off: float, accepted: bool
) -> None:
    expected = np.ones((1, 1, 4096))
    out = expected.copy()
    out[0, 0, 7] += off
    with nullcontext() if accepted else pytest.raises(AssertionError, match=r"1 of 4096 elements are off"):
        assert_attention_close(out, expected, dtype=dtype)
