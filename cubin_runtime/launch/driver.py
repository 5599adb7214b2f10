"""The CUDA driver: devices and contexts here, memory, streams and functions in the classes below it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..values import dataclass
from . import driver_api as api
from .driver_errors import DriverCallError, DriverLibraryError
from .driver_functions import DriverFunctions
from .driver_memory import DriverMemory
from .driver_streams import DriverStreams
from .streams import is_default

__all__ = ["DeviceFacts", "Driver", "DriverCallError", "DriverLibraryError"]
_ALREADY_CURRENT = nullcontext()


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What planning needs of a device; sizes in bytes, ``driver_version`` is 1000 x major + 10 x minor."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block_optin: int
    shared_bytes_per_multiprocessor: int
    l2_bytes: int
    driver_version: int


class Driver(DriverMemory, DriverStreams, DriverFunctions):
    """libcuda through ctypes, opened on first use; ``library_path`` replaces what would be found."""

    def __init__(self, library_path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(library_path)
        self._devices: dict[int, DeviceFacts] = {}
        self._primary: dict[int, int] = {}  # device -> its primary context

    def version(self) -> int:
        """The CUDA version the driver supports, 1000 x major + 10 x minor."""
        return self.out_int("cuDriverGetVersion")

    def device_count(self) -> int:
        """How many devices are visible."""
        return self.out_int("cuDeviceGetCount")

    def device(self, ordinal: int = 0) -> DeviceFacts:
        """The facts of one device, asked for once."""
        known = self._devices.get(ordinal)
        if known is not None:
            return known
        handle = self.out_int("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", ctypes.addressof(name), len(name), handle)

        def fact(attribute: int) -> int:
            return self.out_int("cuDeviceGetAttribute", attribute, handle)

        facts = DeviceFacts(
            ordinal=ordinal,
            name=name.value.decode("utf-8", "replace"),
            capability=(fact(api.DEVICE_CAPABILITY_MAJOR), fact(api.DEVICE_CAPABILITY_MINOR)),
            multiprocessors=fact(api.DEVICE_MULTIPROCESSORS),
            shared_bytes_per_block_optin=fact(api.DEVICE_SHARED_PER_BLOCK_OPTIN),
            shared_bytes_per_multiprocessor=fact(api.DEVICE_SHARED_PER_MULTIPROCESSOR),
            l2_bytes=fact(api.DEVICE_L2_BYTES),
            driver_version=self.version(),
        )
        self._devices[ordinal] = facts
        return facts

    def primary_context(self, ordinal: int = 0) -> int:
        """The device's primary context (the one that torch and CuPy use), retained once for this process."""
        with self._lock:
            if ordinal not in self._primary:
                handle = self.out_int("cuDeviceGet", ordinal)
                self._primary[ordinal] = self.out_pointer("cuDevicePrimaryCtxRetain", handle)
            return self._primary[ordinal]

    def release_primary_context(self, ordinal: int = 0) -> None:
        """Give back what ``primary_context`` retained; no error if nothing was."""
        with self._lock:
            if self._primary.pop(ordinal, None) is not None:
                self.call("cuDevicePrimaryCtxRelease", self.out_int("cuDeviceGet", ordinal))

    def current_context(self) -> int | None:
        """The context current on this thread, or None."""
        return self.out_pointer("cuCtxGetCurrent") or None

    def set_current(self, context: int | None) -> None:
        """Make ``context`` current on this thread; None leaves the thread without one."""
        self.call("cuCtxSetCurrent", context)

    def context_on(self, ordinal: int) -> int:
        """The context that work on a device belongs in; what is current stays as it is.

        That is the current context where it is of that device (a program's own and a green one too), else the
        device's primary context.
        """
        current, primary = self.current_context(), self._primary.get(ordinal)
        if current is not None and (current == primary or self.context_device() == ordinal):
            return current
        return self.primary_context(ordinal) if primary is None else primary

    def context_of(self, stream: int, ordinal: int) -> int:
        """The context that work on a stream of a device belongs in: the stream's own.

        For a default stream, one that captures, which must not be asked, and one of another device it is that of
        ``context_on``.
        """
        if not is_default(stream) and not self.is_capturing(stream):
            its = self.stream_context(stream)
            if self.context_device(its) == ordinal:
                return its
        return self.context_on(ordinal)

    def context_device(self, context: int | None = None) -> int:
        """The ordinal of a context's device; None: of the current one."""
        if context is None:
            return self.out_int("cuCtxGetDevice")
        for ordinal, primary in self._primary.copy().items():
            if primary == context:
                return ordinal
        with self.using(context):
            return self.out_int("cuCtxGetDevice")

    def using(self, context: int) -> AbstractContextManager[None]:
        """Run a block with ``context`` current on this thread, then restore what was."""
        return _ALREADY_CURRENT if self.current_context() == context else self._pushed(context)

    @contextmanager
    def _pushed(self, context: int) -> Iterator[None]:
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.out_pointer("cuCtxPopCurrent")
