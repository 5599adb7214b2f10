"""Device scratch that one stream, or one captured graph, has at a time: a plan's own, callers' buffers, and the regions
in them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from ..dtypes import ITEM_BYTES
from ..errors import UsageError, WorkspaceError
from ..tensor import Tensor, view_of
from ..values import dataclass
from .driver import PER_THREAD, Driver, is_default
from .graph_life import GraphLife
from .streams import stream_handle

if TYPE_CHECKING:
    from ..protocols import Stream

Place = tuple[int, int]  # address and bytes
REGION_ALIGNMENT = 256


class Region(NamedTuple):
    """A part of a workspace that a plan needs: its name, size in bytes and alignment (a power of two).

    ``zeroed``: it must be zero when a kernel first gets it, and kernels leave it so (but for a status word). ``lent``:
    it is too large for every plan to keep one, so a call with torch tensors takes torch's memory for the time of a run.
    """

    name: str
    nbytes: int
    alignment: int = REGION_ALIGNMENT
    zeroed: bool = False
    lent: bool = False


def workspace_size(regions: Sequence[Region]) -> int:
    """Bytes that always suffice for ``regions``, wherever an address begins that is a multiple of 16.

    Raises:
        UsageError: a region has fewer than 0 bytes, or an alignment that is no power of two.
    """
    for region in regions:
        if region.nbytes < 0 or region.alignment.bit_count() != 1:
            raise UsageError(f"{region}: expected bytes of 0 or more and an alignment that is a power of two")
    slack = max([region.alignment for region in regions], default=1) - 16
    end = 0
    for region in regions:
        end += -end % region.alignment + region.nbytes
    return end + max(0, slack)


def scratch_sizes(regions: Sequence[Region]) -> tuple[int, int]:
    """Bytes of the regions that must be zero and of the others: the two parts of a ``SemaphoreWorkspace``.

    Raises:
        UsageError: as ``workspace_size``.
    """
    zeroed, others = parted(regions)
    return workspace_size(zeroed), workspace_size(others)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, SupportsIndex) or index(value) < 0:
        raise UsageError("expected an integer of 0 or more", argument=name, value=repr(value))
    return index(value)


def parted(regions: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """The regions that must be zero, and the others."""
    return [region for region in regions if region.zeroed], [region for region in regions if not region.zeroed]


def place_regions(what: str, address: int, nbytes: int, needed: Sequence[Region]) -> dict[str, int]:
    """The address of each region, one after another from ``address``, each aligned as it asks.

    Raises:
        WorkspaceError: the ``nbytes`` there are too few; the message begins with ``what``.
    """
    addresses: dict[str, int] = {}
    at = address
    for region in needed:
        at += -at % region.alignment
        addresses[region.name] = at
        at += region.nbytes
    if at - address > nbytes:
        parts = ", ".join(f"{region.name} {region.nbytes}" for region in needed)
        error = WorkspaceError(f"{what} of {nbytes} bytes: {at - address} bytes are needed ({parts})")
        error.argument = what
        raise error
    return addresses


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
    ``buffer.owner is owner and same_stream()``, which is false in a capture too. Without a ``buffer`` any may.
    """

    place: Hashable
    buffer: Any = None
    owner: Any = None
    same_stream: Callable[[], bool] | None = None
    stream: int | None = None
    context: int | None = None

    def holds(self) -> bool:
        """Return whether the next launch of that stream may use the buffer too."""
        if self.same_stream is None:
            return self.buffer is None or bool(self.buffer.of_legacy)
        return self.buffer.owner is self.owner and self.same_stream()


class Workspace:
    """Zeroed device memory for one stream: a buffer for eager launches, and one for each graph captured on it.

    A graph keeps its buffer until it, its executables and their replays are gone: it may be replayed on any stream, so
    nothing else may share it. Buffers for graphs are reserved ahead, since none is made during a capture; without a
    reserve a capture takes the buffer for eager launches, and the next eager launch gets a new one.

    Kernels leave the counters in it at zero, so it is cleared once; after a fault call ``reset``. Memory of a workspace
    that nothing refers to any more becomes that of another for the same stream, or is freed when other memory is made.
    Safe between threads. After ``close`` all but ``release`` and ``close`` raises ``WorkspaceError``.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        address: int,
        nbytes: int,
        *,
        capacity: int = 0,
        owner: Owner | None = None,
    ) -> None:
        """Wrap ``nbytes`` of zeroed device memory at ``address``.

        ``capacity``: the bytes allocated there, which ``close`` frees; 0: they are the caller's. Memory of the caller's
        is all that there is: it serves either one stream or one graph. ``owner`` has claimed it already.
        """
        if nbytes < 0 or address % 16:
            raise WorkspaceError(f"workspace at {address:#x} of {nbytes} bytes: expected a multiple of 16")
        self.context = context
        self.nbytes = nbytes
        self._driver = driver
        self._owned = capacity > 0
        self._closed = False
        self._lock = threading.RLock()
        self._giving: Owner | None = None
        self._eager: Buffer | None = Buffer(address, nbytes, capacity)
        self._eager.give(owner)
        self._buffers = [self._eager]
        self.claimed = None if owner is None else self._claim_of(self._eager)  # the last that later launches may use
        weakref.finalize(self, _give_back, driver, context, self._buffers).atexit = False

    @classmethod
    def allocate(
        cls, driver: Driver, context: int, nbytes: int, stream: Stream | None = 0, *, graphs: int = 0
    ) -> Workspace:
        """New zeroed memory for ``stream`` and for ``graphs`` captures on it, cleared in stream order.

        Raises:
            WorkspaceError: ``stream`` is capturing.
            UsageError: ``stream`` is of another context, or a number is no integer of 0 or more.
            DriverError: the device does not have that much memory.
        """
        handle, nbytes, graphs = stream_handle(stream), _count("nbytes", nbytes), _count("graphs", graphs)
        address, capacity, _ = _new_memory(driver, context, nbytes, handle)
        workspace = cls(driver, context, address, nbytes, capacity=capacity)
        if graphs:
            workspace.reserve(graphs, handle)
        return workspace

    @property
    def address(self) -> int:
        """The address where the buffer for eager launches begins; that of the first graph, if a capture took it."""
        self._check_open()
        return (self._eager or self._buffers[0]).address

    def reserve(self, graphs: int, stream: Stream | None = 0) -> None:
        """Have a buffer for eager launches, and one free for each of ``graphs`` captures to come.

        Raises:
            WorkspaceError: ``stream`` is capturing, or the memory is the caller's own.
            UsageError: ``graphs`` is no integer of 0 or more.
            DriverError: the device does not have that much memory.
        """
        handle, graphs = stream_handle(stream), _count("graphs", graphs)
        with self._lock:
            self._check_open()
            if self._eager is None:
                self._eager = self._grow(handle)
            free = sum(buffer.free for buffer in self._buffers if buffer is not self._eager)
            for _ in range(graphs - free):
                self._grow(handle)

    def claim(self, stream: Stream | None) -> Place:
        """The buffer for a launch on ``stream``: that of the stream, or of the graph that it captures.

        Raises:
            WorkspaceError: another stream has it, a capture needs one and none is free, or it is closed.
            UsageError: ``stream`` is of another context.
        """
        claimed = self.claimed
        if claimed is not None and type(stream) is int and stream == claimed.stream and claimed.holds():
            return claimed.place  # type: ignore[return-value]
        handle = stream_handle(stream)
        owner = self._owner_on(handle)
        with self._lock:
            self._check_open()
            buffer = next((buffer for buffer in self._buffers if buffer.owner == owner), None) or self._give(owner)
            if owner[0] is None:
                self.claimed = self._claim_of(buffer)
            return buffer.place

    def claim_eager(self, stream: Stream | None) -> EagerClaim | None:
        """``claim`` for many launches on ``stream``, each of which asks anew; None: it captures.

        Raises:
            WorkspaceError, UsageError: as ``claim``.
        """
        handle = stream_handle(stream)
        place, claimed, buffer = self.claim(handle), self.claimed, self._eager
        if handle != PER_THREAD:
            return claimed if claimed is not None and claimed.place is place and claimed.holds() else None
        owner = None if buffer is None else buffer.owner
        if buffer is None or owner is None or owner[0] is not None or buffer.place is not place:
            return None
        return EagerClaim(place, buffer, owner, lambda: self._owner_on(handle) == owner)

    def regions(self, needed: Sequence[Region], place: Hashable = None) -> dict[str, int]:
        """The device address of each region in the buffer that ``claim`` gave; None: in that for eager launches.

        Raises:
            WorkspaceError: the buffer is too small; the message names the bytes needed.
        """
        address, nbytes = place if isinstance(place, tuple) else (self.address, self.nbytes)
        return place_regions("workspace", address, nbytes, needed)

    def places(self) -> tuple[Place, ...]:
        """All its buffers, those of graphs included."""
        self._check_open()
        return tuple(buffer.place for buffer in self._buffers)

    def release(self) -> None:
        """Let another stream claim it; the caller has made sure that the work of the last owner is done."""
        with self._lock:
            for buffer in self._buffers:
                buffer.give(None)

    def reset(self, stream: Stream | None = 0) -> None:
        """Set all bytes to zero in stream order; needed after a fault or an aborted kernel."""
        handle = stream_handle(stream)
        with self._lock, self._driver.using(self.context):
            self._check_open()
            for buffer in self._buffers if self.nbytes else ():
                self._driver.fill(buffer.address, 0, self.nbytes, handle)

    def keep(self) -> None:
        """Leave the memory allocated for as long as the process: graphs have its address."""
        self._check_open()
        for buffer in self._buffers:
            buffer.owned = False

    def close(self) -> None:
        """Free owned memory, that of captured graphs once they are gone; calling it again does nothing."""
        with self._lock:
            self._closed, self._eager, self.claimed = True, None, None
            for buffer in self._buffers:
                if buffer.owned:
                    self._driver.free_later(self.context, buffer.address, life=buffer.life)
                buffer.give(None)  # which those see that launch without a call of this
            self._buffers.clear()
        self._driver.free_waiting()

    def _check_open(self) -> None:
        if self._closed:
            raise WorkspaceError(f"workspace of {self.nbytes} bytes: it is closed")

    def _give(self, owner: Owner) -> Buffer:
        """A buffer for an owner that has none; the lock does not keep out a signal handler that interrupts this."""
        interrupted = self._giving
        if interrupted not in (None, owner):
            raise WorkspaceError(f"workspace at {self.address:#x}: the call that this interrupts is claiming it")
        self._giving = owner
        try:
            buffer = self._for_stream(owner) if owner[0] is None else self._for_graph(owner)
            life = None if owner[0] is None else GraphLife(self._driver, owner[2])
            if life is not None and self._owned and buffer is self._eager:
                self._eager = None
            buffer.give(owner, life)
        finally:
            self._giving = interrupted
        return buffer

    def _claim_of(self, buffer: Buffer) -> EagerClaim | None:
        """The claim of the stream that has a buffer; None: it is another in every thread."""
        assert buffer.owner is not None
        _, number, stream, _ = buffer.owner
        if stream == PER_THREAD:
            return None
        same_stream = self._driver.stream_query(stream, number) if stream else None
        return EagerClaim(buffer.place, buffer, buffer.owner, same_stream, stream, self.context)

    def _owner_on(self, stream: int) -> Owner:
        if not is_default(stream):
            return owner_of(self._driver, stream)
        with self._driver.using(self.context):
            return owner_of(self._driver, stream)

    def _for_stream(self, owner: Owner) -> Buffer:
        eager, stream = self._eager, owner[2]
        if not is_default(stream):
            _check_context(self._driver, self.context, stream)
        if eager is not None and eager.free:
            return eager
        if eager is None and self._owned:
            self._eager = self._grow(stream)
            return self._eager
        if eager is not None and self._owned and is_of(eager.owner, owner):
            # The stream of that handle (or the thread) is gone, but its work may go on: freeing waits for it.
            self._buffers.remove(eager)
            self._eager = None
            eager.give(None)
            self._driver.free_later(self.context, eager.address)
            self._eager = self._grow(stream)
            return self._eager
        raise self._taken(owner)

    def _for_graph(self, owner: Owner) -> Buffer:
        reserved = (buffer for buffer in self._buffers if buffer is not self._eager and buffer.free)
        buffer, eager = next(reserved, None), self._eager
        if buffer is None and eager is not None and (eager.free or is_of(eager.owner, owner)):
            buffer = eager
        if buffer is None:
            raise self._taken(owner)
        return buffer

    def _taken(self, owner: Owner) -> WorkspaceError:
        have = self._buffers[-1].owner if self._eager is None else self._eager.owner
        ahead = "" if owner[0] is None else "reserve one for each graph with prepare(stream, graphs=n), "
        return WorkspaceError(
            f"workspace at {self.address:#x} belongs to {words_of(have)}, not to {words_of(owner)}: {ahead}"
            "give each its own, or release() it when that work is done"
        )

    def _grow(self, stream: int) -> Buffer:
        if not self._owned:
            raise WorkspaceError(
                f"workspace at {self.address:#x}: the workspace uses the caller's buffer and cannot allocate another"
            )
        address, capacity, _ = _new_memory(self._driver, self.context, self.nbytes, stream)
        buffer = Buffer(address, self.nbytes, capacity)
        self._buffers.append(buffer)
        return buffer


@dataclass(frozen=True, slots=True)
class SemaphoreWorkspace:
    """A caller's two buffers, each ``(address, bytes)``, for operators that keep such a convention.

    ``semaphores`` is zero before the first launch that gets it and holds nothing but regions that begin as zeros,
    so that launches of any plan may follow one another on it; ``scratch`` may hold anything. The caller keeps work on
    other streams away from both. ``context`` is where they live; None: the current one, or the device's primary one.
    ``owner`` is held as long as this is, where somebody else's dropping it would free the semaphores. ``device`` is the
    ordinal of the tensors' device, None where no tensor tells it.
    """

    semaphores: tuple[int, int]
    scratch: tuple[int, int]
    context: int | None = None
    owner: object = field(default=None, compare=False, repr=False)
    claimed: EagerClaim = field(default=EagerClaim(None), compare=False, repr=False)
    device: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "claimed", EagerClaim((self.semaphores, self.scratch), context=self.context))
        for name, (address, nbytes) in (("semaphores", self.semaphores), ("scratch", self.scratch)):
            if nbytes < 0 or address % 16:
                raise WorkspaceError(f"{name} at {address:#x} of {nbytes} bytes: expected a multiple of 16")

    @classmethod
    def of(cls, semaphores: Tensor, scratch: Tensor) -> SemaphoreWorkspace:
        """Return a workspace over two contiguous CUDA tensors of any shape and dtype, which it keeps alive.

        Raises:
            UsageError: one is no such tensor, or they are on two devices.
            WorkspaceError: one does not begin at a multiple of 16 bytes.
        """
        parts, devices = [], list[int]()
        for name, tensor in (("semaphores", semaphores), ("scratch", scratch)):
            view = view_of(tensor, name, written=True)
            devices.append(view.device)
            if view.device != devices[0]:
                raise UsageError(f"on device {view.device}, semaphores are on device {devices[0]}", argument=name)
            if not view.is_contiguous:
                raise UsageError(f"strides {view.strides}, expected a contiguous tensor", argument=name)
            parts.append((view.pointer, prod(view.shape) * ITEM_BYTES[view.dtype]))
        return cls(parts[0], parts[1], owner=(semaphores, scratch), device=devices[0])

    def regions(self, needed: Sequence[Region], place: Hashable = None) -> dict[str, int]:
        """The device address of each region: those that begin as zeros in the semaphores, the others in the scratch.

        Raises:
            WorkspaceError: a buffer is too small; the message names it and the bytes needed.
        """
        zeroed, others = parted(needed)
        return place_regions("semaphores", *self.semaphores, zeroed) | place_regions("scratch", *self.scratch, others)

    def claim(self, stream: Stream | None) -> tuple[Place, Place]:
        """The buffers as they are: that one stream at a time uses them is the caller's affair."""
        return self.claimed.place  # type: ignore[return-value]

    def claim_eager(self, stream: Stream | None) -> EagerClaim:
        """As ``Workspace``; it always holds."""
        return self.claimed

    def places(self) -> tuple[tuple[Place, Place], ...]:
        """All its buffers."""
        return ((self.semaphores, self.scratch),)


AnyWorkspace = Workspace | SemaphoreWorkspace


def check_workspace(workspace: object, device: int | None = None) -> None:
    """Raise ``UsageError`` for anything else, such as a tensor, and for tensors on another ``device``; None: any."""
    if not isinstance(workspace, (Workspace, SemaphoreWorkspace)):
        raise UsageError(
            f"got {type(workspace).__name__}, expected a Workspace or a SemaphoreWorkspace", argument="workspace"
        )
    of_tensors = workspace.device if isinstance(workspace, SemaphoreWorkspace) else None
    if of_tensors is not None and device is not None and of_tensors != device:
        raise UsageError(f"on device {of_tensors}, the plan is for tensors on device {device}", argument="workspace")


class WorkspacePool:
    """The workspaces of a plan on one device: one for each stream, made outside of captures, kept until ``close``.

    ``held`` has them by their stream's handle, those of default streams by context and thread (0: the legacy one).
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver = driver
        self._device = device
        self._nbytes = nbytes
        self._lock = threading.RLock()
        self.held: dict[Hashable, Workspace] = {}

    def take(self, stream: int) -> Workspace:
        """The workspace for a stream's handle, in the stream's context; the caller claims it.

        Raises:
            WorkspaceError: it is not there and the stream is capturing, or the stream is of another device.
        """
        key: Hashable = stream
        context = None
        if is_default(stream):
            context = self._driver.context_on(self._device)
            key = context, threading.get_ident() if stream == PER_THREAD else 0
        held = self.held.get(key)
        if held is not None and (context is not None or self._serves(held, stream)):
            return held
        with self._lock:
            if self.held.get(key) is held:
                self.held[key] = self.make(stream, context)
            return self.held[key]

    def _serves(self, workspace: Workspace, stream: int) -> bool:
        """Return whether a workspace is in a stream's context: a handle may come back in another one."""
        claimed = workspace.claimed
        if (claimed is not None and claimed.holds()) or self._driver.is_capturing(stream):
            return True
        return self._driver.stream_context(stream) == workspace.context

    def make(self, stream: int, context: int | None = None) -> Workspace:
        """A workspace that is not of the pool, claimed by the stream, in its or another context; errors as ``take``."""
        driver, nbytes, context = self._driver, self._nbytes, context or self._driver.context_of(stream, self._device)
        address, capacity, owner = _new_memory(driver, context, nbytes, stream)
        return Workspace(driver, context, address, nbytes, capacity=capacity, owner=owner)

    def close(self) -> None:
        """Free all of them; no work may still use one."""
        with self._lock:
            held, self.held = self.held, {}
        for workspace in held.values():
            workspace.close()


def context_of_launch(driver: Driver, device: int, workspace: int | None, stream: int) -> int:
    """The context to launch in on a stream of a device, with a workspace of a context; None: of any.

    Raises:
        UsageError: workspace and stream are of two contexts.
    """
    context = driver.context_of(stream, device)
    if workspace is None or workspace == context:
        return context
    if is_default(stream):
        return workspace
    raise _of_other_context(stream, device)


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


def _check_context(driver: Driver, context: int, stream: int) -> None:
    """Check a stream that has a context of its own: a default one is of whatever context the launch is made in."""
    stream_context = driver.stream_context(stream)
    if stream_context == context:
        return
    own_device, stream_device = driver.context_device(context), driver.context_device(stream_context)
    if own_device == stream_device:
        raise _of_other_context(stream, own_device)
    raise WorkspaceError(f"stream {stream:#x} is of device {stream_device}, the workspace is on device {own_device}")


def _of_other_context(stream: int, device: int) -> UsageError:
    return UsageError(f"stream {stream:#x}: belongs to another context of device {device} than the workspace")


def _new_memory(driver: Driver, context: int, nbytes: int, stream: int) -> tuple[int, int, Owner]:
    """The address of memory that ``stream`` clears, how many bytes it has, and the owner that this stream is."""
    with driver.using(context):
        if driver.is_capturing(stream):
            raise WorkspaceError(
                f"a workspace of {nbytes} bytes would be made while stream {stream:#x} captures: "
                "make it before, with prepare(stream)"
            )
        if not is_default(stream):
            _check_context(driver, context, stream)
        # A buffer that the stream had before is used again in its order; freeing would wait for all work of the device.
        owner = owner_of(driver, stream)
        memory = driver.waiting_for(context, max(1, nbytes), owner)
        if memory is None:
            driver.free_waiting()
            # Few different numbers of bytes, so that others can use the memory.
            step = 1 << max(8, nbytes.bit_length() - 3)
            capacity = max(1, -(-nbytes // step)) * step
            memory = driver.allocate(capacity), capacity
        address, capacity = memory
        try:
            if nbytes:
                driver.fill(address, 0, nbytes, stream)
        except Exception:
            driver.free(address)
            raise
    return address, capacity, owner


def _give_back(driver: Driver, context: int, buffers: list[Buffer]) -> None:
    for buffer in buffers:
        if buffer.owned:
            driver.free_later(context, buffer.address, buffer.capacity, buffer.owner, buffer.life)
