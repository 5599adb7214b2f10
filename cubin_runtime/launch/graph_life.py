"""Detecting that a captured graph was destroyed, without a callback into Python."""

from __future__ import annotations

import ctypes

from .driver import Driver

_SEM_BYTES = 64  # more than sem_t has on any Linux


class GraphLife:
    """The life of the graph that a stream captures: it ends with the graph, its executables and their replays.

    The driver then posts a semaphore of the C library, which is all that its callbacks may do: on a thread of the
    driver's, waiting for Python's lock could block the very call that destroys the graph.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        """Tie to the capture of ``stream``.

        Raises:
            DriverError: the stream does not capture, or its capture is spoilt.
        """
        libc = ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(_SEM_BYTES)
        self._try = libc.sem_trywait
        self._ended = False
        libc.sem_init(self._semaphore, 0, 0)
        post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0
        driver.retain_in_graph(driver.captured_graph(stream), ctypes.addressof(self._semaphore), post)

    @property
    def ended(self) -> bool:
        """Whether nothing can replay the graph any more. This object must be kept until then."""
        self._ended = self._ended or self._try(self._semaphore) == 0
        return self._ended
