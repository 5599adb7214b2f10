"""What plans of decodes share: launches prepared once for each pair of caches, their scratch, the steps."""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from math import isfinite
from operator import itemgetter
from typing import Any, Generic, TypeVar

from ..artifacts.path import ArtifactPath
from ..artifacts.tables.native_kernels import NativeKernel
from ..errors import DeviceError, UsageError
from ..kernels.native.constants import StatusBit
from ..kernels.native.decode.plan import (
    LOG2_E,
    STEP_FIELDS,
    STEP_NUMBERS,
    WORKSPACE_POINTERS,
    DecodeProblem,
)
from ..kernels.native.decode.select import DecodeSelection
from ..kernels.native.mla.plan import MlaProblem
from ..kernels.native.mla.select import MlaSelection
from ..launch.launcher import LaunchPlan, PreparedLaunch
from ..launch.regions import Region, workspace_size
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.streams import stream_handle
from ..launch.structs import FieldRow, StructLayout
from ..launch.workspace import Workspace, WorkspacePool
from .decode_checks import check_addresses, integer
from .decode_defaults import check_workspace
from .decode_tensors import (
    DecodeTensors,
    addresses_of,
    difference,
    forms_of,
)
from .runtime import Runtime

# Where the workspace's pointers and the numbers begin among the values of a step.
_NUMBERS = len(STEP_NUMBERS)
_TENSORS = len(STEP_FIELDS) - len(WORKSPACE_POINTERS) - _NUMBERS
_KEPT = 1024  # layers that share one plan, each with caches of its own
SelectionT = TypeVar("SelectionT", DecodeSelection, MlaSelection)
ProblemT = TypeVar("ProblemT", DecodeProblem, MlaProblem)


class ClampedInputError(DeviceError):
    """A kernel met a length, page id or q_cu_seq_lens outside its bounds; it was clamped, so that run's output is not
    attention."""


class LaunchedPlan(ABC, Generic[SelectionT, ProblemT]):
    """A decode for one set of shapes, strides and options.

    It owns no scratch: every ``run`` takes a workspace that belongs to its stream (``prepare``). A run allocates
    nothing, waits for nothing and loads nothing, so it may be captured into a graph, whose replays follow lengths
    and page tables as they change on the device, up to ``max_seq_len``. Safe between threads. It launches its kernels
    one after another, each on requests of its own.
    """

    def __init__(
        self,
        runtime: Runtime,
        tensors: DecodeTensors,
        selections: Sequence[SelectionT],
        problem: ProblemT,
        own_regions: Sequence[tuple[Region, ...]],
        of_torch: bool,
    ) -> None:
        """``own_regions`` has for each launch its parts of the workspace in the order of ``WORKSPACE_POINTERS``.

        ``of_torch``: it was made with torch tensors, so a run without a stream takes torch's current one.
        """
        self.selections: tuple[SelectionT, ...] = tuple(selections)
        self.problem: ProblemT = problem
        self.regions = tuple(dict.fromkeys(region for own in own_regions for region in own))
        self.signature = tensors.signature
        self._runtime = runtime
        self._own_regions = tuple(own_regions)
        self._files = tuple(_file(runtime, selection.kernel) for selection in selections)
        self._tensors = tensors
        # A tensor that was planned for must have an address at every step.
        self._planned = itemgetter(*(i for i, view in enumerate(tensors.views) if view is not None))
        self._device = tensors.q.device
        self._of_torch = of_torch
        self._lock = threading.Lock()
        self._prepared: OrderedDict[tuple[int, int, int], Callable[..., None]] = OrderedDict()
        self._scratch: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
        self._forms: tuple[Any, ...] | None = None
        self._pool = WorkspacePool(runtime.driver)
        self._contexts: set[int] = set()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a run needs."""
        return workspace_size(self.regions)

    @abstractmethod
    def launch_plans(self, k_address: int | None = None, v_address: int | None = None) -> tuple[LaunchPlan, ...]:
        """The launches as values: kernel, grid, attributes, every parameter. Needs no GPU.

        The caches are those that the plan was made with, at other addresses where given.
        """

    @abstractmethod
    def _tensors_of(self, given: tuple[Any, ...]) -> DecodeTensors:
        """The views of a call's tensors, in the order of ``decode_tensors.TENSOR_NAMES``."""

    @abstractmethod
    def _misaligned(self, addresses: tuple[int, ...]) -> bool:
        """Whether a tensor but a cache has an address that no kernel takes; caches are looked at when they are new."""

    def describe(self) -> tuple[tuple[FieldRow, ...], ...]:
        """Each launch's parameter struct field by field; pointers that come with a step are null."""
        return tuple(plan.describe() for plan in self.launch_plans())

    def preload(self) -> None:
        """Fetch, load and gate the kernels now, so that the first run does not."""
        context = self._runtime.driver.context_on(self._device)
        for selection in self.selections:
            self._runtime.load(selection.kernel, context)

    def prepare(self, stream: Any = None, *, graphs: int = 0) -> Workspace:
        """The workspace of this plan on ``stream``, made and cleared on first use, kept by the plan.

        Args:
            stream: as for ``run``; None: the stream that a run without one would take.
            graphs: reserve memory for so many captures to come: each graph has its own until it is destroyed.

        Raises:
            WorkspaceError: ``stream`` is capturing and has none yet.
        """
        handle = self._stream(stream)
        context = self._runtime.driver.context_on(self._device)
        workspace = self._pool.take(context, handle, self.workspace_bytes)
        if graphs:
            workspace.reserve(graphs, handle)
        workspace.claim(handle)
        return workspace

    def _stream(self, stream: Any) -> int:
        if stream is None:
            return self._runtime.memory.current_stream(self._device) if self._of_torch else 0
        return stream_handle(stream)

    def _run(
        self,
        given: tuple[Any, ...],
        softmax_number: float | None,
        output_number: float | None,
        workspace: Workspace | SemaphoreWorkspace,
        stream: Any,
        max_seq_len: int | None,
    ) -> None:
        """A step on the tensors ``given``, held against those that were planned for unless it was done before."""
        addresses = addresses_of(given, self._forms)
        if addresses is None:
            tensors = self._tensors_of(given)
            if tensors.signature != self.signature:
                raise UsageError(difference(tensors, self._tensors))
            addresses = tensors.addresses
            self._forms = forms_of(given)
        check_workspace(workspace)
        if max_seq_len is not None:
            max_seq_len = integer("max_seq_len", max_seq_len)
        self.step(addresses, workspace, self._stream(stream), max_seq_len, softmax_number, output_number)

    def step(
        self,
        addresses: tuple[int, ...],
        workspace: Workspace | SemaphoreWorkspace | None,
        stream: int = 0,
        max_seq_len: int | None = None,
        softmax_scale: float | None = None,
        output_scale: float | None = None,
    ) -> None:
        """``run`` for callers that know that their tensors are of the planned forms and hold their addresses.

        Args:
            addresses: in the order of ``decode_tensors.TENSOR_NAMES``, 0 for what the plan was made without.
            workspace: as for ``run``; None: the plan's own on ``stream``, as ``prepare`` gives it.
            stream: an int handle.
            max_seq_len: as for ``run``.
            softmax_scale: a number for this step; None: the plan's (1 for a plan made with a tensor).
            output_scale: likewise.
        """
        problem = self.problem
        bound = problem.max_seq_len if max_seq_len is None else max_seq_len
        if not 0 <= bound <= problem.max_seq_len:
            raise UsageError(f"max_seq_len={bound}: expected 0 to {problem.max_seq_len}, the plan's bound")
        scale = problem.softmax_scale if softmax_scale is None else softmax_scale
        factor = problem.output_scale if output_scale is None else output_scale
        if not isfinite(scale):
            raise UsageError(f"softmax_scale={scale}: expected a finite number")
        if not isfinite(factor):
            raise UsageError(f"output_scale={factor}: expected a finite number")
        if self._misaligned(addresses) or not all(self._planned(addresses)):
            check_addresses(addresses, self._tensors)
        driver = self._runtime.driver
        if workspace is None:
            context = driver.context_on(self._device)
            given: Workspace | SemaphoreWorkspace = self._pool.take(context, stream, self.workspace_bytes)
        else:
            given = workspace
            context = given.context or driver.context_on(self._device)
            if given.context is not None:
                self._check_device(given.context)
        launch = self._prepared.get((context, addresses[1], addresses[2]))
        if launch is None:
            launch = self._prepare_caches(context, addresses, stream)
        place = given.claim(stream)
        scratch = self._scratch.get(place) or self._scratch_of(given, place)
        launch(stream, addresses[0], *addresses[3:], *scratch, bound, scale * LOG2_E, factor)

    def check(self, workspace: Workspace | SemaphoreWorkspace, stream: Any = None) -> None:
        """Wait for ``stream``, which the workspace belongs to, then read and clear the workspace's status word.

        Raises:
            ClampedInputError: a run since the last check met a length, a page id or a q_cu_seq_lens outside its
                bounds.
        """
        driver, handle = self._runtime.driver, self._stream(stream)
        status = 0
        with driver.using(workspace.context or driver.context_on(self._device)):
            driver.synchronize(handle)
            for place in workspace.places():
                address = workspace.regions(self.regions, place)["status"]
                (word,) = struct.unpack("<I", driver.read(address, 4))
                if word:
                    driver.fill_words(address, 0, 1, handle)
                status |= word
        met = [bit.meaning for bit in StatusBit if status & bit]
        if met:
            kernels = " and ".join(selection.kernel.name for selection in self.selections)
            raise ClampedInputError(f"decode by {kernels} met {' and '.join(met)}")

    def _prepare_caches(self, context: int, addresses: tuple[int, ...], stream: int) -> Callable[..., None]:
        check_addresses(addresses, self._tensors)
        steps = []
        for selection, plan in zip(self.selections, self.launch_plans(addresses[1], addresses[2]), strict=True):
            kernel = self._runtime.load(selection.kernel, context, stream)
            launch = PreparedLaunch(plan, kernel, self._runtime.driver, self._runtime.descriptors)
            steps.append(launch.stepper(*STEP_FIELDS))
        step = _in_turn(steps)
        self._keep(self._prepared, (context, addresses[1], addresses[2]), step)
        return step

    def _check_device(self, context: int) -> None:
        if context not in self._contexts:
            its = self._runtime.driver.context_device(context)
            if its != self._device:
                raise UsageError(f"workspace: on device {its}, the plan is for tensors on device {self._device}")
            self._contexts.add(context)

    def _scratch_of(self, workspace: Workspace | SemaphoreWorkspace, place: Hashable) -> tuple[int, ...]:
        regions = workspace.regions(self.regions, place)
        scratch = tuple(regions[region.name] for own in self._own_regions for region in own)
        self._keep(self._scratch, place, scratch)
        return scratch

    def _keep(self, cache: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
        with self._lock:
            cache[key] = value
            while len(cache) > _KEPT:
                cache.popitem(last=False)


def _file(runtime: Runtime, kernel: NativeKernel) -> tuple[ArtifactPath, str, StructLayout]:
    """Where the kernel is, its digest, and the struct that it takes."""
    own = runtime.own_release()
    path = own.path_of(kernel)
    return path, runtime.digest_of(path), own.layouts[kernel.struct]


def _in_turn(steps: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Calls all ``steps``, each with its own of the workspaces' pointers that follow one another among the values."""
    if len(steps) == 1:
        return steps[0]

    def step(stream: int, *values: int | float) -> None:
        tensors, scratch, numbers = values[:_TENSORS], values[_TENSORS:-_NUMBERS], values[-_NUMBERS:]
        for index, launch in enumerate(steps):
            at = index * len(WORKSPACE_POINTERS)
            launch(stream, *tensors, *scratch[at : at + len(WORKSPACE_POINTERS)], *numbers)

    return step
