"""The runtime object: artifacts, driver, loaded modules and plans of one process, made once and passed to operators."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from .. import _version
from ..artifacts.cubins.architecture import declared_architecture
from ..artifacts.path import ArtifactPath
from ..artifacts.tables.native_kernels import FILE_NAME, NativeKernel, parse_native_kernels
from ..config import Config
from ..errors import UsageError
from ..kernels.abi import abi_layouts
from ..kernels.native.launches import KernelFile
from ..launch.abi import LaunchNeeds
from ..launch.devices import device_ordinal
from ..launch.driver import Driver
from ..launch.driver_api import LaunchConfig
from ..launch.modules import KernelRequest, LoadedKernel, ModuleCache, PreloadReport
from ..launch.plan import LARGEST_PORTABLE_CLUSTER
from ..launch.profiler import Profiler
from ..launch.structs import StructLayout
from ..launch.tensormap import TensorMapCache
from ..values import HashedOnce, dataclass
from .fast_path.notes import FastPaths
from .memory import TensorMemory
from .torch_memory import TorchMemory

if TYPE_CHECKING:
    from ..artifacts.library import Library
    from ..artifacts.pins.pin import Pin
    from ..artifacts.tables.metadata import KernelMeta
    from ..kernels.trtllm_gen.kernel_finder import KernelFinder
    from ..protocols import Device

TRTLLM_RELEASE = "trtllm-gen-0.6.13"
NATIVE_RELEASE = f"hopper-{_version.KERNELS_VERSION}"
SMALLEST_BOUND = 64


@dataclass(frozen=True, slots=True)
class NativeRelease:
    """The native release as an operator needs it: its pin, its kernels and the structs of its ABI."""

    pin: Pin
    kernels: tuple[NativeKernel, ...] = field(repr=False)
    layouts: dict[str, StructLayout] = field(repr=False)
    digests: Mapping[ArtifactPath, str] = field(repr=False)
    _files: dict[str, KernelFile] = field(default_factory=dict, compare=False, repr=False)

    def file_of(self, kernel: NativeKernel) -> KernelFile:
        """Return where a kernel's cubin is, its pinned digest, and the struct that it takes."""
        file = self._files.get(kernel.file)
        if file is None:
            path = self.pin.path.child(kernel.file)
            file = self._files[kernel.file] = KernelFile(path, self.digests[path], self.layouts[kernel.struct])
        return file


@dataclass(frozen=True, slots=True)
class TrtllmGenRelease:
    """A trtllm-gen release as an operator needs it: its pin, its kernels by their traits, its parameter struct."""

    pin: Pin
    finder: KernelFinder
    layout: StructLayout


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """The counts of what a runtime did since its creation.

    The numbers of launches, of plans made, of plans found in the cache by calls without a fast path, of fast paths
    kept, of cubins loaded, their bytes, and of failed loads. With ``Config.profile``, also the seconds that launches
    took in the driver, otherwise None.
    """

    launches: int
    plans_made: int
    plans_found: int
    fast_paths: int
    loads: int
    loaded_bytes: int
    failed_loads: int
    driver_seconds: float | None


class PlanRuntime:
    """The parts of a runtime that plans refer to: the artifact library, the driver and the module cache.

    It knows no plan. So a runtime and the plans that it keeps are no reference cycle.
    """

    config: Config
    """The configuration that it was made with; None was the environment then."""
    library: Library
    """The artifacts: pins, sources and the store."""
    driver: Driver
    """The CUDA driver, opened at first use."""
    modules: ModuleCache
    descriptors: TensorMapCache
    memory: TensorMemory
    _release: str
    _trtllm_release: str
    _native: NativeRelease | None
    _trtllm_gen: TrtllmGenRelease | None
    _pid: int
    _lock: threading.RLock

    @property
    def may_fetch(self) -> bool:
        """Return whether a missing kernel may be fetched over the network now."""
        return self.config.lazy_fetch and not self.config.offline and not self.modules.frozen

    def native_release(self) -> NativeRelease:
        """The native release, read and verified on first use.

        Raises:
            MissingError, SourceError, CorruptError, PinError: it cannot be had or is not what is pinned.
        """
        with self._lock:
            if self._native is None:
                pin = self.library.pins.get(self._release)
                path = pin.path.child(FILE_NAME)
                table = self.library.load(path, fetch=self.may_fetch)
                kernels = HashedOnce(parse_native_kernels(table.data, str(path)))
                digests = self.library.manifest(pin).digests
                self._native = NativeRelease(pin, kernels, dict(abi_layouts(pin.abi)), digests)
            return self._native

    def trtllm_gen_release(self) -> TrtllmGenRelease:
        """The trtllm-gen release, its metadata read and verified on first use; errors as ``native_release``."""
        from ..artifacts.releases.catalog import open_kernel_index
        from ..kernels.trtllm_gen.kernel_finder import KernelFinder

        with self._lock:
            if self._trtllm_gen is None:
                pin = self.library.pins.get(self._trtllm_release)
                layout = abi_layouts(pin.abi)["KernelParams"]
                index = open_kernel_index(self.library, pin, fetch=self.may_fetch)
                self._trtllm_gen = TrtllmGenRelease(pin, KernelFinder(index), layout)
            return self._trtllm_gen

    def digest_of(self, path: ArtifactPath) -> str:
        """The digest that the pinned manifest gives for ``path``."""
        return self.library.manifest(self.library.pins.covering(path)).digests[path]

    def load(self, kernel: NativeKernel, context: int, stream: int = 0) -> LoadedKernel:
        """A native kernel, loaded into ``context`` and gated; errors as ``ModuleCache.kernel``."""
        self.check_process()
        return self.modules.kernel(self.request(kernel, context), stream=stream)

    def active_clusters(self, kernel: LoadedKernel, context: int, config: LaunchConfig) -> int:
        """Count the clusters of a launch that ``context`` has room for at once."""
        with self.driver.using(context):
            return self.driver.active_clusters(kernel.function, config)

    def load_trtllm_gen(
        self, meta: KernelMeta, context: int, stream: int = 0, *, nonportable_cluster: bool = False
    ) -> LoadedKernel:
        """A trtllm-gen kernel, fetched if need be, loaded into ``context`` and gated.

        Raises:
            AbiError: its parameters, threads or architecture do not fit.
            FrozenError: it is not loaded and it is too late for that.
            MissingError, SourceError, CorruptError: its bytes cannot be had.
        """
        self.check_process()
        request = self.trtllm_gen_request(meta, context, nonportable_cluster=nonportable_cluster)
        return self.modules.kernel(request, stream=stream)

    def trtllm_gen_request(self, meta: KernelMeta, context: int, *, nonportable_cluster: bool = False) -> KernelRequest:
        """Return the kernel that ``load_trtllm_gen`` loads, as a value for ``ModuleCache.preload``."""
        release = self.trtllm_gen_release()
        path = release.pin.path.child(meta.file)
        needs = LaunchNeeds(
            layout=release.layout,
            threads=meta.threads,
            fingerprint=None,  # abi_layouts has compared it with the recorded one
            dynamic_shared_bytes=meta.shared_bytes,
            declared=meta.architecture,
            nonportable_cluster=nonportable_cluster,
        )
        return KernelRequest(
            context=context,
            sha256=self.digest_of(path),
            symbol=meta.symbol,
            read=lambda: self.library.load(path, fetch=self.may_fetch).data,
            needs=needs,
        )

    def preload(self, kernels: Iterable[NativeKernel], device: Device = 0) -> PreloadReport:
        """Load native kernels ahead of serving, into the device's primary context.

        ``device`` is an ordinal, or a device of torch, cuda.core or cuda.bindings.
        """
        context = self.driver.primary_context(device_ordinal(device))
        return self.modules.preload([self.request(kernel, context) for kernel in kernels])

    def check_process(self) -> None:
        """Raise ``UsageError`` in a forked child: driver handles do not survive a fork."""
        if os.getpid() != self._pid:
            raise UsageError("this Runtime was made before a fork: make one in the child")

    def freeze(self) -> None:
        """Make every later fetch or module load an error."""
        self.modules.freeze()

    def request(self, kernel: NativeKernel, context: int) -> KernelRequest:
        """Return the kernel that ``load`` loads, as a value for ``ModuleCache.preload``."""
        file = self.native_release().file_of(kernel)
        needs = LaunchNeeds(
            layout=file.layout,
            threads=kernel.threads,
            fingerprint=kernel.struct_fingerprint,
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            declared=declared_architecture(kernel.sm),
            nonportable_cluster=int(kernel.traits.get("max_cluster", 0)) > LARGEST_PORTABLE_CLUSTER,
        )
        return KernelRequest(
            context=context,
            sha256=file.sha256,
            symbol=kernel.symbol,
            read=lambda: self.library.load(file.path, fetch=self.may_fetch).data,
            needs=needs,
        )


class PlanCache:
    """Plans by key, least recently used out first; safe between threads."""

    def __init__(self, entries: int = 256) -> None:
        self._limit = entries
        self._lock = threading.RLock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan for ``key``, made on first use; a failure to make it is not kept."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                self.hits += 1
                return plan
        plan = make()
        with self._lock:
            plan = self._plans.setdefault(key, plan)
            self.misses += 1
            while len(self._plans) > self._limit:
                self._plans.popitem(last=False)
        return plan


class Runtime(PlanRuntime):
    """Owns the artifact library, the driver and the module cache. It is thread-safe, but cannot be used after a fork.

    Operators take ``runtime=None`` for the process's default (``default_runtime``).
    """

    __slots__ = ("families", "family_paths", "fast_paths", "for_plans", "growing", "plans")

    def __init__(
        self,
        config: Config | None = None,
        *,
        driver: Driver | None = None,
        release: str = NATIVE_RELEASE,
        trtllm_release: str = TRTLLM_RELEASE,
        memory: TensorMemory | None = None,
    ) -> None:
        """``config=None`` reads the environment.

        ``release`` is the pin of the native release, ``trtllm_release`` that of the trtllm-gen release. ``memory``
        allocates outputs and reads tensors back (by default with torch).
        """
        from ..artifacts.library import Library

        self.for_plans = PlanRuntime()
        self.for_plans.__dict__ = self.__dict__  # all but the slots
        self.plans = PlanCache()
        self.fast_paths: FastPaths = {}
        self.family_paths: FastPaths = {}
        self.families: dict[Hashable, None] = {}
        self.growing: dict[int, tuple[Any, ...]] = {}  # forms of caches that grow, by thread
        self.config = config or Config.from_environment()
        self.library = Library(self.config)
        self.driver = driver or Driver()
        if self.config.profile and self.driver.profiler is None:
            self.driver.profiler = Profiler()
        self.modules = ModuleCache(self.driver)
        self.descriptors = TensorMapCache(self.driver)
        self._release = release
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._native = None
        self.memory = memory or TorchMemory()
        self._trtllm_release = trtllm_release
        self._trtllm_gen = None
        if self.config.record is not None:
            from .hook import record_process

            record_process(self.config.record)

    def __repr__(self) -> str:
        return f"Runtime(store={str(self.config.store)!r}, release={self._release!r})"

    def stats(self) -> RuntimeStats:
        """Counters of what the runtime did so far."""
        counts, profiler = self.modules.counts, self.driver.profiler
        return RuntimeStats(
            launches=self.driver.launches,
            plans_made=self.plans.misses,
            plans_found=self.plans.hits,
            fast_paths=sum(len(of.entries) for of in (*self.fast_paths.values(), *self.family_paths.values())),
            loads=counts.loads,
            loaded_bytes=counts.bytes,
            failed_loads=counts.failures,
            driver_seconds=None if profiler is None else profiler.seconds,
        )


class _Default:
    """Holds it, once it is made or set."""

    runtime: Runtime | None = None


default = _Default()
_lock = threading.RLock()


def default_runtime() -> Runtime:
    """Return the process's default runtime, which is made from the environment on first use.

    Raises:
        UsageError: the runtime was made before this process was forked.
    """
    with _lock:
        runtime = default.runtime = default.runtime or Runtime()
    runtime.check_process()
    return runtime


def runtime_of(runtime: Any) -> Runtime:
    """The runtime that a call names; None: the process's default one.

    Raises:
        UsageError: it is no runtime; or as ``default_runtime``.
    """
    if runtime is None:
        return default_runtime()
    if not isinstance(runtime, Runtime):
        raise UsageError(f"got {type(runtime).__name__}, expected a Runtime", argument="runtime")
    return runtime


def set_default_runtime(runtime: Runtime) -> None:
    """Set the process's default runtime, before its first use.

    Raises:
        UsageError: the default runtime is already in use, or ``runtime`` is no runtime.
    """
    runtime_of(runtime)
    with _lock:
        if default.runtime is not None:
            raise UsageError("the default Runtime is in use already: set it before the first operator runs")
        default.runtime = runtime


def shared_bounds(length: int, smallest: int = SMALLEST_BOUND) -> tuple[int, int]:
    """The least and the largest bound on lengths that share a plan with ``length``; the largest is a power of two.

    Lengths grow step by step, so that one plan serves many steps.
    """
    largest = max(smallest, 1 << (length - 1).bit_length())
    return 0 if largest == smallest else largest // 2 + 1, largest
