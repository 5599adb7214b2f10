"""Packed draft masks: which draft token may attend which, one bit per pair.

Layout: uint16 words ``[batch, q_len, 2 * ceil(q_len / 32)]``, that is, rows of little-endian 32-bit words:
bit ``j`` of row ``i`` is set where draft token ``i`` may attend draft token ``j``. Bits past ``q_len`` are 0.
The KV in front of the draft is always visible and is not in the mask. FlashInfer's XQA functions use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..values import dataclass

if TYPE_CHECKING:
    import numpy

ROOT = -1


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The masks of a batch, packed as kernels read them; a row is a multiple of 4 bytes."""

    batch: int
    q_len: int
    data: bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape in uint16 words."""
        return self.batch, self.q_len, _row_bytes(self.q_len) // 2

    def visible(self, sequence: int, row: int) -> tuple[int, ...]:
        """The draft tokens that ``row`` of ``sequence`` attends to, in ascending order."""
        size = _row_bytes(self.q_len)
        start = (sequence * self.q_len + row) * size
        bits = int.from_bytes(self.data[start : start + size], "little")
        return tuple(j for j in range(self.q_len) if bits >> j & 1)

    def to_numpy(self) -> numpy.ndarray[Any, numpy.dtype[numpy.uint16]]:
        """Return a uint16 array of ``shape``; requires numpy."""
        import numpy

        return numpy.frombuffer(self.data, dtype="<u2").reshape(self.shape).astype(numpy.uint16)


def pack_mask(allowed: Any) -> PackedMask:
    """Pack booleans ``[batch, q_len, q_len]``: nested sequences, or an array with ``tolist`` (numpy, torch).

    Raises:
        UsageError: ``allowed`` is not three-dimensional, not square, empty, or has an entry that is neither true nor
            false.
    """
    nested = allowed.tolist() if hasattr(allowed, "tolist") else allowed
    try:
        rows = [[[_bit(entry) for entry in row] for row in sequence] for sequence in nested]
    except TypeError as error:
        raise UsageError(f"allowed: expected booleans [batch, q_len, q_len] ({error})") from error
    q_len = len(rows[0]) if rows else 0
    if not q_len or any(len(s) != q_len or any(len(row) != q_len for row in s) for s in rows):
        raise UsageError("allowed: expected [batch, q_len, q_len] with batch and q_len at least 1")
    packed = [sum(bit << j for j, bit in enumerate(row)) for sequence in rows for row in sequence]
    return _assemble(len(rows), q_len, packed)


def causal_mask(batch: int, q_len: int) -> PackedMask:
    """Return a causal mask: each draft token attends to itself and to the earlier ones.

    Raises:
        UsageError: batch or q_len is below 1.
    """
    if batch < 1 or q_len < 1:
        raise UsageError(f"batch={batch}, q_len={q_len}: expected at least 1")
    return _assemble(batch, q_len, [(2 << i) - 1 for i in range(q_len)] * batch)


def tree_mask(parents: Sequence[Sequence[int]]) -> PackedMask:
    """Return the masks of draft trees: ``parents[b][i]`` is the parent of token ``i``, -1 for a root.

    Each token attends to itself and its ancestors. All sequences have the same length.

    Raises:
        UsageError: a parent does not come before its child, or the sequences differ in length.
    """
    q_len = len(parents[0]) if parents else 0
    if not q_len or any(len(sequence) != q_len for sequence in parents):
        raise UsageError("parents: expected [batch, q_len] with batch and q_len at least 1")
    packed: list[int] = []
    for b, sequence in enumerate(parents):
        rows: list[int] = []
        for i, parent in enumerate(sequence):
            if not ROOT <= parent < i:
                raise UsageError(f"parents[{b}][{i}]={parent}: expected -1 to {i - 1}")
            rows.append((rows[parent] if parent != ROOT else 0) | 1 << i)
        packed += rows
    return _assemble(len(parents), q_len, packed)


def _assemble(batch: int, q_len: int, rows: Sequence[int]) -> PackedMask:
    size = _row_bytes(q_len)
    return PackedMask(batch, q_len, b"".join(row.to_bytes(size, "little") for row in rows))


def _row_bytes(q_len: int) -> int:
    return (q_len + 31) // 32 * 4


def _bit(entry: Any) -> int:
    if entry in (0, 1):
        return int(entry)
    raise TypeError(f"entry {entry!r}")
