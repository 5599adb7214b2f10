"""An attention call planned once for its form, and run many times at any addresses."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...artifacts.tables.metadata import KernelMeta
from ...artifacts.tables.native_kernels import MEASURED, NativeKernel
from ...errors import WorkspaceError
from ...kernels.trtllm_gen.arguments import Device
from ...kernels.trtllm_gen.grid import LARGEST_PORTABLE_CLUSTER
from ...kernels.trtllm_gen.invariance import select_invariant
from ...kernels.trtllm_gen.plan import Planned, plan_selected
from ...kernels.trtllm_gen.rebind import moved_to
from ...kernels.trtllm_gen.reduction_launches import (
    AfterMain,
    choose_own,
    launches_after,
    own_launch_plan,
)
from ...kernels.trtllm_gen.select import Occupancy, select
from ...kernels.trtllm_gen.traits import MultiCtasMode, Policy
from ...kernels.trtllm_gen.workspace_layout import ALIGNMENT, stats_bytes
from ...launch.modules import KernelRequest
from ...launch.plan import LaunchAttributes, LaunchPlan, launch_config
from ...launch.prepared import PreparedLaunches
from ...launch.tensormap import TensorMapSpec
from ..runtime import Runtime
from .calls import Call

# A workspace that is as large as any plan may want: planning looks at no real one.
_BOUNDLESS = (1 << 40, 1 << 62)
_COUNTER_BYTES = 4
_CACHE_MAPS = ("tmaK_", "tmaV_")
_COUNTER_MULTIPLE = 8
_MERGING = (MultiCtasMode.GMEM, MultiCtasMode.SEPARATE_KERNEL)


@dataclass(frozen=True, slots=True)
class _Follower:
    """One of our kernels behind the main one, ready to launch."""

    plan: LaunchPlan
    kernel: NativeKernel


class AttentionPlan:
    """One call's form decided: kernel, grid, parameters, what follows; made by ``operators.plan``.

    It holds no tensor, workspace or stream; a run patches those in. A run allocates nothing, waits for nothing, and
    after ``operators.preload`` loads nothing, so it may be captured. Safe between threads.
    """

    def __init__(self, runtime: Runtime, call: Call, device: int) -> None:
        facts = runtime.driver.device(device)
        self.device = Device(facts.capability[0] * 10 + facts.capability[1], facts.multiprocessors)
        self._runtime = runtime
        self._ordinal = device
        self._release = runtime.published_release()
        self.planned = self._decide(call)
        self._followers = tuple(self._follower(after) for after in launches_after(self.planned))
        self._lock = threading.Lock()
        self._prepared: dict[int, tuple[PreparedLaunches, ...]] = {}

    @property
    def kernel(self) -> str:
        """The main kernel's symbol."""
        return self.planned.meta.symbol

    @property
    def workspace_bytes(self) -> int:
        """Bytes that always suffice for a workspace, wherever it begins."""
        return self._taken(self.planned, _BOUNDLESS[0]) + ALIGNMENT - 1

    @property
    def counter_bytes(self) -> int:
        """Bytes of zeroed counters that a run needs beside the workspace; 0 for none."""
        if MultiCtasMode(self.planned.selection.state.multi_ctas) not in _MERGING:
            return 0
        problem, geometry = self.planned.problem, self.planned.selection.geometry
        counted = max(problem.batch * problem.heads_q * geometry.ctas_q, problem.multiprocessors)
        return -(-counted // _COUNTER_MULTIPLE) * _COUNTER_MULTIPLE * _COUNTER_BYTES

    def launch_plans(self) -> tuple[LaunchPlan, ...]:
        """Main launch, reduction and LSE as far as there are any, as values; addresses are those of planning."""
        return (self._main_plan(), *(follower.plan for follower in self._followers))

    def run(self, call: Call, workspace: tuple[int, int], counters: int, stream: int) -> None:
        """Launch for ``call``, whose form must be that of the plan, on ``stream``.

        Args:
            call: other addresses and scales, the same form; its own bound on the keys may be lower.
            workspace: address and bytes; contents do not matter.
            counters: address of ``counter_bytes`` of zeros, left as zeros; 0 where none are needed.
            stream: handle.

        Raises:
            WorkspaceError: the workspace is too small; the message names the bytes needed.
            DeviceError: a kernel cannot be loaded or launched.
        """
        # Carving refuses a workspace by its fixed parts alone; here all the bytes needed are told in one place.
        unbounded = (workspace[0], _BOUNDLESS[1])
        moved = moved_to(self.planned, call.problem(self.device, unbounded, counters))
        self._check_workspace(moved, workspace)
        driver = self._runtime.driver
        context = driver.context_on(self._ordinal)
        following = launches_after(moved) if self._followers else ()
        given = (moved.values, *(after.values for after in following))
        launches = self._prepared.get(context) or self._launches(context, stream, given)
        for launch, values in zip(launches, given, strict=True):
            launch.run(stream, *(v.address if isinstance(v, TensorMapSpec) else v for v in values.values()))

    def requests(self, context: int) -> tuple[KernelRequest, ...]:
        """What a run loads: the main kernel, and ours behind it."""
        wide = self.planned.attributes.nonportable_cluster
        main = self._runtime.published_request(self.planned.meta, context, nonportable_cluster=wide)
        return (main, *(self._runtime.request(follower.kernel, context) for follower in self._followers))

    def _decide(self, call: Call) -> Planned:
        problem = call.problem(self.device, _BOUNDLESS, _BOUNDLESS[0] if call.splits_kv else 0)
        kernels = self._release.finder.for_problem(problem)
        if call.batch_invariant:
            return plan_selected(problem, select_invariant(problem, kernels))
        return plan_selected(problem, select(problem, kernels, self._occupancy(), Policy.BEST))

    def _occupancy(self) -> Occupancy:
        """Clusters that the device holds at once, by the driver; that needs the kernel to be loaded."""

        def ask(meta: KernelMeta, cluster: int, grid: tuple[int, int, int]) -> int:
            driver = self._runtime.driver
            context = driver.context_on(self._ordinal)
            wide = cluster > LARGEST_PORTABLE_CLUSTER
            kernel = self._runtime.load_published(meta, context, nonportable_cluster=wide)
            attributes = LaunchAttributes(cluster=(cluster, 1, 1), scheduling_policy=1, nonportable_cluster=wide)
            config = launch_config(grid, (meta.threads, 1, 1), meta.shared_bytes, attributes)
            with driver.using(context):
                return driver.active_clusters(kernel.function, config)

        return ask

    def _follower(self, after: AfterMain) -> _Follower:
        own = self._runtime.own_release()
        kernel = choose_own(own.kernels, after.operation, after.traits, self.device.sm)
        if kernel.status != MEASURED:
            warnings.warn(
                f"{kernel.name} runs behind {self.kernel}: it was built for SM {self.device.sm} but never run there",
                stacklevel=2,
            )
        path = own.path_of(kernel)
        layout = own.layouts[kernel.struct]
        return _Follower(own_launch_plan(after, kernel, path, self._runtime.digest_of(path), layout), kernel)

    def _main_plan(self) -> LaunchPlan:
        return self.planned.launch_plan(self._release.pin.path)

    def _launches(
        self, context: int, stream: int, given: Sequence[Mapping[str, object]]
    ) -> tuple[PreparedLaunches, ...]:
        """The launches in a context; each takes what it is ``given`` at a run, field by field."""
        runtime, wide = self._runtime, self.planned.attributes.nonportable_cluster
        runtime.check_process()
        main = runtime.load_published(self.planned.meta, context, stream, nonportable_cluster=wide)
        kernels = [main, *(runtime.load(follower.kernel, context, stream) for follower in self._followers)]
        made = tuple(
            PreparedLaunches(
                [replace(plan, inputs={name: name for name in values})],
                [kernel],
                runtime.driver,
                tuple(values),
                resident=_CACHE_MAPS,
                descriptors=runtime.descriptors,
            )
            for plan, kernel, values in zip(self.launch_plans(), kernels, given, strict=True)
        )
        with self._lock:
            return self._prepared.setdefault(context, made)

    def _check_workspace(self, moved: Planned, workspace: tuple[int, int]) -> None:
        address, nbytes = workspace
        taken = self._taken(moved, address)
        if taken > nbytes:
            raise WorkspaceError(
                f"workspace of {nbytes} bytes at {address:#x}: {self.kernel} needs {taken} bytes there, "
                f"{self.workspace_bytes} anywhere"
            )

    def _taken(self, planned: Planned, address: int) -> int:
        """Bytes from ``address`` to the end of what a run writes."""
        at = planned.problem.pointers
        ends = [0]
        if planned.lse is not None:
            ends.append(planned.lse.stats + _stats_bytes(planned) - address)
        if self.planned.scratch_bytes:
            ends.append(at.scratch + self.planned.scratch_bytes - address)
        return max(ends)


def _stats_bytes(planned: Planned) -> int:
    problem = planned.problem
    return stats_bytes(problem.heads_q, problem.batch, problem.max_q)
