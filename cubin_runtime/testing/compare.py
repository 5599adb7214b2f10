"""Comparison of attention with float64, with tolerances derived from the dtypes, so that tests need not state them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.tolerances import ELEMENT_TOLERANCE, LSE_TOLERANCE, ROUNDING, ROW_FACTOR, Rounding, probability_dtype
from ..errors import UsageError
from .values import from_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..protocols import DTypeName

    Array = NDArray[Any]


def assert_attention_close(
    out: Any,
    expected: Any,
    *,
    dtype: DTypeName = "bfloat16",
    kv_dtype: DTypeName | None = None,
    lse: Any = None,
    expected_lse: Any = None,
    output_scale: float = 1.0,
    score_error: float = 0.0,
) -> float:
    """Compare an attention output with the float64 reference, and return the relative error of the norm.

    Three bounds follow from the dtypes: the error of each element is at most 2 % of the largest element, that of the
    norm at most the rounding of probabilities and output (bfloat16: 0.6 %), and that of each row (token, head) at most
    three times that. NaN and infinity are errors. Values beyond the dtype's largest saturate.

    Args:
        out: ``[tokens, heads, head_dim]``, values, or the dtype's bits as unsigned integers.
        expected: float64 of the same shape.
        dtype: of the output: bfloat16, float16 or float8_e4m3fn.
        kv_dtype: of the KV cache; None: ``dtype``.
        lse: log-sum-exp in base 2, ``[tokens, heads]``; None: not compared.
        expected_lse: float64 of the same shape.
        output_scale: the factor of the output, with which errors scale.
        score_error: allowed error of the scores beyond rounding, as base-2 exponents.

    Raises:
        AssertionError: a bound is broken; the message names the first element or row and both values.
        UsageError: a dtype is another.
    """
    for name, word in (("dtype", dtype), ("kv_dtype", kv_dtype or dtype)):
        if word not in ROUNDING:
            raise UsageError(f"expected one of {', '.join(ROUNDING)}", argument=name, value=repr(word))
    rounding, products = ROUNDING[dtype], ROUNDING[probability_dtype(kv_dtype or dtype)]
    got = np.asarray(from_bits(dtype, out), dtype=np.float64)
    assert got.shape == np.shape(expected), f"the output has shape {got.shape}, expected {np.shape(expected)}"
    assert np.isfinite(got).all(), f"the output holds NaN or infinity at {_first(~np.isfinite(got))}"
    size = np.abs(expected).max(initial=0.0)
    want = np.clip(expected, -rounding.largest, rounding.largest)
    _assert_elements(got, want, max(min(1.0, abs(output_scale)), size), rounding if rounding.roundoff > 0.01 else None)
    # Below the smallest normal number a rounding is a step, not a fraction.
    bound, floor = (
        products.probabilities + rounding.output + score_error * math.log(2),
        rounding.step * np.sqrt(want.shape[-1]),
    )
    error = _assert_norms(got, want, bound, floor)
    if lse is not None:
        assert_lse_close(lse, expected_lse, score_error)
    return error


def assert_lse_close(lse: Any, expected: Any, score_error: float = 0.0) -> None:
    """Compare log-sum-exps, with a tolerance of 0.004 plus ``score_error``; -inf must be -inf.

    Raises:
        AssertionError: a value differs by more; the message names it.
    """
    lse, expected = np.asarray(lse), np.asarray(expected)
    assert lse.shape == expected.shape, f"the LSE has shape {lse.shape}, expected {expected.shape}"
    assert not np.isnan(lse).any(), f"the LSE holds NaN at {_first(np.isnan(lse))}"
    empty = np.isneginf(expected)
    assert np.array_equal(np.isneginf(lse), empty), f"-inf differs at {_first(np.isneginf(lse) != empty)}"
    distance = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, expected))
    wrong = ~empty & ~(distance <= LSE_TOLERANCE + score_error)  # a NaN that is expected, too
    assert not wrong.any(), f"the LSE is off at {_first(wrong)}: {lse[wrong][0]}, expected {expected[wrong][0]}"


def _assert_elements(out: Array, want: Array, size: float, coarse: Rounding | None) -> None:
    """``coarse`` is the rounding of an output whose steps are no smaller than the tolerance."""
    allowed = np.full(want.shape, ELEMENT_TOLERANCE * size)
    if coarse is not None:
        allowed += np.abs(want) * coarse.roundoff + coarse.step / 2
    wrong = np.abs(out - want) > allowed
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements are off, the first at {_first(wrong)}: "
        f"{out[wrong][0]}, expected {want[wrong][0]}"
    )


def _assert_norms(out: Array, want: Array, bound: float, floor: float) -> float:
    errors, norms = np.linalg.norm(out - want, axis=-1), np.linalg.norm(want, axis=-1)
    wrong = errors > ROW_FACTOR * bound * norms + floor
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} rows are off, the first at {_first(wrong)} by {errors[wrong][0]:.2e} "
        f"of {norms[wrong][0]:.2e}"
    )
    norm = float(np.linalg.norm(norms))
    error = float(np.linalg.norm(errors))
    assert error <= bound * norm + floor * np.sqrt(max(1, norms.size)), (
        f"relative error {error / max(norm, 1e-300):.2e}, expected at most {bound:.2e}"
    )
    return error / norm if norm else error


def _first(wrong: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
