"""The table of a form of calls: what must hold for the arguments, where the launch's values come from, the result.

``Path`` walks it in Python, the accelerator in C; both read the same rows. An argument is known by its slot: its place
among the operator's parameters, or behind them, for the elements of arguments that are sequences, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import reduce
from math import copysign
from operator import itemgetter, or_
from typing import Any, NamedTuple

from ...values import dataclass
from ..checks import MAX_SCALE
from .guards import KnownForms


class Kind(IntEnum):
    """A condition on an argument."""

    EQUAL = 0  # it is `expected`, or of its type and equal to it
    OF_TYPE = 1  # of the type `expected`
    INTEGER = 2  # an int from `low` to `high`
    SCALE = 3  # a float other than 0 that float32 can hold
    SEQUENCE = 4  # of the type `expected`, with `low` elements, which become slots
    WORKSPACE = 5  # of the type `expected`, in the context `low`; None: in any


class ArgumentTest(NamedTuple):
    """A test of the argument in ``slot``."""

    kind: Kind
    slot: int
    expected: Any = None
    low: Any = 0
    high: Any = 0

    def holds(self, slots: list[Any]) -> bool:
        """Return whether it holds; the elements of a sequence are put behind the other slots."""
        return _HOLDS[self.kind](self, slots[self.slot], slots)


def _is_equal(expected: Any, value: Any) -> bool:
    if type(value) is not type(expected) or value != expected:
        return False
    return type(expected) is not float or copysign(1.0, value) == copysign(1.0, expected)


def _is_scale(value: Any) -> bool:
    return type(value) is float and -MAX_SCALE <= value <= MAX_SCALE and value != 0.0


def _unpacks(test: ArgumentTest, value: Any, slots: list[Any]) -> bool:
    if type(value) is not test.expected or len(value) != test.low:
        return False
    slots.extend(value)
    return True


_HOLDS: tuple[Callable[[ArgumentTest, Any, list[Any]], bool], ...] = (
    lambda test, value, _: value is test.expected or _is_equal(test.expected, value),
    lambda test, value, _: type(value) is test.expected,
    lambda test, value, _: type(value) is int and test.low <= value <= test.high,
    lambda _, value, __: _is_scale(value),
    _unpacks,
    lambda test, value, _: type(value) is test.expected and test.low in (None, value.context),
)


def all_hold(tests: Sequence[ArgumentTest]) -> Callable[[list[Any]], bool]:
    """A function that returns whether all tests hold for a call's slots, as ``holds`` says of each.

    Options that are as they were are most of them: those are compared at once, by type, then by value.
    """
    at_once = [test.kind == Kind.EQUAL and repr(test.expected) not in ("0.0", "-0.0") for test in tests]
    fixed = [test for test, is_fixed in zip(tests, at_once, strict=True) if is_fixed]
    rest = [test for test, is_fixed in zip(tests, at_once, strict=True) if not is_fixed]
    slots, expected = [test.slot for test in fixed], tuple(test.expected for test in fixed)
    types = tuple(map(type, expected))
    # Of one slot, an itemgetter gives no tuple.
    read: Callable[[list[Any]], Any] = (
        itemgetter(*slots) if len(slots) > 1 else lambda arguments: tuple(arguments[s] for s in slots)
    )

    def hold(arguments: list[Any]) -> bool:
        for test in rest:
            if not test.holds(arguments):
                return False
        values = read(arguments)
        return tuple(map(type, values)) == types and values == expected

    return hold


class TensorRow(NamedTuple):
    """A tensor of the call: its slot, and what is read of it.

    ``address_of`` reads the address; None: it does not count. It is as it was in the bits of ``mask``, and is no
    null. ``keyed``: the senders are kept by it.
    """

    slot: int
    address_of: Callable[[Any], int] | None = None
    mask: int = 0
    rest: int = 0
    keyed: bool = False


class Made(NamedTuple):
    """A tensor that the call makes: by which function, of which tensors, and what reads its address, if that counts."""

    make: Callable[..., Any]
    tensors: tuple[int, ...]
    address_of: Callable[[Any], int] | None


class Address(NamedTuple):
    """A value that is an address: the tensor, by its number (those that are made follow the others), and an offset."""

    tensor: int
    offset: int


class Product(NamedTuple):
    """A value that is the product from left to right of ``factors``: slots, which are ints, and constants."""

    factors: tuple[int | float, ...]


class Constant(NamedTuple):
    """A value that is the same for all calls."""

    value: Any


class InScratch(NamedTuple):
    """A value that is the address of a region of the scratch, by its number."""

    region: int


Source = Address | Product | Constant | InScratch


class Compared(NamedTuple):
    """Two addresses that are equal, or are not."""

    one: Address
    other: Address
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTable:
    """A form of calls.

    Attributes:
        tests: of the arguments, in order.
        tensors: those of the call, in order.
        forms: the forms that they have.
        compared: relations of their addresses.
        values: where each value of the launch comes from, in order.
        makes: the tensors that the call makes.
        result: slots of what the call returns, those of tensors that are made behind all others; a tuple of these, or
            None for nothing.
    """

    tests: tuple[ArgumentTest, ...]
    tensors: tuple[TensorRow, ...]
    forms: KnownForms
    compared: tuple[Compared, ...]
    values: tuple[Source, ...]
    makes: tuple[Made, ...]
    result: Any


def address_reader(rows: Sequence[TensorRow]) -> Callable[[Sequence[Any]], list[int] | None]:
    """A function that gives the tensors' addresses, 0 for those that do not count; None: one is null, or differs in the
    bits that count."""
    counted = [(number, row.address_of, row.mask, row.rest) for number, row in enumerate(rows) if row.address_of]
    count, kinds = len(rows), {(row.address_of, row.mask, row.rest) for row in rows}
    if len(kinds) == 1 and rows[0].address_of is not None and not rows[0].rest:
        return _alike(rows[0].address_of, rows[0].mask)

    def read(tensors: Sequence[Any]) -> list[int] | None:
        addresses = [0] * count
        for number, address_of, mask, rest in counted:
            address = address_of(tensors[number])
            if not address or address & mask != rest:
                return None
            addresses[number] = address
        return addresses

    return read


def _alike(address_of: Callable[[Any], int], mask: int) -> Callable[[Sequence[Any]], list[int] | None]:
    """``address_reader`` of tensors that are all read in one way, with no bit of ``mask`` in their addresses."""

    def read(tensors: Sequence[Any]) -> list[int] | None:
        addresses = list(map(address_of, tensors))
        return addresses if all(addresses) and not reduce(or_, addresses) & mask else None

    return read


def value_reader(sources: Sequence[Source]) -> Callable[[Sequence[Any], Sequence[int]], list[Any]]:
    """A function that gives the values of sources that need no place, from a call's slots and addresses."""
    rows: list[tuple[int, int, tuple[int | float, ...] | None]] = []
    for source in sources:
        is_address = type(source) is Address
        rows.append((source.tensor, source.offset, None) if is_address else (0, 0, source.factors))  # type: ignore[union-attr]

    def read(slots: Sequence[Any], addresses: Sequence[int]) -> list[Any]:
        return [
            addresses[tensor] + offset if factors is None else product(factors, slots)
            for tensor, offset, factors in rows
        ]

    return read


def product(factors: Sequence[int | float], slots: Sequence[Any]) -> Any:
    """The product from left to right of a ``Product``."""
    if len(factors) == 1:
        return slots[factors[0]]  # type: ignore[index]
    first, *others = [slots[factor] if type(factor) is int else factor for factor in factors]
    for other in others:
        first = first * other
    return first
