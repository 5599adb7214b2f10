"""A hash table over the rows of a release, keyed by the traits by which a launcher looks up a kernel.

A slot is two little-endian u32: the hash of a row's traits, and the place of the row plus 1 (both 0 in an empty
one). Slots number a power of two, at least twice the rows. The hash is the CRC-32 of the words among the traits,
joined by commas, then of the numbers, u32 each; modulo the number of slots it is the first slot to look at, and
taken ones are passed over in order. Of rows with equal traits the one that comes first in the header is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from struct import Struct, error
from zlib import crc32

from .metadata import KernelMeta, MetadataError
from .metadata_columns import SELECTION_FIELDS, SELECTION_WORDS

_SLOT = Struct("<II")
_NUMBERS = Struct(f"<{len(SELECTION_FIELDS) - SELECTION_WORDS}I")
_traits = attrgetter(*SELECTION_FIELDS)


def traits_of(row: KernelMeta) -> tuple[object, ...]:
    """The values of ``SELECTION_FIELDS``."""
    traits: tuple[object, ...] = _traits(row)
    return traits


def build_slots(rows: Sequence[KernelMeta]) -> bytes:
    """The table for rows by their place in ``rows``; equal rows give equal bytes."""
    first: dict[tuple[object, ...], int] = {}
    for place, row in enumerate(rows):
        earlier = first.get(traits_of(row))
        if earlier is None or row.row < rows[earlier].row:
            first[traits_of(row)] = place
    slots = [(0, 0)] * _slots_for(len(rows))
    for traits, place in first.items():
        hashed = _hash(traits)
        slot = hashed % len(slots)
        while slots[slot][1]:
            slot = (slot + 1) % len(slots)
        slots[slot] = (hashed, place + 1)
    return b"".join(_SLOT.pack(*slot) for slot in slots)


def table_bytes(rows: int) -> int:
    """The size of the table of so many rows."""
    return _slots_for(rows) * _SLOT.size


class TraitTable:
    """The table of ``build_slots``, read in place."""

    def __init__(self, data: bytes, rows: int) -> None:
        """Open the table of ``rows`` rows.

        Raises:
            MetadataError: it has another size than that number of rows asks for.
        """
        if len(data) != table_bytes(rows):
            raise MetadataError(f"metadata index: a table of {len(data)} bytes for {rows} rows")
        self._slots = _slots_for(rows)
        self._data = data

    def places(self, traits: tuple[object, ...]) -> Iterator[int]:
        """Places of the rows that may have these traits, likeliest first; visits no slot twice."""
        try:
            key = _hash(traits)
        except error:  # a number that no row can hold
            return
        for step in range(self._slots):
            hashed, stored = _SLOT.unpack_from(self._data, (key + step) % self._slots * _SLOT.size)
            if not stored:
                return
            if hashed == key:
                yield stored - 1


def _slots_for(rows: int) -> int:
    return 1 << max(1, (2 * rows - 1).bit_length())


def _hash(traits: tuple[object, ...]) -> int:
    words = ",".join(traits[:SELECTION_WORDS])  # type: ignore[arg-type]
    return crc32(_NUMBERS.pack(*traits[SELECTION_WORDS:]), crc32(words.encode()))
