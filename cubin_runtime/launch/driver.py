"""The CUDA driver: libcuda opened on first use, one check for every call, and a record of launches and faults.

Handles (contexts, streams, modules, functions) and device addresses are ints; stream 0 is the legacy default stream.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

from ..errors import UsageError
from ..values import dataclass
from . import driver_api as api
from .accelerator import STREAM_QUERY, accelerator
from .driver_errors import STICKY, DriverCallError, DriverLibraryError
from .history import LaunchHistory, LaunchRecord
from .profiler import Profiler
from .structs import INT32_MAX, TENSOR_MAP_BYTES

__all__ = ["DeviceFacts", "Driver", "DriverCallError", "DriverLibraryError", "Life"]
_LIBCUDA = "libcuda.so.1"
_ALREADY_CURRENT = nullcontext()
PER_THREAD = 2  # the handle of the default stream that each thread has
_ENCODE = "cuTensorMapEncodeTiled"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of a device that planning needs; sizes in bytes, ``driver_version`` is 1000 x major + 10 x minor."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block_optin: int
    shared_bytes_per_multiprocessor: int
    l2_bytes: int
    driver_version: int

    @property
    def sm_number(self) -> int:
        """The compute capability as a target's number, 90 for 9.0."""
        return self.capability[0] * 10 + self.capability[1]


class Life(Protocol):
    """The life of something that uses memory."""

    @property
    def ended(self) -> bool:
        """Return whether nothing uses it any more."""
        ...


class _Waiting(NamedTuple):
    """Memory to be freed, and whose work may still use it."""

    context: int
    address: int
    nbytes: int
    user: Hashable
    life: Life | None


class _StreamState(ctypes.Structure):
    """The values that ``stream_identity`` asks for, in one piece of memory."""

    _fields_ = (("status", ctypes.c_int), ("capture", ctypes.c_uint64), ("number", ctypes.c_ulonglong))


class Driver:
    """libcuda through ctypes; ``library_path`` replaces what would be found.

    It is safe between threads and not usable in a child forked after libcuda was opened. Calls on memory, streams,
    modules and functions need a current context; every call raises ``DriverCallError`` if it fails.
    """

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
        self._devices: dict[int, DeviceFacts] = {}
        self._primary: dict[int, int] = {}  # device -> its primary context
        self._waiting: deque[_Waiting] = deque()
        self._states: list[tuple[_StreamState, int]] = []  # memory of ``stream_identity`` that no thread has

    def function(self, name: str) -> Callable[..., int]:
        """The ctypes function for one entry of ``prototypes``; it returns the CUresult unchecked.

        Raises:
            DriverLibraryError: libcuda cannot be opened or has no such function.
        """
        address = self._functions.get(name)
        return address if address is not None else self._resolve(name)

    def has(self, name: str) -> bool:
        """Return whether the driver is new enough to have the function ``name``."""
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
        code = (self._functions.get(name) or self._resolve(name))(*arguments)
        if code:
            raise self.error(name, code)

    def history(self, context: int) -> LaunchHistory:
        """The last launches in a context."""
        history = self._histories.get(context)
        return history if history is not None else self._histories.setdefault(context, LaunchHistory())

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
        code = (self._functions.get(name) or self._resolve(name))(ctypes.addressof(slot), *arguments)
        if code:
            raise self.error(name, code)
        return slot.value or 0

    def out_int(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument is where it writes an int; return the int."""
        slot = ctypes.c_int()
        self.call(name, ctypes.addressof(slot), *arguments)
        return slot.value

    # Devices and contexts

    def version(self) -> int:
        """The CUDA version the driver supports, 1000 x major + 10 x minor."""
        return self.out_int("cuDriverGetVersion")

    def device_count(self) -> int:
        """Count the devices that are visible."""
        return self.out_int("cuDeviceGetCount")

    def device(self, ordinal: int = 0) -> DeviceFacts:
        """The facts of one device, asked for once."""
        facts = self._devices.get(ordinal)
        if facts is not None:
            return facts
        handle = self._device_handle(ordinal)
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

    def _device_handle(self, ordinal: int) -> int:
        # C would take the low 32 bits of a larger number, those of another device.
        if ordinal > INT32_MAX:
            raise self.error("cuDeviceGet", api.INVALID_DEVICE)
        return self.out_int("cuDeviceGet", ordinal)

    def primary_context(self, ordinal: int = 0) -> int:
        """The device's primary context (the one that torch and CuPy use), retained once for this process."""
        with self._lock:
            if ordinal not in self._primary:
                handle = self._device_handle(ordinal)
                self._primary[ordinal] = self.out_pointer("cuDevicePrimaryCtxRetain", handle)
            return self._primary[ordinal]

    def release_primary_context(self, ordinal: int = 0) -> None:
        """Give back what ``primary_context`` retained; no error if nothing was."""
        with self._lock:
            if self._primary.pop(ordinal, None) is not None:
                self.call("cuDevicePrimaryCtxRelease", self._device_handle(ordinal))

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
        current, primary = self.out_pointer("cuCtxGetCurrent"), self._primary.get(ordinal)
        if current and (current == primary or self.context_device() == ordinal):
            return current
        return self.primary_context(ordinal) if primary is None else primary

    def context_of(self, stream: int, ordinal: int) -> int:
        """The context that work on a stream of a device belongs in: the stream's own.

        For a default stream, one that captures, which must not be asked, and one of another device it is that of
        ``context_on``.
        """
        if not is_default(stream) and not self.is_capturing(stream):
            context = self.stream_context(stream)
            if self.context_device(context) == ordinal:
                return context
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
        return _ALREADY_CURRENT if self.out_pointer("cuCtxGetCurrent") == context else self._pushed(context)

    # Memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the current context's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo", ctypes.addressof(free), ctypes.addressof(total))
        return free.value, total.value

    def allocate(self, nbytes: int) -> int:
        """Device address of ``nbytes`` (at least 1) new bytes, aligned to 256 or more, not cleared."""
        if nbytes < 1:
            raise UsageError("expected at least 1", argument="nbytes", value=nbytes)
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
        for waiting in tuple(self._waiting):
            fits = waiting.context == context and nbytes <= waiting.nbytes <= 2 * nbytes
            if fits and waiting.life is None and waiting.user == user is not None:
                try:
                    self._waiting.remove(waiting)
                except ValueError:  # another thread took it
                    continue
                return waiting.address, waiting.nbytes
        return None

    def free_waiting(self) -> None:
        """Free what ``free_later`` noted; no stream may be capturing."""
        for _ in range(len(self._waiting)):
            try:
                waiting = self._waiting.popleft()
            except IndexError:  # another thread frees the rest
                return
            if waiting.life is not None and not waiting.life.ended:
                self._waiting.append(waiting)
                continue
            try:
                with self._pushed(waiting.context):
                    self.free(waiting.address)
            except DriverCallError as error:
                # The memory is gone with a context that is lost; the caller may work in another.
                if not error.sticky and error.code != api.INVALID_CONTEXT:
                    raise

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
            raise UsageError("expected 0 to 255", argument="value", value=value)
        self.call("cuMemsetD8Async", address, value, nbytes, stream)

    def fill_words(self, address: int, value: int, words: int, stream: int) -> None:
        """Set ``words`` 32-bit words at a 4-byte aligned address to ``value`` (unsigned) in stream order."""
        if not 0 <= value < 1 << 32:
            raise UsageError(f"expected 0 to {(1 << 32) - 1}", argument="value", value=value)
        self.call("cuMemsetD32Async", address, value, words, stream)

    # Streams, events and graphs

    def create_stream(self, *, blocking: bool = False) -> int:
        """A new stream; ``blocking`` ones synchronise with the legacy default stream."""
        return self.out_pointer("cuStreamCreate", 0 if blocking else api.STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Release a stream; its work still runs to the end."""
        self.call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all work of the stream; a fault of its kernels surfaces here."""
        self.call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Return whether ``stream`` captures; for 0 also true while another, blocking stream captures."""
        status = ctypes.c_int()
        code = self.function("cuStreamIsCapturing")(stream, ctypes.addressof(status))
        if code == api.CAPTURE_IMPLICIT:
            return True
        if code:
            raise self.error("cuStreamIsCapturing", code)
        return status.value != api.CAPTURE_NONE

    def stream_identity(self, stream: int) -> tuple[int | None, int]:
        """The capture that ``stream`` takes part in, or None; and a number that is the stream's alone, 0 in a capture.

        Handles of destroyed streams come back, numbers do not. A capturing stream is not asked for its number: that is
        an error and spoils the capture.
        """
        try:
            state, at = self._states.pop()
        except IndexError:
            state = _StreamState()
            at = ctypes.addressof(state)
        self.call("cuStreamGetCaptureInfo", stream, at, at + 8, None, None, None, None)
        if state.status != api.CAPTURE_NONE:
            return state.capture, 0
        self.call("cuStreamGetId", stream, at + 16)
        number = state.number
        self._states.append((state, at))
        return None, number

    def stream_query(self, stream: int, number: int) -> Callable[[], bool]:
        """A function that tells whether ``stream``, not a default one, has that number of its own and does not capture.

        Threads may share it.
        """
        functions: Any = self.function("cuStreamIsCapturing"), self.function("cuStreamGetId")
        capturing, identify = functions
        module = accelerator()
        if module is not None:
            addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
            return module.same_stream(STREAM_QUERY.pack(*addresses, stream, number))  # type: ignore[no-any-return]
        state = _StreamState()
        at = ctypes.addressof(state)
        # In this order: to ask a capturing stream for its number would spoil the capture.
        return lambda: (
            not (capturing(stream, at) or state.status or identify(stream, at + 16)) and state.number == number
        )

    def stream_context(self, stream: int) -> int:
        """The context that a stream belongs to; for a default stream the current one. Not while it captures."""
        slot = ctypes.c_void_p()
        self.call("cuStreamGetCtx", stream, ctypes.addressof(slot))
        return slot.value or 0

    def captured_graph(self, stream: int) -> int:
        """The graph that the capture of ``stream`` is filling."""
        status, graph = ctypes.c_int(), ctypes.c_void_p()
        slots = (ctypes.addressof(status), None, ctypes.addressof(graph), None, None, None)
        self.call("cuStreamGetCaptureInfo", stream, *slots)
        return graph.value or 0

    def retain_in_graph(self, graph: int, data: int, destroy: int) -> None:
        """Let the driver call the C function at ``destroy`` with ``data`` once the graph is gone for good.

        That is when the graph, every executable made from it and their last replays have ended. The function runs on
        a thread of the driver's: it must not call CUDA, nor Python.
        """
        held = self.out_pointer("cuUserObjectCreate", data, destroy, 1, api.USER_OBJECT_NO_DESTRUCTOR_SYNC)
        self.call("cuGraphRetainUserObject", graph, held, 1, api.GRAPH_USER_OBJECT_MOVE)

    def create_event(self, *, timing: bool = True) -> int:
        """A new event; without ``timing`` it is cheaper and good for ordering only."""
        return self.out_pointer("cuEventCreate", 0 if timing else api.EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        """Release an event."""
        self.call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Let the event mark this point of the stream."""
        self.call("cuEventRecord", event, stream)

    def synchronize_event(self, event: int) -> None:
        """Wait on the host until the event's point is reached."""
        self.call("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds on the device between two recorded, finished timing events."""
        slot = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.addressof(slot), start, end)
        return slot.value

    # Modules and functions

    def load_module(self, image: bytes) -> int:
        """Load a cubin into the current context; the module's handle."""
        buffer = ctypes.create_string_buffer(image, len(image) + 1)
        return self.out_pointer("cuModuleLoadData", ctypes.addressof(buffer))

    def unload_module(self, module: int) -> None:
        """Unload a module; its functions must not be in use."""
        self.call("cuModuleUnload", module)

    def get_function(self, module: int, symbol: str) -> int:
        """The handle of the kernel ``symbol`` in a module."""
        return self.out_pointer("cuModuleGetFunction", module, symbol.encode())

    def finish_loading(self, function: int) -> None:
        """Put the function's code on the device now; by default the driver waits for the first launch.

        Drivers before 12.4 cannot be asked to: there this does nothing.
        """
        if self.has("cuFuncLoad"):
            self.call("cuFuncLoad", function)

    def function_attribute(self, function: int, attribute: int) -> int:
        """A CUfunction_attribute (the ``FUNC_*`` numbers of ``driver_api``)."""
        return self.out_int("cuFuncGetAttribute", attribute, function)

    def allow_dynamic_shared(self, function: int, nbytes: int) -> None:
        """Allow launches of the function with up to ``nbytes`` dynamic shared memory; needed above 48 KiB."""
        self.call("cuFuncSetAttribute", function, api.FUNC_MAX_DYNAMIC_SHARED_BYTES, nbytes)

    def allow_nonportable_cluster(self, function: int) -> None:
        """Allow clusters of more than 8 blocks for the function."""
        self.call("cuFuncSetAttribute", function, api.FUNC_NONPORTABLE_CLUSTER, 1)

    def parameters(self, function: int, count: int) -> tuple[tuple[int, int], ...] | None:
        """(offset, size) in bytes of the first ``count`` parameters, fewer if the function has fewer.

        None where the driver (before 12.4) cannot say.
        """
        if not self.has("cuFuncGetParamInfo"):
            return None
        ask = self.function("cuFuncGetParamInfo")
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        parameters: list[tuple[int, int]] = []
        # Not one past the last: that call fails by design, and tools that watch the driver report it.
        for index in range(count):
            code = ask(function, index, ctypes.addressof(offset), ctypes.addressof(size))
            if code == api.INVALID_VALUE:  # an index past the last parameter
                break
            if code:
                raise self.error("cuFuncGetParamInfo", code)
            parameters.append((offset.value, size.value))
        return tuple(parameters)

    def active_clusters(self, function: int, config: api.LaunchConfig) -> int:
        """Count the clusters of the launch ``config`` that the current context has room for at once."""
        try:
            return self.out_int("cuOccupancyMaxActiveClusters", function, ctypes.addressof(config))
        except DriverCallError as error:
            if error.code != api.INVALID_CLUSTER_SIZE:
                raise
            return 0

    def encode_tiled(self, *, address: int, **words: Any) -> bytes:
        """The 128 bytes of a tiled TMA descriptor; arguments and rules as in ``tensormap.TensorMapSpec``.

        Nothing is checked here: what the driver refuses comes back as ``DriverCallError``.
        """
        return self.tiled_encoder(**words)(address)

    def tiled_encoder(
        self,
        *,
        dtype: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> Callable[[int], bytes]:
        """A function of an address that gives what ``encode_tiled`` does; one thread at a time may call it."""
        rank = len(dims)
        arrays = (
            (ctypes.c_uint64 * max(1, rank))(*dims),
            (ctypes.c_uint64 * max(1, len(strides)))(*strides),
            (ctypes.c_uint32 * max(1, len(box)))(*box),
            (ctypes.c_uint32 * max(1, len(element_strides)))(*element_strides),
        )
        rest = (*[ctypes.addressof(array) for array in arrays], interleave, swizzle, l2_promotion, fill)

        slot = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
        aligned = (ctypes.addressof(slot) + 63) & ~63
        function = self.function(_ENCODE)

        def encode(address: int, kept: object = (arrays, slot)) -> bytes:
            code = function(aligned, dtype, rank, address, *rest)
            if code:
                raise self.error(_ENCODE, code)
            return ctypes.string_at(aligned, TENSOR_MAP_BYTES)

        return encode

    # Opening and calling libcuda

    @contextmanager
    def _pushed(self, context: int) -> Iterator[None]:
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.out_pointer("cuCtxPopCurrent")

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
                    function = library[symbol]
                except AttributeError:
                    continue
                if prototype.converted:
                    function.argtypes = prototype.arguments
                function.restype = ctypes.c_int
                self._functions[name] = self._relaxed(function) if prototype.relaxed else function
                return self._functions[name]
        symbols = " or ".join(prototype.symbols)
        raise DriverLibraryError(f"{library._name} has no {symbols}: a newer driver is needed")

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


def is_default(stream: int) -> bool:
    """Return whether ``stream`` is a default stream, which belongs to whatever context is current."""
    return stream <= PER_THREAD


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


def _opened(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        why = str(error).removeprefix(f"{path}: ")
        raise DriverLibraryError(
            f"cannot open the CUDA driver library {path!r}, which the NVIDIA driver installs: {why}"
        ) from error
