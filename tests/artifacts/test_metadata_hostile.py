"""Damaged metadata of either kind: one error type each, never another exception."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubin_runtime.artifacts.tables.metadata import COLUMNS, KernelTable, MetadataError, parse_header
from cubin_runtime.artifacts.tables.metadata_index import MetadataIndex, build_index
from cubin_runtime.artifacts.tables.native_kernels import NativeKernelsError, parse_native_kernels
from cubin_runtime.errors import MissingError

FUZZ = settings(max_examples=300, deadline=None)
CELLS = {
    "dtype": "DATA_TYPE_BF16",
    "sm": "kSM_100f",
    "uint": "64",
    "bool": "true",
    "digest": '"' + "a" * 64 + '"',
}


def header_bytes(rows: int = 3) -> bytes:
    """A header with the known columns and rows that differ in their symbol."""
    declared = "".join(f"int {c.name};\n" for c in COLUMNS)
    lines = "".join(
        "{ " + ", ".join(CELLS.get(c.kind, f'"fmhaSm100fKernel_{i}"') for c in COLUMNS) + "},\n" for i in range(rows)
    )
    return f"struct Info\n{{\n{declared}}};\nstatic const Info sInfos[] = {{\n{lines}}};\n".encode()


HEADER = header_bytes()
INDEX = build_index(parse_header(HEADER))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def changed(data: bytes, places: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(data)
    for at, value in places:
        damaged[at % len(damaged)] = value
    return bytes(damaged)


def walk(data: bytes) -> None:
    index = MetadataIndex(data)
    for row in index:
        index.find(row.symbol)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
@FUZZ
def test_a_damaged_header_reads_or_is_refused(places: list[tuple[int, int]]) -> None:
    try:
        parse_header(changed(HEADER, places))
    except MetadataError:
        return


@given(st.binary(max_size=300))
@FUZZ
def test_noise_is_no_header(noise: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_header(noise)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
@FUZZ
def test_a_damaged_index_reads_or_is_refused(places: list[tuple[int, int]]) -> None:
    try:
        walk(changed(INDEX, places))
    except (MetadataError, MissingError):
        return


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
@FUZZ
def test_a_damaged_index_header_reads_or_is_refused(places: list[tuple[int, int]]) -> None:
    try:
        walk(changed(INDEX, places))
    except (MetadataError, MissingError):
        return


@given(JSON_VALUES)
@FUZZ
def test_any_other_document_is_refused(value: object) -> None:
    with pytest.raises(NativeKernelsError):
        parse_native_kernels(json.dumps(value).encode())


@given(st.lists(JSON_VALUES, min_size=1, max_size=3))
@FUZZ
def test_any_other_entry_is_refused(entries: list[object]) -> None:
    with pytest.raises(NativeKernelsError, match=r"kernels\[0\]"):
        parse_native_kernels(json.dumps({"schema": 1, "kernels": entries}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"struct " * 200_000,
        b"struct A {" * 200_000,
        b"struct A {" + b"int a " * 200_000 + b"};",
        b"struct A {" + b" " * 1_000_000 + b"?;};",
        b"struct A {" + b"a* " * 300_000 + b";};",
        b"struct A { a" + b" " * 1_000_000 + b"?;};",
        b"struct A { " + b"*" * 1_000_000 + b";};",
        b"struct" + b" " * 1_000_000,
        b"struct A{int a;};" + b"A " * 500_000,
        HEADER + b"{" * 1_000_000,
        HEADER[: HEADER.rindex(b"};")] + b"{" + b"," * 1_000_000 + b"},\n",
    ],
)
def test_a_long_hostile_header_costs_seconds_at_most(data: bytes) -> None:
    started = time.thread_time()
    with suppress(MetadataError):
        parse_header(data)
    assert time.thread_time() - started < 3


def test_an_index_of_many_rows_is_opened_without_reading_them() -> None:
    table = parse_header(header_bytes(20_000))
    data = build_index(KernelTable(table.rows, (), "0" * 64))
    started = time.thread_time()
    MetadataIndex(data).find("fmhaSm100fKernel_17")
    assert time.thread_time() - started < 0.05
