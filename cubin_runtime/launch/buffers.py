"""The buffers of a workspace, and who owns each: a stream's eager work, or a captured graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .driver import Driver
from .graph_life import GraphLife
from .streams import PER_THREAD

Place = tuple[int, int]  # address and bytes


# The owner of a buffer: a capture (None: eager work), a stream's number (0 in a capture), the stream's handle, and for
# the handle that names another stream in every thread, the thread.
Owner = tuple[int | None, int, int, int]


class Buffer:
    """One allocation, who has it and, for a captured graph, that graph's life."""

    __slots__ = ("address", "capacity", "life", "of_legacy", "owned", "owner", "place")

    def __init__(self, address: int, nbytes: int, capacity: int) -> None:
        self.address = address
        self.capacity = capacity
        self.place: Place = (address, nbytes)
        self.owned = capacity > 0
        self.owner: Owner | None = None
        self.of_legacy = False  # the legacy default stream has it, which never captures and whose handle stays its own
        self.life: GraphLife | None = None

    @property
    def free(self) -> bool:
        """Return whether it has no owner; the buffer of a destroyed graph is free again."""
        if self.life is not None and self.life.ended:
            self.give(None)
        return self.owner is None

    def give(self, owner: Owner | None, life: GraphLife | None = None) -> None:
        """Set the owner, for a capture with its graph's life; None: it has none."""
        self.owner = owner
        self.of_legacy = owner is not None and owner[0] is None and not owner[2]
        self.life = life


class EagerClaim(NamedTuple):
    """The buffer for eager launches as a stream claimed it, and what tells whether the next launch may use it too.

    For the legacy default stream, whose ``same_stream`` is None, ``buffer.of_legacy`` tells that; for others
    ``buffer.owner is owner and same_stream()``, which is false in a capture too.
    """

    place: Place
    buffer: Any
    owner: Any
    same_stream: Callable[[], bool] | None

    def holds(self) -> bool:
        """Return whether the next launch of that stream may use the buffer too."""
        if self.same_stream is None:
            return bool(self.buffer.of_legacy)
        return self.buffer.owner is self.owner and self.same_stream()


def owner_of(driver: Driver, stream: int) -> Owner:
    """The owner that a launch on ``stream`` needs, in the current context."""
    return *driver.stream_identity(stream), stream, threading.get_ident() if stream == PER_THREAD else 0


def is_of(owner: Owner | None, other: Owner) -> bool:
    """Return whether eager work on the handle of ``other`` owns it, in the same thread where threads matter."""
    return owner is not None and owner[0] is None and owner[2:] == other[2:]


def words_of(owner: Owner | None) -> str:
    """The owner in an error's words."""
    if owner is None:
        return "nobody"
    capture, _, stream, thread = owner
    of_thread = f" of thread {thread}" if thread else ""
    return f"stream {stream:#x}{of_thread}" if capture is None else f"captured graph {capture:#x}"
