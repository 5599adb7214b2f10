from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.attention.values import bfloat16_bits, bfloat16_values, e4m3_bits, e4m3_values

CODES = np.arange(256)


def slow_e4m3(code: int) -> float:
    """The value of a code by the definition: a sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def slow_e4m3_bits(value: float) -> int:
    """The code closest to a value; of two, the even one. The values of both signs are searched one by one."""
    sign = 0x80 if np.signbit(value) else 0
    return min(range(0x7F), key=lambda code: (abs(slow_e4m3(code) - abs(value)), code & 1)) | sign


@given(st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80))
def test_finite_bfloat16_survives_a_round_trip(bits: int) -> None:
    assert int(bfloat16_bits(bfloat16_values(np.array([bits])))[0]) == bits


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (float("nan"), 0x7FC0), (float("inf"), 0x7F80)],
)
def test_bfloat16_is_rounded_to_nearest_even(value: float, bits: int) -> None:
    assert int(bfloat16_bits(np.array([value]))[0]) == bits


def test_every_e4m3_code_has_its_value() -> None:
    np.testing.assert_array_equal(e4m3_values(CODES), [slow_e4m3(code) for code in range(256)])


def test_negative_zero_keeps_its_sign() -> None:
    assert np.signbit(e4m3_values(np.array([0x80])))[0]
    assert int(e4m3_bits(np.array([-0.0]))[0]) == 0x80


def test_every_e4m3_code_but_nan_survives_a_round_trip() -> None:
    numbers = CODES[CODES & 0x7F != 0x7F]
    np.testing.assert_array_equal(e4m3_bits(e4m3_values(numbers)), numbers)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),
        (1e30, 0x7E),
        (float("inf"), 0x7E),
        (-float("inf"), 0xFE),
        (float("nan"), 0x7F),
        (2.0**-10, 0x00),
        (2.0**-10 * 1.01, 0x01),
        (1.5 * 2.0**-9, 0x02),
        (2.0**-6 - 2.0**-11, 0x08),
        (-5e-324, 0x80),
        (17.0, 0x58),
        (19.0, 0x5A),
    ],
)
def test_e4m3_is_rounded_to_nearest_even_and_saturates(value: float, bits: int) -> None:
    assert int(e4m3_bits(np.array([value]))[0]) == bits


@given(st.floats(-1000, 1000) | st.floats(-0.1, 0.1))
def test_e4m3_bits_are_the_closest(value: float) -> None:
    assert int(e4m3_bits(np.array([value]))[0]) == slow_e4m3_bits(value)


def test_the_middles_between_e4m3_values_go_to_the_even_one() -> None:
    values = e4m3_values(np.arange(0x7F)).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    np.testing.assert_array_equal(e4m3_bits(middles), [slow_e4m3_bits(value) for value in middles])


def test_shapes_are_kept() -> None:
    assert e4m3_bits(np.zeros((2, 3), np.float32)).shape == (2, 3)
    assert e4m3_values(np.zeros((2, 3), np.uint8)).dtype == np.float32
