"""A hash table over the rows of a release, by what a launcher finds a kernel by.

Slots are little-endian u32: 0 for an empty one, else the place of a row plus 1. Their number is a power of two,
at least twice that of the rows. A row's first slot is the CRC-32 of its traits as text, modulo that number;
taken ones are passed over in order. Of rows with equal traits the one that comes first in the header is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from struct import Struct
from zlib import crc32

from .metadata import SELECTION_FIELDS, KernelMeta, MetadataError

_SLOT = Struct("<I")
_traits = attrgetter(*SELECTION_FIELDS)


def traits_of(row: KernelMeta) -> tuple[object, ...]:
    """The values of ``SELECTION_FIELDS``."""
    traits: tuple[object, ...] = _traits(row)
    return traits


def build_slots(rows: Sequence[KernelMeta]) -> bytes:
    """The table for rows by their place in ``rows``; equal rows give equal bytes."""
    slots = [0] * _slots_for(len(rows))
    first: dict[tuple[object, ...], int] = {}
    for place, row in enumerate(rows):
        traits = traits_of(row)
        kept = first.get(traits)
        if kept is None or row.row < rows[kept].row:
            first[traits] = place
    for traits, place in first.items():
        slot = _hash(traits) % len(slots)
        while slots[slot]:
            slot = (slot + 1) % len(slots)
        slots[slot] = place + 1
    return b"".join(map(_SLOT.pack, slots))


class TraitTable:
    """The table of ``build_slots``, read in place."""

    def __init__(self, data: bytes, rows: int) -> None:
        """Open the table of ``rows`` rows.

        Raises:
            MetadataError: it has another size than that number of rows asks for.
        """
        self._count = len(data) // _SLOT.size
        if self._count != _slots_for(rows):
            raise MetadataError(f"metadata index: {self._count} slots for {rows} rows, expected {_slots_for(rows)}")
        self._data = data

    def places(self, traits: tuple[object, ...]) -> Iterator[int]:
        """Places of the rows that may have these traits, likeliest first; visits no slot twice."""
        begin = _hash(traits)
        for step in range(self._count):
            (stored,) = _SLOT.unpack_from(self._data, (begin + step) % self._count * _SLOT.size)
            if not stored:
                return
            yield stored - 1


def _slots_for(rows: int) -> int:
    return 1 << max(1, 2 * rows - 1).bit_length()


def _hash(traits: tuple[object, ...]) -> int:
    return crc32(_text(traits))


def _text(traits: tuple[object, ...]) -> bytes:
    # Truth values count as numbers, so that True and 1 find the same row.
    return ",".join(str(t) if isinstance(t, str) else str(int(t)) for t in traits).encode()  # type: ignore[call-overload]
