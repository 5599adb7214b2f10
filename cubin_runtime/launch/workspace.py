"""Device scratch that one stream, or one captured graph, has at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import WorkspaceError
from .driver import Driver
from .graph_life import GraphLife
from .regions import Region, place_regions
from .streams import is_default, stream_handle

if TYPE_CHECKING:
    from ..protocols import Stream

Place = tuple[int, int]  # address and bytes


# The owner of a buffer: a capture (None: eager work), a stream's number (0 in a capture), and the stream's handle.
_Owner = tuple[int | None, int, int]


class _Buffer:
    """One allocation, who has it and, for a captured graph, that graph's life."""

    __slots__ = ("address", "capacity", "life", "of_legacy", "owned", "owner", "place")

    def __init__(self, address: int, nbytes: int, capacity: int) -> None:
        self.address = address
        self.capacity = capacity
        self.place: Place = (address, nbytes)
        self.owned = capacity > 0
        self.owner: _Owner | None = None
        self.of_legacy = False  # the legacy default stream has it, which never captures and whose handle stays its own
        self.life: GraphLife | None = None

    @property
    def free(self) -> bool:
        """Whether it has no owner; the buffer of a destroyed graph is free again."""
        if self.life is not None and self.life.ended:
            self.give(None)
        return self.owner is None

    def give(self, owner: _Owner | None) -> None:
        """Set the owner; None: it has none."""
        self.owner = owner
        self.of_legacy = owner is not None and owner[0] is None and not owner[2]
        self.life = None


class Workspace:
    """Zeroed device memory for one stream: a buffer for eager launches, and one for each graph captured on it.

    A graph keeps its buffer until it, its executables and their replays are gone: it may be replayed on any stream, so
    nothing else may share it. Buffers for graphs are reserved ahead, since none is made during a capture; without a
    reserve a capture takes the buffer for eager launches, and the next eager launch gets a new one.

    Kernels leave the counters in it at zero, so it is cleared once; after a fault call ``reset``. Memory of a workspace
    that nothing refers to any more becomes that of another for the same stream, or is freed when other memory is made.
    Safe between threads.
    """

    def __init__(self, driver: Driver, context: int, address: int, nbytes: int, *, capacity: int = 0) -> None:
        """Wrap ``nbytes`` of zeroed device memory at ``address``.

        ``capacity``: the bytes allocated there, which ``close`` frees; 0: they are the caller's. Memory of the caller's
        is all that there is: it serves either one stream or one graph.
        """
        if nbytes < 0 or address % 16:
            raise WorkspaceError(f"workspace at {address:#x} of {nbytes} bytes: expected a multiple of 16")
        self.context = context
        self.nbytes = nbytes
        self._driver = driver
        self._owned = capacity > 0
        self._lock = threading.Lock()
        self._eager: _Buffer | None = _Buffer(address, nbytes, capacity)
        self._buffers = [self._eager]
        weakref.finalize(self, _give_back, driver, context, self._buffers).atexit = False

    @classmethod
    def allocate(
        cls, driver: Driver, context: int, nbytes: int, stream: Stream | None = 0, *, graphs: int = 0
    ) -> Workspace:
        """New zeroed memory for ``stream`` and for ``graphs`` captures on it, cleared in stream order.

        Raises:
            WorkspaceError: ``stream`` is capturing.
            DriverError: the device does not have that much memory.
        """
        handle = stream_handle(stream)
        address, capacity = _new_memory(driver, context, nbytes, handle)
        workspace = cls(driver, context, address, nbytes, capacity=capacity)
        workspace.reserve(graphs, handle)
        return workspace

    @property
    def address(self) -> int:
        """Where the buffer for eager launches begins; that of the first graph, if a capture took it."""
        return (self._eager or self._buffers[0]).address

    @property
    def legacy(self) -> Any:
        """What tells ``of_legacy``, and then ``place`` as ``claim`` does, without a call; None: another has it."""
        return self._eager if self._eager is not None and self._eager.of_legacy else None

    def reserve(self, graphs: int, stream: Stream | None = 0) -> None:
        """Have a buffer for eager launches, and one free for each of ``graphs`` captures to come.

        Raises:
            WorkspaceError: ``stream`` is capturing, or the memory is the caller's own.
            DriverError: the device does not have that much memory.
        """
        handle = stream_handle(stream)
        with self._lock:
            if self._eager is None:
                self._eager = self._grow(handle)
            free = sum(buffer.free for buffer in self._buffers if buffer is not self._eager)
            for _ in range(graphs - free):
                self._grow(handle)

    def claim(self, stream: Stream | None) -> Place:
        """The buffer for a launch on ``stream``: that of the stream, or of the graph that it captures.

        Raises:
            WorkspaceError: another stream has it, or a capture needs one and none is free.
        """
        eager = self._eager
        if type(stream) is int and not stream and eager is not None and eager.of_legacy:
            return eager.place
        handle = stream_handle(stream)
        if is_default(handle):
            with self._driver.using(self.context):
                owner = self._owner_on(handle)
        else:
            owner = self._owner_on(handle)
        if eager is not None and eager.owner == owner:
            return eager.place
        with self._lock:
            buffer = next((buffer for buffer in self._buffers if buffer.owner == owner), None)
            if buffer is None:
                buffer = self._for_stream(owner) if owner[0] is None else self._for_graph(owner)
                buffer.give(owner)
                buffer.life = None if owner[0] is None else GraphLife(self._driver, owner[2])
            return buffer.place

    def regions(self, needed: Sequence[Region], place: Hashable = None) -> dict[str, int]:
        """The device address of each region in the buffer that ``claim`` gave; None: in that for eager launches.

        Raises:
            WorkspaceError: the buffer is too small; the message names the bytes needed.
        """
        address, nbytes = place if isinstance(place, tuple) else (self.address, self.nbytes)
        return place_regions("workspace", address, nbytes, needed)

    def places(self) -> tuple[Place, ...]:
        """All its buffers, those of graphs included."""
        return tuple(buffer.place for buffer in self._buffers)

    def release(self) -> None:
        """Let another stream claim it; the caller has made sure that the work of the last owner is done."""
        with self._lock:
            for buffer in self._buffers:
                buffer.give(None)

    def reset(self, stream: Stream | None = 0) -> None:
        """Set all bytes to zero in stream order; needed after a fault or an aborted kernel."""
        handle = stream_handle(stream)
        with self._driver.using(self.context):
            for buffer in self._buffers if self.nbytes else ():
                self._driver.fill(buffer.address, 0, self.nbytes, handle)

    def keep(self) -> None:
        """Leave the memory allocated for as long as the process: graphs have its address."""
        for buffer in self._buffers:
            buffer.owned = False

    def close(self) -> None:
        """Free owned memory; calling it again does nothing."""
        with self._driver.using(self.context):
            for buffer in self._buffers:
                if buffer.owned:
                    buffer.owned = False
                    self._driver.free(buffer.address)

    def _owner_on(self, stream: int) -> _Owner:
        return *self._driver.stream_identity(stream), stream

    def _for_stream(self, owner: _Owner) -> _Buffer:
        eager, stream = self._eager, owner[2]
        _check_device(self._driver, self.context, stream)
        if eager is not None and eager.free:
            return eager
        if eager is None and self._owned:
            self._eager = self._grow(stream)
            return self._eager
        if eager is not None and self._owned and _is_of(eager.owner, stream):
            # The stream of that handle was destroyed, but its work may go on: freeing waits for it.
            self._buffers.remove(eager)
            self._driver.free_later(self.context, eager.address)
            self._eager = self._grow(stream)
            return self._eager
        raise self._taken(owner)

    def _for_graph(self, owner: _Owner) -> _Buffer:
        reserved = (buffer for buffer in self._buffers if buffer is not self._eager and buffer.free)
        buffer, eager = next(reserved, None), self._eager
        if buffer is None and eager is not None and (eager.free or _is_of(eager.owner, owner[2])):
            buffer, self._eager = eager, None if self._owned else eager
        if buffer is None:
            raise self._taken(owner)
        return buffer

    def _taken(self, owner: _Owner) -> WorkspaceError:
        have = self._buffers[-1].owner if self._eager is None else self._eager.owner
        ahead = "" if owner[0] is None else "reserve one for each graph with prepare(stream, graphs=n), "
        return WorkspaceError(
            f"workspace at {self.address:#x} belongs to {_words(have)}, not to {_words(owner)}: {ahead}give each its "
            "own, or release() it when that work is done"
        )

    def _grow(self, stream: int) -> _Buffer:
        if not self._owned:
            raise WorkspaceError(
                f"workspace at {self.address:#x}: the workspace uses the caller's buffer and cannot allocate another"
            )
        address, capacity = _new_memory(self._driver, self.context, self.nbytes, stream)
        buffer = _Buffer(address, self.nbytes, capacity)
        self._buffers.append(buffer)
        return buffer


def _is_of(owner: _Owner | None, stream: int) -> bool:
    return owner is not None and owner[0] is None and owner[2] == stream


def _words(owner: _Owner | None) -> str:
    if owner is None:
        return "nobody"
    capture, _, stream = owner
    return f"stream {stream:#x}" if capture is None else f"captured graph {capture:#x}"


def _check_device(driver: Driver, context: int, stream: int) -> None:
    if is_default(stream):
        return  # it is that of whatever context the launch is made in
    mine, its = driver.context_device(context), driver.context_device(driver.stream_context(stream))
    if mine != its:
        raise WorkspaceError(f"stream {stream:#x} is of device {its}, the workspace is on device {mine}")


def _new_memory(driver: Driver, context: int, nbytes: int, stream: int) -> tuple[int, int]:
    """The address of zeroed memory, and how many bytes it has."""
    with driver.using(context):
        if driver.is_capturing(stream):
            raise WorkspaceError(
                f"a workspace of {nbytes} bytes would be made while stream {stream:#x} captures: "
                "make it before, with prepare(stream)"
            )
        _check_device(driver, context, stream)
        # What the stream had before is used again in its order; freeing would wait for all work of the device.
        found = driver.waiting_for(context, max(1, nbytes), (*driver.stream_identity(stream), stream))
        if found is None:
            driver.free_waiting()
            capacity = _capacity(nbytes)
            found = driver.allocate(capacity), capacity
        address, _ = found
        try:
            if nbytes:
                driver.fill(address, 0, nbytes, stream)
        except Exception:
            driver.free(address)
            raise
    return found


def _give_back(driver: Driver, context: int, buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        if buffer.owned:
            driver.free_later(context, buffer.address, buffer.capacity, buffer.owner, buffer.life)


def _capacity(nbytes: int) -> int:
    """The bytes that are allocated for so many: few different numbers, so that others can use them."""
    step = 1 << max(8, nbytes.bit_length() - 3)
    return max(1, -(-nbytes // step)) * step
