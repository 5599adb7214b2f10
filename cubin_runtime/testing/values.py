"""Values of tensors on the host as the bits that a device reads, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.values import bfloat16_bits, bfloat16_values, e4m3_bits, e4m3_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..protocols import DTypeName

_NARROW: dict[str, tuple[Callable[[Any], NDArray[Any]], Callable[[Any], NDArray[Any]]]] = {
    "bfloat16": (bfloat16_bits, bfloat16_values),
    "float8_e4m3fn": (e4m3_bits, e4m3_values),
}


def to_bits(dtype: DTypeName, values: Any) -> NDArray[Any]:
    """Values as an array that a device reads as ``dtype``; bfloat16 and float8_e4m3fn as unsigned integers."""
    if dtype in _NARROW:
        return _NARROW[dtype][0](values)
    array: NDArray[Any] = np.ascontiguousarray(values, dtype=dtype)
    return array


def from_bits(dtype: DTypeName, bits: Any) -> NDArray[Any]:
    """The values of such an array; what holds floats already is taken as it is."""
    array: NDArray[Any] = np.asarray(bits)
    if array.dtype.kind == "f":
        return array
    if dtype in _NARROW:
        return _NARROW[dtype][1](array)
    return array.view(dtype)
