"""Semaphores that suffice: a caller who counts them as the peer does has fewer than our kernels need."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..attention.runtime import Runtime
from ..errors import WorkspaceError
from ..launch.regions import REGION_ALIGNMENT
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.workspace import Workspace

_CTAS_PER_MULTIPROCESSOR = 32  # no device holds more
_COUNTER_BYTES = 4
# Semaphores that a runtime keeps memory for, beside those that graphs were captured with.
_MOST_EAGER = 64


@dataclass(frozen=True, slots=True)
class _Made:
    """Memory by the address of the semaphores that it stands for; of ``eager``, the least recently used is first."""

    eager: OrderedDict[int, Workspace] = field(default_factory=OrderedDict)
    captured: dict[int, Workspace] = field(default_factory=dict)


_lock = threading.Lock()
_made: WeakKeyDictionary[Runtime, _Made] = WeakKeyDictionary()


def with_enough_semaphores(
    given: tuple[int, int], scratch: tuple[int, int], *, rows: int, stream: int, device: int, runtime: Runtime
) -> SemaphoreWorkspace:
    """A caller's semaphores and scratch, each (address, bytes), as a workspace.

    Where the semaphores are too few for ``rows`` tokens x heads, zeroed memory of our own takes their place. It stands
    for the given address, so whoever has the semaphores to himself has it too. It is kept for good once a graph has it,
    else until many other addresses had their turn, and not before the workspace is gone.

    Raises:
        WorkspaceError: it is not there yet and ``stream`` captures; the message names the bytes needed.
    """
    counters = max(rows, _CTAS_PER_MULTIPROCESSOR * runtime.driver.device(device).multiprocessors)
    needed = 3 * REGION_ALIGNMENT + counters * _COUNTER_BYTES
    if given[1] >= needed:
        return SemaphoreWorkspace(given, scratch)
    needed = 1 << (needed - 1).bit_length()
    with _lock:
        made = _made.setdefault(runtime, _Made())
        workspace = made.captured.get(given[0])
        if workspace is None or workspace.nbytes < needed:
            workspace = _eager(made, given, needed, stream, device, runtime)
    return SemaphoreWorkspace((workspace.address, workspace.nbytes), scratch, owner=workspace)


def _eager(made: _Made, given: tuple[int, int], needed: int, stream: int, device: int, runtime: Runtime) -> Workspace:
    """The memory of no graph yet that stands for ``given``, made where it lacks or is too small.

    A capture takes it over. Else what is dropped is freed when other memory is made, behind the work that uses it.
    """
    address = given[0]
    context = runtime.driver.context_on(device)
    workspace = made.eager.get(address)
    with runtime.driver.using(context):
        capturing = runtime.driver.is_capturing(stream)
    if workspace is None or workspace.nbytes < needed:
        if capturing:
            raise WorkspaceError(f"semaphores of {given[1]} bytes: {needed} bytes are needed while a stream captures")
        workspace = made.eager[address] = Workspace.allocate(runtime.driver, context, needed, stream)
    if capturing:
        workspace.keep()
        made.captured[address] = made.eager.pop(address)
        return workspace
    made.eager.move_to_end(address)
    if len(made.eager) > _MOST_EAGER:
        made.eager.popitem(last=False)
    return workspace
