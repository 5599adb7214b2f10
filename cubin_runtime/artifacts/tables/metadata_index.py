"""A release's kernel table as a fixed-width index: opened without decoding, searched by symbol or by traits.

The bytes are a pure function of the header and ``INDEX_FORMAT``, so a pin can name their digest. Layout,
little-endian:

``CRTINDEX``, u32 format, u32 rows, u32 record bytes, u32 symbol bytes, u32 description bytes; the
description (compact JSON: columns, words, new and missing columns, digest of the header); then the records, sorted by
symbol; then a hash table over them (``trait_table``). A record is the symbol padded with NUL, its
32-byte digest, u32 row in the header, then the other columns in their order: u32 for a number, u8 for a truth
value and for a word (an index into the sorted words of its kind).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from struct import Struct
from typing import Any

from ...errors import MissingError
from .metadata import KernelMeta, KernelTable, MetadataError, parse_header
from .metadata_columns import COLUMN_OF_FIELD, Column
from .trait_table import TraitTable, build_slots, table_bytes, traits_of

INDEX_FORMAT = 2
_MAGIC = b"CRTINDEX"
_HEADER = Struct("<8sIIIII")
_WORD_KINDS = ("dtype", "sm")
_CODES = {"uint": "I", "bool": "?", "dtype": "B", "sm": "B"}
_FIXED = ("symbol", "sha256", "row")
_OTHERS: tuple[Column, ...] = tuple(COLUMN_OF_FIELD[f.name] for f in fields(KernelMeta) if f.name not in _FIXED)
_WORD_PLACES = tuple((place, c.kind) for place, c in enumerate(_OTHERS) if c.kind in _WORD_KINDS)
_others_of = attrgetter(*(c.field for c in _OTHERS))


def build_index(table: KernelTable) -> bytes:
    """The index of a kernel table; equal tables give equal bytes."""
    width = max((len(row.symbol) for row in table.rows), default=1) + 1
    words = {
        kind: sorted({getattr(row, c.field) for row in table.rows for c in _OTHERS if c.kind == kind})
        for kind in _WORD_KINDS
    }
    places = {kind: {word: place for place, word in enumerate(listed)} for kind, listed in words.items()}
    description = json.dumps(
        {
            "columns": [c.field for c in _OTHERS],
            "words": words,
            "new_columns": list(table.new_columns),
            "missing_columns": list(table.missing_columns),
            "header_sha256": table.header_sha256,
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode("ascii")
    record = _record(width)
    ordered = sorted(table.rows, key=lambda row: row.symbol.encode("ascii"))
    packed = []
    for row in ordered:
        cells: list[Any] = list(_others_of(row))
        for at, kind in _WORD_PLACES:
            cells[at] = places[kind][cells[at]]
        packed.append(record.pack(row.symbol.encode("ascii"), bytes.fromhex(row.sha256), row.row, *cells))
    header = _HEADER.pack(_MAGIC, INDEX_FORMAT, len(packed), record.size, width, len(description))
    return b"".join((header, description, *packed, build_slots(ordered)))


def index_of_header(data: bytes, origin: str = "header") -> bytes:
    """``build_index(parse_header(data))``: what a pin's ``index_sha256`` is the digest of."""
    return build_index(parse_header(data, origin))


class MetadataIndex:
    """Rows of a release, by symbol, by traits or in symbol order; a row is decoded when asked for."""

    def __init__(self, data: bytes) -> None:
        """Open an index whose digest the caller has checked (or that it has just built).

        Raises:
            MetadataError: another format version, other columns, or sizes that do not add up.
        """
        if len(data) < _HEADER.size:
            raise MetadataError(f"metadata index of {len(data)} bytes, its header takes {_HEADER.size}")
        magic, version, count, size, width, described = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != INDEX_FORMAT:
            raise MetadataError(f"metadata index {magic!r} of format {version}, expected {_MAGIC!r} {INDEX_FORMAT}")
        self._start = _HEADER.size + described
        end = self._start + count * size
        if width < 1 or size != _record_bytes(width) or end + table_bytes(count) != len(data):
            raise MetadataError(f"metadata index of {len(data)} bytes does not hold {count} records of {size}")
        self._traits = TraitTable(data[end:], count)
        self._record = _record(width)
        self._data = data
        self._count: int = count
        self._width: int = width
        words, self.new_columns, self.missing_columns, self.header_sha256 = _description(
            data[_HEADER.size : self._start]
        )
        self._decoders: tuple[Callable[[Any], object] | None, ...] = tuple(
            words[c.kind].__getitem__ if c.kind in _WORD_KINDS else None for c in _OTHERS
        )

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[KernelMeta]:
        return (self.at(place) for place in range(self._count))

    def __contains__(self, symbol: object) -> bool:
        return isinstance(symbol, str) and self._place(symbol) is not None

    def find(self, symbol: str) -> KernelMeta:
        """The row of a kernel, by binary search.

        Raises:
            MissingError: the release has no kernel of that name.
        """
        place = self._place(symbol)
        if place is None:
            raise MissingError(f"the release has no kernel {symbol!r} among its {self._count}")
        return self.at(place)

    def find_by_traits(self, traits: tuple[object, ...]) -> KernelMeta | None:
        """The row whose ``metadata_columns.SELECTION_FIELDS`` are ``traits``, by one hash lookup; None without one.

        Raises:
            MetadataError: the table names a row that does not exist.
        """
        for place in self._traits.places(traits):
            if place >= self._count:
                raise MetadataError(f"metadata index: its table names row {place} of {self._count}")
            row = self.at(place)
            if traits_of(row) == traits:
                return row
        return None

    def at(self, place: int) -> KernelMeta:
        """The row at a place in symbol order, 0 to ``len(self) - 1``."""
        if not 0 <= place < self._count:
            raise IndexError(f"row {place} of {self._count}")
        symbol, digest, row, *values = self._record.unpack_from(self._data, self._start + place * self._record.size)
        try:
            decoded = [v if d is None else d(v) for d, v in zip(self._decoders, values, strict=True)]
            name = symbol.rstrip(b"\0").decode("ascii")
            return KernelMeta(name, digest.hex(), row, *decoded)  # type: ignore[arg-type]
        except (IndexError, UnicodeDecodeError) as error:
            raise MetadataError(f"metadata index: record {place} holds an unknown word") from error

    def _place(self, symbol: str) -> int | None:
        key = symbol.encode("ascii", "replace")
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._symbol(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low if low < self._count and self._symbol(low) == key else None

    def _symbol(self, place: int) -> bytes:
        start = self._start + place * self._record.size
        return self._data[start : start + self._width].rstrip(b"\0")


def _record(width: int) -> Struct:
    return Struct(f"<{width}s32sI" + "".join(_CODES[c.kind] for c in _OTHERS))


def _record_bytes(width: int) -> int:
    return width + _record(1).size - 1


def _description(data: bytes) -> tuple[dict[str, list[str]], tuple[str, ...], tuple[str, ...], str]:
    try:
        stated = json.loads(data)
        words = {kind: [str(word) for word in stated["words"][kind]] for kind in _WORD_KINDS}
        columns, new, digest = stated["columns"], stated["new_columns"], str(stated["header_sha256"])
        new_columns = tuple(str(name) for name in new)
        missing_columns = tuple(str(name) for name in stated["missing_columns"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MetadataError(f"metadata index: its description cannot be parsed: {error}") from error
    expected = [c.field for c in _OTHERS]
    if columns != expected:
        raise MetadataError(f"metadata index: columns {columns!r}, this version knows {expected!r}")
    return words, new_columns, missing_columns, digest
