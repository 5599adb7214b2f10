"""The bits of bf16, fp16 and e4m3 on the host, decoded and drawn; made here apart from the package's own helpers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

_DRAWN = 1 << 16


@dataclass(frozen=True, slots=True)
class Kind:
    """A dtype: its name in views, the integers that hold its bits, a NaN, its unit roundoff and smallest step."""

    view: str
    bits: Any
    nan: int
    roundoff: float
    step: float
    largest: float


KINDS = {
    "bf16": Kind("bfloat16", np.uint16, 0x7FC0, 2.0**-8, 0.0, 3.3e38),
    "fp16": Kind("float16", np.uint16, 0x7E00, 2.0**-11, 2.0**-24, 65504.0),
    "e4m3": Kind("float8_e4m3fn", np.uint8, 0x7F, 2.0**-4, 2.0**-9, 448.0),
}


@cache
def e4m3_table() -> np.ndarray:
    """The 256 values of e4m3 as float32: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


def values_of(name: str, bits: np.ndarray) -> np.ndarray:
    """The float32 values of a dtype's bits."""
    if name == "e4m3":
        return e4m3_table()[bits]
    if name == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(name: str, values: np.ndarray) -> np.ndarray:
    """Values as a dtype's bits, to the nearest; e4m3 saturates, and its ties go up."""
    wide = np.ascontiguousarray(values, dtype=np.float32)
    if name == "fp16":
        return wide.astype(np.float16).view(np.uint16)
    if name == "bf16":
        words = wide.view(np.uint32)
        return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    sizes = e4m3_table()[:0x7F]
    nearest = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, np.abs(wide))
    return (nearest | np.where(wide < 0, 0x80, 0)).astype(np.uint8)


@cache
def _drawn(name: str) -> np.ndarray:
    return bits_of(name, np.random.default_rng(65536).standard_normal(_DRAWN, dtype=np.float32))


def normal_bits(name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values drawn from 65536 normal ones, as bits: many times faster than drawing each afresh."""
    return _drawn(name)[rng.integers(0, _DRAWN, size=shape, dtype=np.uint16)]
