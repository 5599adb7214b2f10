"""Detecting that a captured graph was destroyed, without a callback into Python."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

from .driver import Driver

_SEM_BYTES = 64  # more than sem_t has on any Linux


class GraphLife:
    """The life of the graph that a stream captures: it ends with the graph, its executables and their replays.

    The driver then posts a semaphore of the C library, which is all that its callbacks may do: on a thread of the
    driver's, waiting for Python's lock could block the very call that destroys the graph.

    The driver knows the semaphore's address until then, whatever drops this object, and beyond the interpreter's end.
    So the semaphore lies in the C library's memory, which is freed only once it was posted.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        """Tie to the capture of ``stream``.

        Raises:
            DriverError: the stream does not capture, or its capture is spoilt.
        """
        for life in tuple(_alive):
            life.ended  # noqa: B018  # frees the semaphores of those that nothing else asks
        libc, graph = _libc(), driver.captured_graph(stream)
        semaphore = libc.malloc(_SEM_BYTES)
        if semaphore is None:
            raise MemoryError
        libc.sem_init(semaphore, 0, 0)
        self._semaphore: int | None = semaphore
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0
        # If this fails, the driver may have the address all the same, so the memory stays.
        driver.retain_in_graph(graph, semaphore, post)
        _alive.add(self)

    @property
    def ended(self) -> bool:
        """Return whether nothing can replay the graph any more."""
        with _lock:
            if self._semaphore is not None and _libc().sem_trywait(self._semaphore) == 0:
                _libc().free(self._semaphore)
                self._semaphore = None
                _alive.discard(self)
        return self._semaphore is None


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_trywait.argtypes = library.free.argtypes = [ctypes.c_void_p]
    return library


_alive: set[GraphLife] = set()  # whose semaphores the driver has
_lock = threading.RLock()
