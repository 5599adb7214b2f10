"""Addresses and numbers of a traced call say where they are from, and are what they are to everybody else."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.fast_path.notes import Notes
from cubin_runtime.launch.workspace import Region, place_regions
from cubin_runtime.provenance import ArgumentAddress, ArgumentNumber, number_of
from cubin_runtime.tensor import view_of

FLOATS = st.floats(allow_nan=False, width=32)
TENSOR = TensorView.contiguous(0x7F00_0000_0010, "bfloat16", (4, 8))


def evaluated(number: ArgumentNumber, **arguments: float) -> float:
    first, *others = [arguments[factor] if isinstance(factor, str) else factor for factor in number.factors]
    for other in others:
        first = first * other
    return first


def test_an_address_keeps_its_tensor_through_views_and_regions() -> None:
    with Notes() as notes:
        view = view_of(TENSOR, "q")
        half = replace(view, pointer=view.pointer + 64, shape=(2, 8))
        placed = place_regions("scratch", half.pointer, 4096, [Region("a", 100), Region("b", 8)])
    for address in (view.pointer, half.pointer, 64 + view.pointer, *placed.values()):
        assert isinstance(address, ArgumentAddress)
        assert (address.call, address.tensor) == (notes.call, id(TENSOR))
    assert placed == place_regions("scratch", TENSOR.pointer + 64, 4096, [Region("a", 100), Region("b", 8)])


def test_an_address_is_read_again_in_a_later_call() -> None:
    with Notes():
        stale = view_of(TENSOR, "q")
    with Notes() as notes:
        address = view_of(stale, "q").pointer
    assert isinstance(address, ArgumentAddress)
    assert (address.call, address.tensor) == (notes.call, id(stale))


def test_nothing_is_traced_outside_a_call_or_behind_one() -> None:
    with Notes():
        with Notes():
            pass
        assert isinstance(view_of(TENSOR, "q").pointer, ArgumentAddress)
    assert view_of(TENSOR, "q") is TENSOR
    assert type(number_of("scale", 2.0)) is float


@pytest.mark.parametrize("lost", [lambda a: a - 1, lambda a: a & ~15, lambda a: -a, lambda a: a * 2])
def test_other_arithmetic_gives_plain_addresses(lost: object) -> None:
    with Notes():
        assert type(lost(view_of(TENSOR, "q").pointer)) is int  # type: ignore[operator]


@given(FLOATS, FLOATS, FLOATS, FLOATS)
def test_a_product_is_that_of_its_factors_from_left_to_right(a: float, b: float, one: float, other: float) -> None:
    with Notes():
        first, second = number_of("a", a), number_of("b", b)
        products = [
            ((first * one) * second * other, ((a * one) * b) * other),
            (second * (other * first), b * (other * a)),
        ]
    for product, plain in products:
        assert isinstance(product, ArgumentNumber)
        assert repr(float(product)) == repr(plain) == repr(evaluated(product, a=a, b=b))


def test_a_factor_of_1_adds_nothing_and_two_products_are_a_plain_number() -> None:
    with Notes():
        first, second = number_of("a", 3.0) * 5.0, number_of("b", 7.0) * 11.0
    assert (1.0 * first).factors == ("a", 5.0)  # type: ignore[attr-defined]
    assert type(first * second) is float
    assert first * second == 1155.0


def test_sums_and_quotients_are_plain_numbers() -> None:
    with Notes():
        number = number_of("a", 3.0)
    assert {type(value) for value in (number + 1, number / 2, -number, abs(number))} == {float}


def test_they_are_plain_values_to_text_hashes_and_pickles() -> None:
    with Notes():
        address, number = view_of(TENSOR, "q").pointer, number_of("a", 0.5)
    assert (f"{address:#x}", repr(number), hash(address)) == ("0x7f0000000010", "0.5", hash(TENSOR.pointer))
    assert pickle.loads(pickle.dumps((address, number))) == (TENSOR.pointer, 0.5)
