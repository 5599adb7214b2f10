"""Division by a fixed number: one multiply-high and one shift, as ``cuda::fast_mod_div<int32_t>`` does."""

from __future__ import annotations

import struct
from functools import lru_cache

from ..errors import UsageError
from ..values import dataclass

INT32_MAX = 2**31 - 1
_WORDS = struct.Struct("<iIIi")


@dataclass(frozen=True, slots=True)
class FastModDiv:
    """The four 32-bit words that a kernel needs to divide a non-negative int32 by ``divisor``.

    In memory (16 bytes, alignment 4): divisor int32, multiplier uint32, add uint32, shift int32.
    For divisor 1 the shift is -1, which tells the kernel to return the dividend itself.
    """

    divisor: int
    multiplier: int
    add: int
    shift: int

    SIZE = 16
    ALIGNMENT = 4

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, divisor: int) -> FastModDiv:
        """The words for ``divisor``, 1 to 2**31 - 1.

        Raises:
            UsageError: the divisor is outside that range.
        """
        if not 1 <= divisor <= INT32_MAX:
            raise UsageError(f"expected 1 to {INT32_MAX}", argument="divisor", value=divisor)
        # With l = ceil(log2 divisor), ceil(2**(31+l) / divisor) has an error too small to matter below 2**31.
        bits = (divisor - 1).bit_length()
        return cls(divisor, -(-(1 << (31 + bits)) // divisor), 0, bits - 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> FastModDiv:
        """Read the 16 bytes back as they stand; nothing is recomputed."""
        return cls(*_WORDS.unpack(data))

    def to_bytes(self) -> bytes:
        """The 16 bytes as a kernel reads them."""
        return _WORDS.pack(self.divisor, self.multiplier, self.add, self.shift)

    def divide(self, dividend: int) -> int:
        """``dividend // divisor`` by the words alone, as a kernel does; ``dividend`` 0 to 2**31 - 1."""
        if self.shift < 0:
            return dividend
        return (((dividend + self.add) * self.multiplier) >> 32) >> self.shift

    def modulo(self, dividend: int) -> int:
        """``dividend % divisor`` by the words alone."""
        return dividend - self.divide(dividend) * self.divisor
