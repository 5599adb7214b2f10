"""An operator planned once for shapes, strides and options, and run many times."""

from __future__ import annotations

import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, UsageError
from ..kernels.native.constants import StatusBit
from ..kernels.native.launches import STATUS, NativeLaunch
from ..launch.modules import LoadedKernel
from ..launch.plan import LaunchPlan, launch_config
from ..launch.prepared import OtherContextError, PreparedLaunches, RepeatedLaunches
from ..launch.streams import stream_handle
from ..launch.structs import FieldRow
from ..launch.workspace import (
    AnyWorkspace,
    Region,
    Workspace,
    WorkspacePool,
    check_workspace,
    context_of_launch,
    workspace_size,
)
from ..provenance import traced
from .checks import graph_count
from .fast_path.notes import FastPaths, Launched, Scratch
from .hook import Run, installed
from .operator import CallTensors, Given, Operator
from .runtime import PlanRuntime
from .user_frame import stacklevel_of_user

if TYPE_CHECKING:
    from ..protocols import Stream

_MAX_PLACES = 1024  # that are remembered


class ClampedInputError(DeviceError):
    """A kernel found a length, page id, position or prefix sum out of bounds and clamped or skipped it, so the output
    of that run is not the requested one."""


class RegionPlaces:
    """The addresses of a plan's regions, by the place that ``claim`` gave; safe between threads.

    It knows no plan: the fast paths that a plan keeps refer to it.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._lock = threading.RLock()
        self._places: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()

    def __call__(self, workspace: AnyWorkspace, place: Hashable) -> tuple[int, ...]:
        """The address of each region in a place of the workspace.

        Raises:
            WorkspaceError: the place is too small.
        """
        addresses = self._places.get(place)
        if addresses is not None and not traced.call:  # a caller's buffers are to be seen in the addresses
            return addresses
        regions = workspace.regions(self._regions, place)
        addresses = tuple(regions[region.name] for region in self._regions)
        with self._lock:
            self._places[place] = addresses
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)
        return addresses


class OperatorPlan:
    """The launches of an operator for one set of tensor forms and options.

    A plan owns no tensor. Each run uses scratch memory that belongs to its stream (``prepare``). A run allocates,
    synchronises and loads nothing, so it can be captured into a graph; replays use the lengths and page tables that are
    then on the device, up to the planned bound. A plan runs on the device of its tensors, whatever context is current.
    It is thread-safe. ``runtime`` is the one that it was planned with, ``driver`` launches the kernels.
    """

    bounds: tuple[int, int]
    """The least and the largest bound on lengths that a run may give; the same where it gives none."""

    def __init__(
        self,
        runtime: PlanRuntime,
        operator: Operator,
        tensors: CallTensors,
        options: Any,
        launches: Sequence[NativeLaunch[Any]],
        *,
        of_torch: bool,
    ) -> None:
        """``of_torch``: it is made with torch tensors, so a run without a stream takes torch's current one."""
        self.operator = operator
        self.options = options
        self.bounds = operator.planned_bounds(options)
        self.specs = tensors.specs
        self.launches = tuple(launches)
        regions = [launch.regions for launch in self.launches]
        self.regions = regions[0] if len(regions) == 1 else tuple(dict.fromkeys(sum(regions, ())))
        self.runtime, self.driver = runtime, runtime.driver
        self.device = tensors[operator.tensors[0].name].device
        self.of_torch = of_torch
        self.fast_paths: FastPaths = {}
        self._prepared: dict[int, PreparedLaunches] = {}
        self._regions_at = RegionPlaces(self.regions)
        self._pool = WorkspacePool(self.driver, self.device, workspace_size(self.regions))

    def __repr__(self) -> str:
        kernels = ", ".join(launch.selection.kernel.name for launch in self.launches)
        return f"{type(self).__name__}({kernels}; workspace of {self.workspace_bytes} bytes)"

    @property
    def selections(self) -> tuple[Any, ...]:
        """The kernel and grid chosen for each launch, and the reason."""
        return tuple(launch.selection for launch in self.launches)

    @property
    def selection(self) -> Any:
        """The first of the selections, as some plans had it; they are ``selections`` now."""
        words = "selection is now called selections, one for each launch; the next minor version has no selection"
        warnings.warn(words, DeprecationWarning, stacklevel=stacklevel_of_user())
        return self.selections[0]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a run needs."""
        return workspace_size(self.regions)

    def launch_plans(self) -> tuple[LaunchPlan, ...]:
        """The launches as values: kernel, grid, attributes, every parameter. Needs no GPU."""
        return tuple(launch.plan for launch in self.launches)

    def describe(self) -> tuple[tuple[FieldRow, ...], ...]:
        """Each launch's parameter struct field by field; pointers that come with a run are null."""
        return tuple(launch.plan.describe() for launch in self.launches)

    def preload(self) -> None:
        """Fetch, load and gate the kernels now, so that the first run does not."""
        context = self.driver.context_on(self.device)
        for launch in self.launches:
            self.runtime.load(launch.selection.kernel, context)

    def prepare(self, stream: Stream | None = None, *, graphs: int = 0) -> Workspace:
        """Return the plan's workspace on ``stream``; it is allocated and cleared on first use, and the plan keeps it.

        Args:
            stream: as for ``run``; None: the stream that a run without ``stream`` uses.
            graphs: number of later captures to reserve memory for: each graph has its own memory until it is destroyed.

        Raises:
            UsageError: ``stream`` is none, or ``graphs`` no integer of 0 or more.
            WorkspaceError: ``stream`` is capturing and has no workspace yet.
        """
        handle, graphs = self.stream_of(stream), graph_count(graphs)
        workspace = self._pool.take(handle)
        if graphs:
            workspace.reserve(graphs, handle)
        workspace.claim(handle)
        return workspace

    def addresses(self, tensors: Given) -> tuple[int, ...]:
        """The addresses of ``tensors``, None for what is left out, in the operator's order.

        Raises:
            UsageError: a tensor differs from what was planned, or is not aligned.
        """
        views = self.operator.read(tensors, self.options)
        views.check_planned(self.specs)
        views.check_addresses()
        return views.addresses

    def addresses_of(self, tensors: Given) -> dict[str, int]:
        """The addresses of some of the operator's tensors, and 0 for those that the plan was made without, by name.

        Raises:
            UsageError: as ``addresses``.
        """
        planned = zip(self.operator.tensors, self.specs, strict=True)
        some = [(arg, spec) for arg, spec in planned if spec is None or arg.name in tensors]
        views = self.operator.read(tensors, self.options, [arg for arg, _ in some])
        views.check_planned([spec for _, spec in some])
        views.check_addresses()
        return {arg.name: address for (arg, _), address in zip(some, views.addresses, strict=True)}

    def new_workspace(self, stream: int) -> Workspace:
        """A workspace of its caller's for ``stream``, cleared."""
        return self._pool.make(stream)

    def launch(
        self,
        addresses: tuple[int, ...],
        numbers: tuple[Any, ...],
        workspace: AnyWorkspace | None,
        stream: int,
    ) -> Launched:
        """Run on tensors at ``addresses``; what was launched.

        Args:
            addresses: as ``addresses`` gives them.
            numbers: the values of the operator's ``numbers``, checked.
            workspace: None: the plan's own on ``stream``, as ``prepare`` gives it.
            stream: an int handle.

        Raises:
            UsageError: workspace or stream are of another device.
            WorkspaceError: the workspace is too small or belongs to another stream.
            DeviceError: the kernel cannot be loaded or launched.
        """
        hook = installed.hook
        if hook is None:
            return self._launch(addresses, numbers, workspace, stream)
        run = Run(self, addresses, numbers, stream)
        return hook(run, lambda: self._launch(addresses, numbers, workspace, stream))  # type: ignore[no-any-return]

    def _launch(
        self,
        addresses: tuple[int, ...],
        numbers: tuple[Any, ...],
        workspace: AnyWorkspace | None,
        stream: int,
        **options: Mapping[int, bytes],
    ) -> Launched:
        """``launch`` without a hook; ``options`` may be the ``maps`` of ``PreparedLaunches.run``."""
        launched, scratch, place = self._ready(workspace, stream)
        values = (*addresses, *self._regions_at(scratch, place), *numbers)
        try:
            launched.prepared.run(stream, *values, **options)
        except OtherContextError:  # asked for only then, since the contexts nearly always agree
            context = context_of_launch(self.driver, self.device, scratch.context, stream)
            launched = self._in_context(launched, context, stream)
            with self.driver.using(context):
                launched.prepared.run(stream, *values, **options)
        return launched._replace(values=values)

    def unsent(self, workspace: AnyWorkspace | None, stream: int) -> Launched:
        """The result of ``launch`` without values, before anything is launched. Arguments and errors as there."""
        return self._ready(workspace, stream)[0]

    def _ready(self, workspace: AnyWorkspace | None, stream: int) -> tuple[Launched, AnyWorkspace, Hashable]:
        """The same, with the workspace and the place in it that the stream claimed."""
        if workspace is None:
            scratch: AnyWorkspace = self._pool.take(stream)
        else:
            check_workspace(workspace, self.device)
            scratch = workspace
        context = scratch.context or self.driver.context_on(self.device)
        prepared, place = self._prepared_in(context, stream), scratch.claim(stream)
        launched = Launched(
            prepared=prepared,
            values=(),
            numbers=self.operator.numbers,
            context=context,
            device=self.device,
            memory=self.runtime.memory,
            bounds=self.bounds,
            scratch=Scratch(
                held=self._pool.held if workspace is None else None,
                default=(context, 0),
                regions_at=self._regions_at,
                names=tuple(region.name for region in self.regions),
            ),
        )
        return launched, scratch, place

    def _in_context(self, launched: Launched, context: int, stream: int) -> Launched:
        """The same in another context of the device."""
        assert launched.scratch is not None
        scratch = launched.scratch._replace(default=(context, 0))
        return launched._replace(prepared=self._prepared_in(context, stream), context=context, scratch=scratch)

    def sender(
        self, stream: int, moving: Collection[int]
    ) -> Callable[[Sequence[int], Sequence[Any] | None, Mapping[int, bytes]], None]:
        """``launch`` by one thread on one stream, by addresses, numbers and descriptors, without a hook; errors alike.

        Without numbers they are those of the call before, as are all addresses but those of the places ``moving``.
        """
        scratch = self._pool.take(stream)
        prepared = self._prepared_in(scratch.context or self.driver.context_on(self.device), stream)
        repeated: RepeatedLaunches | None = None
        last: tuple[Any, tuple[Any, ...]] = (None, ())

        def send(addresses: Sequence[int], numbers: Sequence[Any] | None, maps: Mapping[int, bytes]) -> None:
            nonlocal repeated, last
            place = scratch.claim(stream)
            if numbers is not None or place is not last[0]:
                last = place, last[1] if numbers is None else tuple(numbers)
                values = (*addresses, *self._regions_at(scratch, place), *last[1])
                if repeated is None:
                    repeated = prepared.repeated(stream, values, moving, maps)
                else:
                    repeated.renew(values, maps)
            if repeated is None or not repeated.send(addresses, maps):
                self._launch(tuple(addresses), last[1], None, stream, maps=maps)

        return send

    def bound_run(
        self,
        addresses: Mapping[str, int],
        numbers: tuple[Any, ...],
        workspace: AnyWorkspace,
        place: Hashable,
        stream: int,
    ) -> tuple[PreparedLaunches, dict[str, Any]]:
        """The launches, and their values on one stream with tensors at fixed ``addresses`` by name, 0 for what is left
        out; those of other tensors are not among them. ``place`` is what the stream claimed of the workspace. Errors as
        ``launch``."""
        regions = self._regions_at(workspace, place)
        of_tensors = zip(self.operator.values, self.operator.tensors, strict=True)
        fixed: dict[str, Any] = {value: addresses[arg.name] for value, arg in of_tensors if arg.name in addresses}
        fixed |= zip((region.name for region in self.regions), regions, strict=True)
        fixed |= zip(self.operator.numbers, numbers, strict=True)
        context = workspace.context or self.driver.context_on(self.device)
        return self._prepared_in(context, stream), fixed

    def stream_of(self, stream: Stream | None) -> int:
        """The handle of a stream as callers give it; None: for a plan of torch tensors torch's current one, else 0."""
        if stream is None:
            return self.runtime.memory.stream_query(self.device) if self.of_torch else 0
        return stream_handle(stream)

    def check(self, workspace: AnyWorkspace, stream: Stream | None = None) -> None:
        """Wait for ``stream``, which the workspace belongs to, then read and clear its status word.

        Raises:
            UsageError: ``workspace`` is none, or ``stream`` is none.
            ClampedInputError: a run since the last check found a length, page id, position or prefix sum out of bounds.
        """
        check_workspace(workspace, self.device)
        if STATUS not in self.regions:
            return
        driver, handle = self.driver, self.stream_of(stream)
        status = 0
        with driver.using(workspace.context or driver.context_on(self.device)):
            driver.synchronize(handle)
            for place in workspace.places():
                address = workspace.regions(self.regions, place)["status"]
                (word,) = struct.unpack("<I", driver.read(address, 4))
                if word:
                    driver.fill_words(address, 0, 1, handle)
                status |= word
        met = [bit.meaning for bit in StatusBit if status & bit]
        if met:
            kernels = " and ".join(launch.plan.kernel for launch in self.launches)
            raise ClampedInputError(f"{self.operator.name} by {kernels} met {' and '.join(met)}")

    def _prepared_in(self, context: int, stream: int) -> PreparedLaunches:
        prepared = self._prepared.get(context)
        if prepared is not None:
            return prepared
        runtime = self.runtime
        device = self.driver.context_device(context)
        if device != self.device:
            raise UsageError(
                f"on device {device}, the plan is for tensors on device {self.device}", argument="workspace"
            )
        names = (*self.operator.values, *(region.name for region in self.regions), *self.operator.numbers)
        kernels = [runtime.load(launch.selection.kernel, context, stream) for launch in self.launches]
        prepared = PreparedLaunches(
            [
                self._fitting(launch.plan, launch.portable, kernel, context) if launch.portable else launch.plan
                for launch, kernel in zip(self.launches, kernels, strict=True)
            ],
            kernels,
            self.driver,
            names,
            resident=self.operator.resident,
            descriptors=runtime.descriptors,
        )
        return self._prepared.setdefault(context, prepared)

    def _fitting(self, plan: LaunchPlan, portable: LaunchPlan, kernel: LoadedKernel, context: int) -> LaunchPlan:
        """``plan``, or the portable one: a green context may have no room for a cluster of ``plan``."""
        config = launch_config(plan.grid, plan.block, plan.shared_bytes, plan.attributes)
        return plan if self.runtime.active_clusters(kernel, context, config) else portable
