"""Loaded modules: each cubin once per context, gated before use, and refused after a freeze or during capture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from ..artifacts.cubins.architecture import Architecture
from ..errors import FrozenError
from ..values import dataclass
from . import driver_api as api
from .abi import LaunchNeeds, check_launchable, check_parameters, check_threads, effective_architecture
from .driver import DeviceFacts, Driver
from .driver_errors import DriverCallError
from .structs import StructLayout

if TYPE_CHECKING:
    from ..artifacts.cubins.cubin import Cubin, KernelFacts

# The limit of shared memory a block gets without asking.
_SHARED_WITHOUT_OPT_IN = 48 * 1024
_CAPTURE_ERRORS = range(api.CAPTURE_UNSUPPORTED, 909)


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel on the device that has passed the ABI gate for ``layout``.

    ``context``, ``module`` and ``function`` are driver handles; ``shared_bytes`` is the dynamic shared memory
    that launches may ask for, ``parameters_checked`` whether the driver confirmed the struct's size too.
    """

    context: int
    sha256: str
    symbol: str
    module: int
    function: int
    facts: KernelFacts
    architecture: Architecture
    device: DeviceFacts
    layout: StructLayout
    max_threads: int
    shared_bytes: int
    nonportable_cluster: bool
    parameters_checked: bool


class KernelRequest(NamedTuple):
    """A kernel that a module cache is asked for.

    ``context`` is the driver handle of the context to load into, ``sha256`` the digest of the cubin, ``symbol`` the
    kernel's name in it. ``read`` gives the verified bytes; it is called only if the module is not loaded yet. ``needs``
    says what will be launched, and is checked against the cubin, the device and the driver.
    """

    context: int
    sha256: str
    symbol: str
    read: Callable[[], bytes]
    needs: LaunchNeeds


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """``loads`` modules loaded, ``hits`` requests served without loading, ``failures`` loads that failed, and the
    ``bytes`` of the cubins that were loaded."""

    loads: int = 0
    hits: int = 0
    failures: int = 0
    bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PreloadReport:
    """The result of ``preload``; ``device_bytes`` is how much free device memory went down meanwhile."""

    kernels: tuple[LoadedKernel, ...]
    loads: int
    device_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Module:
    handle: int
    cubin: Cubin


class ModuleCache:
    """Kernels by context, digest and symbol; safe between threads. A failed load is counted, not kept."""

    def __init__(self, driver: Driver, parse: Callable[[bytes], Cubin] | None = None) -> None:
        self._driver = driver
        self._parse = parse or _parsed
        self._lock = threading.RLock()
        self._load_locks: dict[tuple[int, str], threading.RLock] = {}
        self._facts: dict[str, Cubin] = {}
        self._modules: dict[tuple[int, str], _Module] = {}
        self._kernels: dict[tuple[int, str, str, LaunchNeeds], LoadedKernel] = {}
        self._shared: dict[int, int] = {}
        self._loads = self._hits = self._failures = self._bytes = 0
        self._frozen = False

    @property
    def counts(self) -> LoadCounts:
        """Loads, hits and failures since the cache was made."""
        with self._lock:
            return LoadCounts(self._loads, self._hits, self._failures, self._bytes)

    @property
    def frozen(self) -> bool:
        """Return whether ``freeze`` was called."""
        return self._frozen

    def freeze(self) -> None:
        """Make every later load an error; loaded kernels keep working. This cannot be undone."""
        self._frozen = True

    def kernel(self, request: KernelRequest, *, stream: int = 0) -> LoadedKernel:
        """The kernel, loaded and gated if this is the first request for it; refused while ``stream`` captures.

        Raises:
            FrozenError: a load is needed but the cache is frozen or a stream is capturing.
            AbiError: the kernel does not fit what it is needed for, or the device.
            DriverError: the driver refuses.
        """
        key = (request.context, request.sha256, request.symbol, request.needs)
        loaded = self._kernels.get(key)
        if loaded is None:
            with self._load_lock(request.context, request.sha256), self._driver.using(request.context):
                loaded = self._kernels.get(key)
                if loaded is None:
                    loaded = self._gated(request, stream)
                    self._kernels[key] = loaded
                    return loaded
        with self._lock:
            self._hits += 1
        return loaded

    def preload(self, requests: Iterable[KernelRequest]) -> PreloadReport:
        """Load ahead of serving, one after another; errors as ``kernel``, at the first request that fails."""
        started, loads, used_bytes = time.perf_counter(), self.counts.loads, 0
        kernels: list[LoadedKernel] = []
        for request in requests:
            with self._driver.using(request.context):
                before, _ = self._driver.memory_info()
                kernels.append(self.kernel(request))
                used_bytes += before - self._driver.memory_info()[0]
        seconds = time.perf_counter() - started
        return PreloadReport(tuple(kernels), self.counts.loads - loads, max(0, used_bytes), seconds)

    def close(self) -> None:
        """Unload everything; no kernel from here may be launched afterwards."""
        with self._lock:
            modules, self._modules = self._modules, {}
            self._kernels.clear()
            self._shared.clear()
        for (context, _), module in modules.items():
            with self._driver.using(context):
                self._driver.unload_module(module.handle)

    def _load_lock(self, context: int, sha256: str) -> threading.RLock:
        with self._lock:
            return self._load_locks.setdefault((context, sha256), threading.RLock())

    def _gated(self, request: KernelRequest, stream: int) -> LoadedKernel:
        context, sha256, symbol, needs = request.context, request.sha256, request.symbol, request.needs
        device = self._driver.device(self._driver.context_device())
        module = self._modules.get((context, sha256))
        image = b""
        if module is None:
            self._refuse_late_load(sha256, symbol, stream)
            image = request.read()
        cubin = module.cubin if module else self._facts_of(sha256, image)
        # Before the load, so that a wrong architecture is our error and not the driver's refusal.
        facts = check_launchable(cubin, symbol, needs, device)
        if module is None:
            module = self._load(context, sha256, symbol, image, cubin)
        function = self._driver.get_function(module.handle, symbol)
        # Else the first launch would still load, maybe inside a capture, and preload() would not see its memory.
        self._driver.finish_loading(function)
        max_threads, checked = self._ask_driver(function, symbol, facts, needs)
        self._opt_in(function, facts, needs)
        return LoadedKernel(
            context=context,
            sha256=sha256,
            symbol=symbol,
            module=module.handle,
            function=function,
            facts=facts,
            architecture=effective_architecture(cubin.architecture, needs.declared),
            device=device,
            layout=needs.layout,
            max_threads=max_threads,
            shared_bytes=needs.dynamic_shared_bytes,
            nonportable_cluster=needs.nonportable_cluster,
            parameters_checked=checked,
        )

    def _refuse_late_load(self, sha256: str, symbol: str, stream: int) -> None:
        what = f"kernel {symbol!r} (sha256 {sha256[:12]}) is not loaded on device {self._driver.context_device()}"
        if self._frozen:
            raise FrozenError(f"{what} and the module cache is frozen: preload() it before freeze()")
        # Asking 0 as well finds a capture on any blocking stream, whichever stream the caller named.
        if any(self._driver.is_capturing(candidate) for candidate in {stream, 0}):
            raise FrozenError(f"{what} and a stream is capturing: preload() it before the capture begins")

    def _facts_of(self, sha256: str, image: bytes) -> Cubin:
        facts = self._facts.get(sha256)
        if facts is None:
            facts = self._facts[sha256] = self._parse(image)
        return facts

    def _load(self, context: int, sha256: str, symbol: str, image: bytes, cubin: Cubin) -> _Module:
        try:
            module = _Module(self._driver.load_module(image), cubin)
        except DriverCallError as error:
            with self._lock:
                self._failures += 1
            if error.code in _CAPTURE_ERRORS:
                raise FrozenError(
                    f"kernel {symbol!r}: loading met a capturing stream ({error.name}): preload() it before"
                ) from error
            raise
        with self._lock:
            current = self._modules.setdefault((context, sha256), module)
            if current is module:
                self._loads += 1
                self._bytes += len(image)
        if current is not module:  # a call that interrupted this one has loaded it
            self._driver.unload_module(module.handle)
        return current

    def _ask_driver(self, function: int, symbol: str, facts: KernelFacts, needs: LaunchNeeds) -> tuple[int, bool]:
        max_threads = facts.max_threads
        if max_threads is None:
            max_threads = self._driver.function_attribute(function, api.FUNC_MAX_THREADS)
            check_threads(symbol, needs.threads, max_threads, "the driver")
        parameters = self._driver.parameters(function, len(facts.parameters))
        if parameters is not None:
            check_parameters(symbol, needs.layout, tuple(size for _, size in parameters), "the driver")
        return max_threads, parameters is not None

    def _opt_in(self, function: int, facts: KernelFacts, needs: LaunchNeeds) -> None:
        nbytes = needs.dynamic_shared_bytes
        if nbytes + facts.static_shared_bytes > _SHARED_WITHOUT_OPT_IN and nbytes > self._shared.get(function, 0):
            self._driver.allow_dynamic_shared(function, nbytes)
            self._shared[function] = nbytes
        if needs.nonportable_cluster:
            self._driver.allow_nonportable_cluster(function)


def _parsed(data: bytes) -> Cubin:
    from ..artifacts.cubins.cubin import parse_cubin  # which a process that only plans does without

    return parse_cubin(data)
