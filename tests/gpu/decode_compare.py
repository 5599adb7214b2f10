"""Comparing a decode's bits with float64: bounds that follow from the dtypes."""

from __future__ import annotations

import math

import numpy as np

from cubin_runtime.dtypes import BY_SHORT
from cubin_runtime.testing.compare import assert_attention_close, assert_lse_close
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_values import KINDS, values_of

__all__ = ["assert_close", "assert_lse_close", "assert_rounded", "score_error"]

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
    """Compare output bits ``[tokens, heads, D]`` and the LSE with the reference; the relative error of the norm.

    Only tokens of the reference count; rows that no request owns may follow them. ``of_scores`` is what the kernel's
    scores may be off by beyond rounding, see ``score_error``.
    """
    want, want_lse = expected
    return assert_attention_close(
        values_of(case.out_type, got[0])[: len(want)],
        want,
        dtype=BY_SHORT[case.out_type].name,
        kv_dtype=BY_SHORT[case.kv_dtype].name,
        lse=None if got[1] is None else got[1][: len(want)],
        expected_lse=want_lse,
        output_scale=case.output_scale,
        score_error=of_scores,
    )


def assert_rounded(case: DecodeCase, bits: np.ndarray, want: np.ndarray, of_parts: np.ndarray | float = 0.0) -> None:
    """Compare an output whose probabilities are all 1 with its values: only the output's rounding may differ.

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
