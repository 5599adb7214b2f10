"""Device scratch: one buffer, one owner at a time, cut into aligned regions; counters in it start at zero."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError, WorkspaceError
from .driver import Driver
from .streams import stream_handle

REGION_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a workspace that a plan needs: its name, size in bytes and alignment (a power of two).

    ``zeroed``: it must be zero when a kernel first gets it, and kernels leave it so (but for a status word).
    """

    name: str
    nbytes: int
    alignment: int = REGION_ALIGNMENT
    zeroed: bool = False

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise UsageError(f"{self}: expected bytes of 0 or more and an alignment that is a power of two")


def workspace_size(regions: Sequence[Region]) -> int:
    """Bytes that always suffice for ``regions``, wherever an address begins that is a multiple of 16."""
    slack = max((region.alignment for region in regions), default=1) - 16
    return _end(0, regions) + max(0, slack)


class _Hold:
    """What is known of a workspace's memory when the workspace itself is gone."""

    __slots__ = ("address", "context", "driver", "owned", "owner")

    def __init__(self, driver: Driver, context: int, address: int, owned: bool) -> None:
        self.driver = driver
        self.context = context
        self.address = address
        self.owned = owned
        self.owner: tuple[str, int] | None = None

    def give_back(self) -> None:
        # A graph may be replayed at any time: what it holds stays for as long as the process.
        if self.owned and (self.owner is None or self.owner[0] == "stream"):
            self.driver.free_later(self.context, self.address)


class Workspace:
    """A device buffer that belongs to one stream, or one captured graph, at a time.

    Kernels leave the counters in it at zero, so it is cleared once; after a fault call ``reset``. Owned memory whose
    workspace nothing refers to any more is freed when the next one is made, unless a captured graph has it.
    """

    def __init__(self, driver: Driver, context: int, address: int, nbytes: int, *, owned: bool = False) -> None:
        """Wrap ``nbytes`` of zeroed device memory at ``address``; ``owned`` memory is freed by ``close``."""
        if nbytes < 0 or address % 16:
            raise WorkspaceError(f"workspace at {address:#x} of {nbytes} bytes: expected a multiple of 16")
        self.context = context
        self.address = address
        self.nbytes = nbytes
        self.key = (address, nbytes)  # equal keys give equal regions
        self._driver = driver
        self._hold = _Hold(driver, context, address, owned)
        self._lock = threading.Lock()
        if owned:
            weakref.finalize(self, self._hold.give_back).atexit = False

    @classmethod
    def allocate(cls, driver: Driver, context: int, nbytes: int, stream: Any = 0) -> Workspace:
        """New zeroed memory, cleared in the order of ``stream``.

        Raises:
            WorkspaceError: ``stream`` is capturing.
            DriverError: the device has not that much memory.
        """
        handle = stream_handle(stream)
        with driver.using(context):
            if driver.is_capturing(handle):
                raise WorkspaceError(
                    f"a workspace of {nbytes} bytes would be made while stream {handle:#x} captures: "
                    "make it before, with prepare(stream)"
                )
            driver.free_waiting()
            workspace = cls(driver, context, driver.allocate(max(1, nbytes)), nbytes, owned=True)
            try:
                workspace.reset(handle)
            except Exception:
                workspace.close()
                raise
        return workspace

    def regions(self, needed: Sequence[Region]) -> dict[str, int]:
        """The device address of each region, in order, each aligned as it asks.

        Raises:
            WorkspaceError: the buffer is too small; the message names the bytes needed.
        """
        return _place("workspace", self.address, self.nbytes, needed)

    def claim(self, stream: Any) -> None:
        """Take the workspace for ``stream``, or for the capture it takes part in; doing so again is no error.

        A capture takes it over from its own stream (after a warm-up there) and keeps it: a replay may run on
        any stream, so eager work must not share it.

        Raises:
            WorkspaceError: another stream or captured graph has it.
        """
        handle = stream_handle(stream)
        with self._driver.using(self.context):
            capture = self._driver.capture_id(handle)
        owner = ("stream", handle) if capture is None else ("captured graph", capture)
        with self._lock:
            takes_over = capture is not None and self._hold.owner == ("stream", handle)
            if self._hold.owner not in (None, owner) and not takes_over:
                have, number = self._hold.owner or owner
                raise WorkspaceError(
                    f"workspace at {self.address:#x} belongs to {have} {number:#x}, not to {owner[0]} "
                    f"{owner[1]:#x}: give each its own, or release() it when that work is done"
                )
            self._hold.owner = owner

    def release(self) -> None:
        """Let another stream claim it; the caller has made sure that the work of the last owner is done."""
        with self._lock:
            self._hold.owner = None

    def reset(self, stream: Any = 0) -> None:
        """Set all bytes to zero in stream order; needed after a fault or an aborted kernel."""
        if self.nbytes:
            with self._driver.using(self.context):
                self._driver.fill(self.address, 0, self.nbytes, stream_handle(stream))

    def keep(self) -> None:
        """Leave the memory allocated for as long as the process, whoever uses it: a captured graph has its address."""
        self._hold.owned = False

    def close(self) -> None:
        """Free owned memory; calling it again does nothing."""
        if self._hold.owned:
            self._hold.owned = False
            with self._driver.using(self.context):
                self._driver.free(self.address)


@dataclass(frozen=True, slots=True)
class SemaphoreWorkspace:
    """A caller's two buffers, each ``(address, bytes)``, for operators that keep such a convention.

    ``semaphores`` is zero before the first launch that gets it and holds nothing but regions that begin as zeros,
    so that launches of any plan may follow one another on it; ``scratch`` may hold anything. The caller keeps work on
    other streams away from both. ``context`` is where they live; None: the current one, or the device's primary one.
    ``owner`` is held as long as this is, where somebody else's dropping it would free the semaphores.
    """

    semaphores: tuple[int, int]
    scratch: tuple[int, int]
    context: int | None = None
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, (address, nbytes) in (("semaphores", self.semaphores), ("scratch", self.scratch)):
            if nbytes < 0 or address % 16:
                raise WorkspaceError(f"{name} at {address:#x} of {nbytes} bytes: expected a multiple of 16")

    @property
    def key(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Equal keys give equal regions."""
        return self.semaphores, self.scratch

    def regions(self, needed: Sequence[Region]) -> dict[str, int]:
        """The device address of each region: those that begin as zeros in the semaphores, the others in the scratch.

        Raises:
            WorkspaceError: a buffer is too small; the message names it and the bytes needed.
        """
        zeroed = [region for region in needed if region.zeroed]
        others = [region for region in needed if not region.zeroed]
        return _place("semaphores", *self.semaphores, zeroed) | _place("scratch", *self.scratch, others)

    def claim(self, stream: Any) -> None:
        """Nothing: that one stream at a time uses the buffers is the caller's affair."""


class WorkspacePool:
    """One workspace for each (plan, stream), made outside of captures and kept until ``close``."""

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._lock = threading.Lock()
        self._held: dict[tuple[Hashable, int], Workspace] = {}

    def take(self, plan: Hashable, stream: Any, nbytes: int) -> Workspace:
        """The workspace of ``plan`` on ``stream``, claimed for it, with at least ``nbytes``.

        Raises:
            WorkspaceError: it is not there and the stream is capturing, or it is there but smaller.
        """
        handle = stream_handle(stream)
        with self._lock:
            workspace = self._held.get((plan, handle))
            if workspace is None:
                workspace = Workspace.allocate(self._driver, self._context, nbytes, handle)
                self._held[(plan, handle)] = workspace
        if workspace.nbytes < nbytes:
            raise WorkspaceError(f"workspace of {workspace.nbytes} bytes: {nbytes} bytes are needed")
        workspace.claim(handle)
        return workspace

    def close(self) -> None:
        """Free all of them; no work may still use one."""
        with self._lock:
            held, self._held = self._held, {}
        for workspace in held.values():
            workspace.close()


def _place(what: str, address: int, nbytes: int, needed: Sequence[Region]) -> dict[str, int]:
    end = _end(address, needed) - address
    if end > nbytes:
        parts = ", ".join(f"{region.name} {region.nbytes}" for region in needed)
        raise WorkspaceError(f"{what} of {nbytes} bytes: {end} bytes are needed ({parts})")
    addresses: dict[str, int] = {}
    at = address
    for region in needed:
        at = _round_up(at, region.alignment)
        addresses[region.name] = at
        at += region.nbytes
    return addresses


def _end(start: int, regions: Sequence[Region]) -> int:
    at = start
    for region in regions:
        at = _round_up(at, region.alignment) + region.nbytes
    return at


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
