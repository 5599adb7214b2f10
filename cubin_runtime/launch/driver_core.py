"""Opening libcuda on first use and calling it, with one check for every call and a record of faults."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from . import driver_api as api
from .driver_errors import STICKY, DriverCallError, DriverLibraryError
from .history import LaunchHistory, LaunchRecord
from .profiler import Profiler

_LIBCUDA = "libcuda.so.1"


class DriverCore:
    """libcuda opened on first use; safe between threads, not usable in a child forked after that."""

    prototypes: ClassVar[Mapping[str, api.Prototype]] = api.PROTOTYPES

    def __init__(self, library_path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if library_path is None else os.fspath(library_path)
        self._functions: dict[str, Callable[..., int]] = {}
        self._library: ctypes.CDLL | None = None
        self._pid = 0
        self._lock = threading.RLock()
        self._first_faults: dict[int, str] = {}
        self._histories: dict[int, LaunchHistory] = {}
        self.profiler: Profiler | None = None  # set before any launch is prepared

    def function(self, name: str) -> Callable[..., int]:
        """The ctypes function for one entry of ``prototypes``; it returns the CUresult unchecked.

        Raises:
            DriverLibraryError: libcuda cannot be opened or has no such function.
        """
        found = self._functions.get(name)
        return found if found is not None else self._resolve(name)

    def has(self, name: str) -> bool:
        """Whether the driver is new enough to have the function ``name``."""
        try:
            self.function(name)
        except DriverLibraryError:
            if self._library is None:
                raise
            return False
        return True

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function and raise if it fails.

        Raises:
            DriverCallError: it returned anything but success.
            DriverLibraryError: libcuda cannot be opened or has no such function.
        """
        code = self.function(name)(*arguments)
        if code:
            raise self.error(name, code)

    def history(self, context: int) -> LaunchHistory:
        """The last launches in a context."""
        found = self._histories.get(context)
        return found if found is not None else self._histories.setdefault(context, LaunchHistory())

    def last_launches(self) -> tuple[LaunchRecord, ...]:
        """The last launches of each context, newest last; asks the driver nothing, so a fault does not matter."""
        return tuple(record for history in list(self._histories.values()) for record in history.records())

    @property
    def launches(self) -> int:
        """Launches in all contexts."""
        return sum(history.launches for history in list(self._histories.values()))

    def error(self, call: str, code: int, context: int | None = None) -> DriverCallError:
        """The error for a ``call`` that returned ``code``; for a fault it holds the last launches in ``context``.

        None: in the current one.
        """
        launches: tuple[LaunchRecord, ...] = ()
        first = ""
        if code in STICKY:
            if context is None:
                slot = ctypes.c_void_p()
                self.function("cuCtxGetCurrent")(ctypes.addressof(slot))
                context = slot.value or 0
            first = self._first_faults.setdefault(context, call)
            launches = self.history(context).records()
        name, text = self._words("cuGetErrorName", code), self._words("cuGetErrorString", code)
        return DriverCallError(call, code, name, text, launches, first)

    def check_process(self) -> None:
        """Raise ``DriverLibraryError`` in a child forked after the library was opened."""
        if self._library is not None and self._pid != os.getpid():
            raise DriverLibraryError("opened before a fork: CUDA cannot be used in the child")

    def out_pointer(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument is where it writes a handle; return the handle."""
        slot = ctypes.c_void_p()
        self.call(name, ctypes.addressof(slot), *arguments)
        return slot.value or 0

    def out_int(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument is where it writes an int; return the int."""
        slot = ctypes.c_int()
        self.call(name, ctypes.addressof(slot), *arguments)
        return slot.value

    def _words(self, name: str, code: int) -> str:
        slot = ctypes.c_char_p()
        failed = self.function(name)(code, ctypes.addressof(slot))
        return "unknown" if failed or slot.value is None else slot.value.decode("ascii", "replace")

    def _resolve(self, name: str) -> Callable[..., int]:
        prototype = self.prototypes[name]
        with self._lock:
            library = self._open()
            for symbol in prototype.symbols:
                try:
                    found = library[symbol]
                except AttributeError:
                    continue
                if prototype.converted:
                    found.argtypes = prototype.arguments
                found.restype = ctypes.c_int
                self._functions[name] = self._relaxed(found) if prototype.relaxed else found
                return self._functions[name]
        wanted = " or ".join(prototype.symbols)
        raise DriverLibraryError(f"{library._name} has no {wanted}: a newer driver is needed")

    def _relaxed(self, function: Callable[..., int]) -> Callable[..., int]:
        """``function`` in the relaxed capture mode of the calling thread, which is then as it was."""
        exchange = self.function("cuThreadExchangeStreamCaptureMode")

        def relaxed(*arguments: Any) -> int:
            mode = ctypes.c_int(api.CAPTURE_MODE_RELAXED)
            if exchange(ctypes.addressof(mode)):
                return function(*arguments)
            try:
                return function(*arguments)
            finally:
                exchange(ctypes.addressof(mode))

        return relaxed

    def _open(self) -> ctypes.CDLL:
        if self._library is not None:
            self.check_process()
            return self._library
        library = _opened(_LIBCUDA if self._path is None else self._path)
        try:
            init = library["cuInit"]
        except AttributeError:
            raise DriverLibraryError(f"{library._name} has no cuInit: it is not the CUDA driver library") from None
        init.argtypes, init.restype = [ctypes.c_uint], ctypes.c_int
        code = init(0)
        # Kept even when cuInit fails: its error needs the library's own words.
        self._functions = {}
        self._library, self._pid = library, os.getpid()
        if code:
            failure = self.error("cuInit", code)
            self._library, self._functions = None, {}
            raise failure
        return library


def _opened(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        why = str(error).removeprefix(f"{path}: ")
        raise DriverLibraryError(
            f"cannot open the CUDA driver library {path!r}, which the NVIDIA driver installs: {why}"
        ) from error
