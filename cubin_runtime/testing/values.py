"""Values of tensors on the host as the bits that a device reads, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention.values import bfloat16_bits, bfloat16_values, e4m3_bits, e4m3_values
from ..dtypes import DTYPES, ITEM_BYTES
from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..protocols import DTypeName

_NARROW: dict[str, tuple[Callable[[Any], NDArray[Any]], Callable[[Any], NDArray[Any]]]] = {
    "bfloat16": (bfloat16_bits, bfloat16_values),
    "float8_e4m3fn": (e4m3_bits, e4m3_values),
}


def to_bits(dtype: DTypeName, values: Any) -> NDArray[Any]:
    """Values as an array that a device reads as ``dtype``; bfloat16 and float8_e4m3fn as unsigned integers.

    Raises:
        UsageError: the dtype is unknown, or an integer dtype cannot represent the values.
    """
    if dtype in _NARROW:
        return _NARROW[dtype][0](values)
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    elements = np.asarray(values)
    array: NDArray[Any] = np.ascontiguousarray(elements.astype(dtype, copy=False))
    if "float" not in dtype and not np.array_equal(elements, array):
        raise UsageError(f"dtype={dtype!r}: does not hold {elements[elements != array][0]}")
    return array


def is_bits(dtype: DTypeName, array: NDArray[Any]) -> bool:
    """Return whether an array already contains the bits of a float dtype: unsigned integers of its size."""
    return "float" in dtype and array.dtype.kind == "u" and array.itemsize == ITEM_BYTES.get(dtype)


def from_bits(dtype: DTypeName, bits: Any) -> NDArray[Any]:
    """The values of an array of bits; an array of floats is returned as it is."""
    array: NDArray[Any] = np.asarray(bits)
    if array.dtype.kind == "f":
        return array
    if dtype in _NARROW:
        return _NARROW[dtype][1](array)
    return array.view(dtype)
