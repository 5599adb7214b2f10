from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.artifacts.tables.metadata import MetadataError
from cubin_runtime.artifacts.tables.metadata_columns import SELECTION_FIELDS, SELECTION_WORDS
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, build_index
from cubin_runtime.artifacts.tables.trait_table import TraitTable, build_slots, table_bytes, traits_of
from tests.artifacts.test_metadata_index import ROW, ROWS, table

MANY = tuple(replace(ROW, symbol=f"fmhaSm100fKernel_{n:03}", row=n, head_dim_qk=64 + n) for n in range(300))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.symbol)
def test_a_row_is_found_by_its_traits(row) -> None:
    assert MetadataIndex(build_index(table(*ROWS))).find_by_traits(traits_of(row)) == row


def test_every_one_of_many_rows_is_found() -> None:
    index = MetadataIndex(build_index(table(*MANY)))
    assert [index.find_by_traits(traits_of(row)) for row in MANY] == list(MANY)


@pytest.mark.parametrize("changed", SELECTION_FIELDS[SELECTION_WORDS:])
def test_one_other_number_finds_nothing(changed: str) -> None:
    traits = list(traits_of(ROW))
    place = SELECTION_FIELDS.index(changed)
    traits[place] = int(traits[place]) + 1  # type: ignore[call-overload]
    assert MetadataIndex(build_index(table(*ROWS))).find_by_traits(tuple(traits)) is None


@pytest.mark.parametrize("changed", SELECTION_FIELDS[:SELECTION_WORDS])
def test_one_other_word_finds_nothing(changed: str) -> None:
    traits = list(traits_of(ROW))
    traits[SELECTION_FIELDS.index(changed)] = "other"
    assert MetadataIndex(build_index(table(*ROWS))).find_by_traits(tuple(traits)) is None


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 80])
def test_a_number_that_no_row_can_hold_finds_nothing(number: int) -> None:
    traits = (*traits_of(ROW)[:-1], number)
    assert MetadataIndex(build_index(table(*ROWS))).find_by_traits(traits) is None


def test_of_equal_traits_the_first_row_of_the_header_is_found() -> None:
    later = replace(ROW, symbol="fmhaSm100fKernel_A", row=1)
    assert MetadataIndex(build_index(table(later, ROW))).find_by_traits(traits_of(ROW)) == ROW


def test_nothing_is_found_among_no_rows() -> None:
    assert MetadataIndex(build_index(table())).find_by_traits(traits_of(ROW)) is None


def test_a_table_without_an_empty_slot_is_walked_once() -> None:
    full = TraitTable(b"\xff" * table_bytes(3), 3)
    assert list(full.places(traits_of(ROW))) == []


def test_a_table_whose_slots_all_fit_names_each_once() -> None:
    (hashed,) = {data for data in [build_slots([ROW])[i : i + 4] for i in (0, 8)] if any(data)}
    full = TraitTable((hashed + b"\1\0\0\0") * (table_bytes(3) // 8), 3)
    assert list(full.places(traits_of(ROW))) == [0] * (table_bytes(3) // 8)


def test_a_slot_that_names_no_row_is_refused() -> None:
    data = bytearray(build_index(table(ROW)))
    slots = data[-table_bytes(1) :]
    place = slots.index(b"\1\0\0\0")
    data[len(data) - table_bytes(1) + place] = 9
    with pytest.raises(MetadataError, match="row 8 of 1"):
        MetadataIndex(bytes(data)).find_by_traits(traits_of(ROW))


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(MetadataError, match="for 3 rows"):
        TraitTable(bytes(table_bytes(3) + 8), 3)
