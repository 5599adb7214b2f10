"""Device memory: allocate, free, copy, fill. Addresses are ints; host memory is passed by the buffer protocol."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from .driver_core import DriverCore


class Life(Protocol):
    """Of something that uses memory."""

    @property
    def ended(self) -> bool:
        """Whether nothing uses it any more."""
        ...


class _Waiting(NamedTuple):
    """Memory to be freed, and whose work may still use it."""

    context: int
    address: int
    nbytes: int
    user: Hashable
    life: Life | None


class DriverMemory(DriverCore):
    """Memory calls; all need a current context and raise ``DriverCallError``."""

    def __init__(self, library_path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(library_path)
        self._waiting: deque[_Waiting] = deque()

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current context's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo", ctypes.addressof(free), ctypes.addressof(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """Device address of ``nbytes`` (at least 1) new bytes, aligned to 256 or more, not cleared."""
        if nbytes < 1:
            raise UsageError(f"nbytes={nbytes}: expected at least 1")
        return self.out_pointer("cuMemAlloc", nbytes)

    def free(self, address: int) -> None:
        """Give memory from ``allocate`` back; waits for work that uses it."""
        self.call("cuMemFree", address)

    def free_later(
        self, context: int, address: int, nbytes: int = 0, user: Hashable = None, life: Life | None = None
    ) -> None:
        """Note memory for ``free_waiting``: freeing at any moment could break a capture that is under way.

        ``user`` tells the stream all of whose work on the ``nbytes`` is in order; None: no other use may follow.
        ``life``: it is not freed before that has ended.
        """
        self._waiting.append(_Waiting(context, address, nbytes, user, life))

    def waiting_for(self, context: int, nbytes: int, user: Hashable) -> tuple[int, int] | None:
        """Take memory that waits to be freed and had the same user: its address and bytes.

        It has at least ``nbytes``, and at most twice as many.
        """
        for found in tuple(self._waiting):
            fits = found.context == context and nbytes <= found.nbytes <= 2 * nbytes
            if fits and found.life is None and found.user == user is not None:
                try:
                    self._waiting.remove(found)
                except ValueError:  # another thread took it
                    continue
                return found.address, found.nbytes
        return None

    def free_waiting(self) -> None:
        """Free what ``free_later`` noted; no stream may be capturing."""
        for _ in range(len(self._waiting)):
            try:
                found = self._waiting.popleft()
            except IndexError:  # another thread frees the rest
                return
            if found.life is not None and not found.life.ended:
                self._waiting.append(found)
                continue
            self.call("cuCtxPushCurrent", found.context)
            try:
                self.free(found.address)
            finally:
                self.out_pointer("cuCtxPopCurrent")

    def copy_to_device(self, address: int, host: Any) -> None:
        """Copy a whole host buffer to ``address``; returns when the host buffer may be reused."""
        with _HostBuffer(host, writable=False) as (pointer, size):
            if size:
                self.call("cuMemcpyHtoD", address, pointer, size)

    def copy_to_host(self, host: Any, address: int) -> None:
        """Fill a whole writable host buffer from ``address``; returns when the bytes are there."""
        with _HostBuffer(host, writable=True) as (pointer, size):
            if size:
                self.call("cuMemcpyDtoH", pointer, address, size)

    def read(self, address: int, nbytes: int) -> bytes:
        """``nbytes`` of device memory as bytes."""
        host = bytearray(nbytes)
        self.copy_to_host(host, address)
        return bytes(host)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set ``nbytes`` bytes to ``value`` (0 to 255) in stream order."""
        if not 0 <= value <= 255:
            raise UsageError(f"value={value}: expected 0 to 255")
        self.call("cuMemsetD8Async", address, value, nbytes, stream)

    def fill_words(self, address: int, value: int, words: int, stream: int) -> None:
        """Set ``words`` 32-bit words at a 4-byte aligned address to ``value`` (unsigned) in stream order."""
        if not 0 <= value < 1 << 32:
            raise UsageError(f"value={value}: expected 0 to {(1 << 32) - 1}")
        self.call("cuMemsetD32Async", address, value, words, stream)


class _HostBuffer:
    """The address and size of a C-contiguous host buffer, held for the duration of one copy."""

    def __init__(self, host: Any, *, writable: bool) -> None:
        self._view = memoryview(host)
        if not self._view.c_contiguous:
            raise UsageError("host buffer: expected C-contiguous memory")
        if writable and self._view.readonly:
            raise UsageError("host buffer: expected writable memory")
        self._keep: Any = None

    def __enter__(self) -> tuple[int, int]:
        size = self._view.nbytes
        if self._view.readonly:
            # ctypes gives no address of read-only memory; a copy costs less than a special way for bytes.
            self._keep = ctypes.create_string_buffer(self._view.tobytes(), size or 1)
        elif size:
            self._keep = (ctypes.c_ubyte * size).from_buffer(self._view)
        return (ctypes.addressof(self._keep) if self._keep is not None else 0), size

    def __exit__(self, *_: object) -> None:
        self._keep = None
        self._view.release()
