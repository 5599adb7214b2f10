"""Semaphores that suffice: a caller who counts them as the peer does has fewer than our kernels need."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from ..attention.runtime import Runtime
from ..errors import WorkspaceError
from ..launch.workspace import REGION_ALIGNMENT, Workspace

_CTAS_PER_MULTIPROCESSOR = 32  # no device holds more
_COUNTER_BYTES = 4

_lock = threading.Lock()
_made: WeakKeyDictionary[Runtime, dict[tuple[int, int], Workspace]] = WeakKeyDictionary()


def enough_semaphores(
    given: tuple[int, int], *, rows: int, stream: int, device: int, runtime: Runtime
) -> tuple[int, int]:
    """``given`` (address, bytes), or zeroed memory of our own where it is too small for ``rows`` tokens x heads.

    That memory is kept for the given address for good, so whoever has the semaphores to himself has it too.

    Raises:
        WorkspaceError: it is not there yet and ``stream`` captures; the message names the bytes needed.
    """
    counters = max(rows, _CTAS_PER_MULTIPROCESSOR * runtime.driver.device(device).multiprocessors)
    needed = 3 * REGION_ALIGNMENT + counters * _COUNTER_BYTES
    if given[1] >= needed:
        return given
    needed = 1 << (needed - 1).bit_length()
    with _lock:
        known = _made.setdefault(runtime, {})
        workspace = known.get((given[0], needed))
        if workspace is None:
            context = runtime.driver.ensure_context(device)
            if runtime.driver.is_capturing(stream):
                raise WorkspaceError(
                    f"semaphores of {given[1]} bytes: {needed} bytes are needed while a stream captures"
                )
            workspace = known[(given[0], needed)] = Workspace.allocate(runtime.driver, context, needed, stream)
    return workspace.address, workspace.nbytes
