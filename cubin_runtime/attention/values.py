"""The narrow floats of tensors, bit by bit, on the host: bfloat16 and float8 e4m3. Needs numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

E4M3_MAX = 448.0
_E4M3_MAX_CODE, _E4M3_NAN_CODE = 0x7E, 0x7F
_E4M3_LOWEST_EXPONENT = -6  # of normal values; below it the spacing stays


def bfloat16_bits(values: Any) -> NDArray[np.uint16]:
    """float32 values rounded to the nearest bfloat16 (ties to even), as their 16 bits. NaN stays NaN."""
    import numpy as np

    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bfloat16_values(bits: Any) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    import numpy as np

    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def e4m3_bits(values: Any) -> NDArray[np.uint8]:
    """Values of any float dtype rounded to the nearest e4m3 (ties to even), as its 8 bits.

    What is too large, infinities included, becomes the largest finite value of its sign (448), as a device
    converts with saturation. NaN becomes 0x7f. The sign of zero is kept.
    """
    import numpy as np

    wide = np.asarray(values, dtype=np.float64)
    size = np.minimum(np.abs(wide), E4M3_MAX)
    size = np.where(np.isnan(wide), 0.0, size)
    exponent = np.maximum(np.frexp(size)[1] - 1, _E4M3_LOWEST_EXPONENT)
    # Steps of the binade that the value is in; 16 of them are the first value of the next one.
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int64)
    code = (exponent - _E4M3_LOWEST_EXPONENT) * 8 + steps
    code = np.where(np.isnan(wide), _E4M3_NAN_CODE, np.minimum(code, _E4M3_MAX_CODE))
    return (code | np.where(np.signbit(wide) & ~np.isnan(wide), 0x80, 0)).astype(np.uint8)


def e4m3_values(bits: Any) -> NDArray[np.float32]:
    """The float32 values of e4m3 bits (the variant without infinities: 0x7f and 0xff are NaN)."""
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    table = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), normal)
    table = np.where(codes & 0x7F == _E4M3_NAN_CODE, np.nan, table)
    table = np.where(codes & 0x80, -table, table)
    return table.astype(np.float32)[np.asarray(bits, dtype=np.uint8)]
