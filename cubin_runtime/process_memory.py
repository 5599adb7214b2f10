"""Giving memory back from a process of ours; set by processes that we start, never by a library in another's."""

from __future__ import annotations

from contextlib import suppress

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 4 << 20


def give_back_large_blocks() -> None:
    """Let the C library map each large block by itself, which is given back when it is freed.

    By default it stops doing so after the first one is freed: each thread then keeps the largest body that it had.
    """
    import ctypes

    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
