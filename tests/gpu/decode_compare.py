"""Holding a decode's bits against float64: bounds that follow from the dtypes."""

from __future__ import annotations

import math

import numpy as np
from decode_cases import DecodeCase
from decode_values import KINDS, values_of

ELEMENT_TOLERANCE = 2.0e-2
# Relative to the norm: what rounding the probabilities costs, by the dtype they are multiplied in (e4m3 caches are
# computed on in fp16), and what rounding the output costs.
PROBABILITY_ERROR = {"bf16": 4.0e-3, "fp16": 1.5e-3, "e4m3": 1.5e-3}
OUTPUT_ERROR = {"bf16": 2.0e-3, "fp16": 5.0e-4, "e4m3": 4.0e-2}
ROW_FACTOR = 3.0  # a row of one (token, head) may err that much more than the whole
LSE_TOLERANCE = 4.0e-3
FP32_SLACK = 2.0e-6  # of sums in fp32
# Of what tensor cores add up when they multiply e4m3 by e4m3, whose low bits they drop; 2^-12.8 was seen.
E4M3_SCORE_ERROR = 2.0**-12


def score_error(head_dim: int, softmax_scale: float) -> float:
    """By how much a score (base-2 exponent) may be off where a kernel multiplies e4m3 queries by e4m3 keys as they are.

    Relative to a sum of head_dim products of numbers around 1, as random cases have them; large products that cancel
    would lose more.
    """
    return E4M3_SCORE_ERROR * head_dim * abs(softmax_scale) * math.log2(math.e)


def assert_close(
    case: DecodeCase,
    got: tuple[np.ndarray, np.ndarray | None],
    expected: tuple[np.ndarray, np.ndarray],
    of_scores: float = 0.0,
) -> float:
    """Hold output bits ``[tokens, heads, D]`` and the LSE against the reference; the relative error of the norm.

    Only tokens of the reference count; rows that no request owns may follow them. ``of_scores`` is what the kernel's
    scores may be off by beyond rounding, see ``score_error``.
    """
    want, want_lse = expected
    kind = KINDS[case.out_type]
    out = values_of(case.out_type, got[0])[: len(want)].astype(np.float64)
    assert np.isfinite(out).all(), f"the output holds NaN or infinity at {_first(~np.isfinite(out))}"
    size = np.abs(want).max(initial=0.0)
    want = np.clip(want, -kind.largest, kind.largest)
    _assert_elements(case, out, want, size)
    error = _assert_norms(case, out, want, of_scores)
    if got[1] is not None:
        assert_lse_close(got[1][: len(want)], want_lse, of_scores)
    return error


def _assert_elements(case: DecodeCase, out: np.ndarray, want: np.ndarray, size: float) -> None:
    """``size`` is that of the largest element before saturation, which errors go with."""
    unit = min(1.0, abs(case.output_scale))
    allowed = np.full(want.shape, ELEMENT_TOLERANCE * max(unit, size))
    if case.out_type == "e4m3":
        allowed += np.abs(want) * KINDS["e4m3"].roundoff + KINDS["e4m3"].step / 2
    wrong = np.abs(out - want) > allowed
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements are off, the first at {_first(wrong)}: "
        f"{out[wrong][0]}, expected {want[wrong][0]}"
    )


def _assert_norms(case: DecodeCase, out: np.ndarray, want: np.ndarray, of_scores: float) -> float:
    bound = PROBABILITY_ERROR[case.kv_dtype] + OUTPUT_ERROR[case.out_type] + of_scores * math.log(2)
    # Below the smallest normal number a rounding is a step, not a fraction.
    floor = KINDS[case.out_type].step * np.sqrt(case.head_dim)
    errors, norms = np.linalg.norm(out - want, axis=-1), np.linalg.norm(want, axis=-1)
    wrong = errors > ROW_FACTOR * bound * norms + floor
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} rows are off, the first at {_first(wrong)} by {errors[wrong][0]:.2e} "
        f"of {norms[wrong][0]:.2e}"
    )
    norm = float(np.linalg.norm(norms))
    error = float(np.linalg.norm(errors))
    assert error <= bound * norm + floor * np.sqrt(max(1, norms.size)), (
        f"relative error {error / max(norm, 1e-300):.2e}"
    )
    return error / norm if norm else error


def assert_lse_close(lse: np.ndarray, want: np.ndarray, of_scores: float = 0.0) -> None:
    """Hold the LSE against the reference, which may be off by as much as scores are; -inf must be -inf."""
    assert not np.isnan(lse).any(), f"the LSE holds NaN at {_first(np.isnan(lse))}"
    empty = np.isneginf(want)
    assert np.array_equal(np.isneginf(lse), empty), f"-inf differs at {_first(np.isneginf(lse) != empty)}"
    wrong = ~empty & (np.abs(np.where(empty, 0, lse) - np.where(empty, 0, want)) > LSE_TOLERANCE + of_scores)
    assert not wrong.any(), f"the LSE is off at {_first(wrong)}: {lse[wrong][0]}, expected {want[wrong][0]}"


def assert_rounded(case: DecodeCase, bits: np.ndarray, want: np.ndarray, of_parts: np.ndarray | float = 0.0) -> None:
    """Hold an output whose probabilities are all 1 against its values: only the output's rounding may differ.

    A sink may be the largest logit, and the probabilities one smaller value, rounded. ``of_parts`` is by how much
    rounded parts of a request may move each element.
    """
    out = values_of(case.out_type, bits).astype(np.float64)
    kind = KINDS[case.out_type]
    roundoff = 1.001 * kind.roundoff + (KINDS["bf16" if case.kv_dtype == "bf16" else "fp16"].roundoff * case.sinks)
    allowed = np.abs(want) * roundoff + kind.step / 2 + FP32_SLACK * np.abs(want).max(initial=1.0) + of_parts
    wrong = ~(np.abs(out - want) <= allowed)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements are off, the first at {_first(wrong)}: "
        f"{out[wrong][0]}, expected {want[wrong][0]}"
    )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
