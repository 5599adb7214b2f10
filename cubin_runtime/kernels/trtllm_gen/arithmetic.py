"""Arithmetic as the reference launcher does it in C++: narrowing casts and division rounded up."""

from __future__ import annotations

from ctypes import c_float

from ...provenance import ArgumentNumber

INT32_MAX = 2**31 - 1


def float32(value: float) -> float:
    """The nearest float32, as a C cast gives it; too large becomes infinity."""
    rounded = c_float(value).value
    return value.rounded(rounded) if type(value) is ArgumentNumber else rounded


def int32(value: int) -> int:
    """The low 32 bits as a signed number, as a narrowing C cast gives them."""
    return (value + 0x80000000 & 0xFFFFFFFF) - 0x80000000


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up, of non-negative numbers."""
    return -(-dividend // divisor)


def is_power_of_two(value: int) -> bool:
    """Return whether ``value`` is 1, 2, 4, ..."""
    return value > 0 and value & (value - 1) == 0
