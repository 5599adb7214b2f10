"""Addresses and numbers that know which argument of a call they were computed from.

While a call is traced, the address of each tensor that is read is an ``ArgumentAddress``, and the scales of the call
are ``ArgumentNumber``s. They go through views, layouts and products as the ints and floats that they are, and arrive in
the launch with the tensor that they point into, or with the arguments whose product they are. What arithmetic does not
follow is a plain number again.
"""

from __future__ import annotations

import threading
from itertools import count

calls = count(1)


class _Traced(threading.local):
    """The number of the call that this thread traces, or 0: its addresses and numbers bear it."""

    call = 0


traced = _Traced()


class ArgumentAddress(int):
    """An address in the tensor whose ``id`` is ``tensor``, read in the traced call of the number ``call``."""

    call: int
    tensor: int

    def __add__(self, other: int) -> int:
        moved = ArgumentAddress(int(self) + other)
        moved.call, moved.tensor = self.call, self.tensor
        return moved

    __radd__ = __add__


class ArgumentNumber(float):
    """The product of ``factors`` from left to right: names of arguments of the traced call ``call``, and constants."""

    call: int
    factors: tuple[str | float, ...]

    def __mul__(self, other: float) -> float:
        if type(other) is ArgumentNumber and other.call == self.call:
            if len(other.factors) == 1:
                return self._times(other, *other.factors)
            return other._times(self, *self.factors) if len(self.factors) == 1 else float(self) * float(other)
        return self if other == 1.0 else self._times(other, float(other))

    __rmul__ = __mul__

    def _times(self, other: float, factor: str | float) -> ArgumentNumber:
        return _number(float(self) * float(other), self.call, (*self.factors, factor))

    def rounded(self, to: float) -> ArgumentNumber:
        """The same product as ``to``, which a launch's field rounds it to."""
        return _number(to, self.call, self.factors)


def number_of(argument: str, value: float) -> float:
    """The value of an argument, which tells where it is from while a call is traced."""
    return _number(value, traced.call, (argument,)) if traced.call else value


def _number(value: float, call: int, factors: tuple[str | float, ...]) -> ArgumentNumber:
    number = ArgumentNumber(value)
    number.call, number.factors = call, factors
    return number
