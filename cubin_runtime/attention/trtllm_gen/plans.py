"""Plans of trtllm-gen calls: made once for a form, run many times with other addresses."""

from __future__ import annotations

import warnings

from ...artifacts.tables.metadata import KernelMeta
from ...artifacts.tables.native_kernels import MEASURED, NativeKernel
from ...errors import UsageError, WorkspaceError
from ...kernels.native.reduction.plan import OperationLaunch
from ...kernels.native.reduction.select import choose_kernel
from ...kernels.trtllm_gen.arguments import Device
from ...kernels.trtllm_gen.call import Call
from ...kernels.trtllm_gen.decision import Decision, decide
from ...kernels.trtllm_gen.problem import NUMBERS, Bindings
from ...kernels.trtllm_gen.select import Occupancy
from ...kernels.trtllm_gen.workspace_layout import ALIGNMENT, stats_bytes
from ...launch.modules import KernelRequest
from ...launch.plan import LARGEST_PORTABLE_CLUSTER, LaunchAttributes, LaunchPlan, launch_config
from ...launch.prepared import OtherContextError, PreparedLaunches
from ..fast_path.notes import Launched, note_compared
from ..runtime import PlanRuntime
from ..user_frame import stacklevel_of_user
from .plan_key import bounds_of

# Planning assumes a workspace of unbounded size at this address.
_ADDRESS, _BOUNDLESS = 1 << 40, 1 << 62


class AttentionPlan:
    """The launches for calls with the same shapes and dtypes: kernels, grids, parameters. Made by ``operators.plan``.

    It holds no tensor, workspace or stream; each run binds those. A run allocates nothing, waits for nothing, and after
    ``operators.preload`` loads nothing, so that it may be captured. Safe between threads. ``runtime`` is the one that
    it was planned with.
    """

    def __init__(self, runtime: PlanRuntime, call: Call, device: int) -> None:
        facts = runtime.driver.device(device)
        self.device = Device(facts.capability[0] * 10 + facts.capability[1], facts.multiprocessors)
        self.runtime = runtime
        self._ordinal = device
        self._release = runtime.trtllm_gen_release()
        self.decision = self._decide(call)
        self._followers = tuple(self._kernel_for(launch) for launch in self.decision.following)
        self._prepared: dict[int, PreparedLaunches] = {}

    @property
    def kernel(self) -> str:
        """The main kernel's symbol."""
        return self.decision.meta.symbol

    @property
    def workspace_bytes(self) -> int:
        """Bytes that suffice for a workspace at any address."""
        return self.decision.workspace_bytes + ALIGNMENT - 1

    @property
    def counter_bytes(self) -> int:
        """Bytes of zeroed counters that a run needs beside the workspace; 0 for none."""
        return self.decision.counter_bytes

    def launch_plans(self) -> tuple[LaunchPlan, ...]:
        """The launches as values: the main one, then reduction and LSE if there are any; with planning's addresses."""
        main, native_release = self.decision.launch_plan(self._release.pin.path), self.runtime.native_release
        followers = zip(self.decision.following, self._followers, strict=True)
        return (main, *(launch.launch_plan(kernel, native_release().file_of(kernel)) for launch, kernel in followers))

    def run(self, call: Call, workspace: tuple[int, int], counters: int, stream: int) -> Launched:
        """Launch for ``call``, whose tensors must have the plan's shapes, strides and dtypes; what was launched.

        Args:
            call: may have other addresses and scales, and a lower bound on the keys.
            workspace: address and bytes; contents do not matter.
            counters: address of ``counter_bytes`` zeros, which the run leaves zero; 0 if none are needed.
            stream: handle.

        Raises:
            UsageError: the call is on another device than the plan.
            WorkspaceError: the workspace is too small; the message names the bytes needed.
            DeviceError: a kernel cannot be loaded or launched.
        """
        if call.query.device != self._ordinal:
            raise UsageError(f"on device {call.query.device}, planned for device {self._ordinal}", argument="query")
        address, nbytes = workspace
        # Bind with an unbounded size first, so that one error below names all the bytes needed.
        bindings = call.bindings((address, _BOUNDLESS), counters).with_partial_out(self.decision.partial_offset)
        note_compared(bindings.key, bindings.value)  # one cache for both takes another plan
        needed = self._taken(bindings, address)
        if needed > nbytes:
            raise WorkspaceError(
                f"workspace of {nbytes} bytes at {address:#x}: {self.kernel} needs {needed} bytes there, "
                f"{self.workspace_bytes} anywhere"
            )
        context = self.runtime.driver.context_on(self._ordinal)
        prepared = self._prepared.get(context) or self._prepare(context, stream)
        try:
            prepared.run(stream, *bindings)
        except OtherContextError:
            context = self.runtime.driver.context_of(stream, self._ordinal)
            prepared = self._prepared.get(context) or self._prepare(context, stream)
            prepared.run(stream, *bindings)
        return Launched(
            prepared=prepared,
            values=bindings,
            # Without scratch, partial_out is not an address.
            numbers=NUMBERS if bindings.scratch else (*NUMBERS, "partial_out"),
            context=context,
            device=self._ordinal,
            memory=self.runtime.memory,
            bounds=bounds_of(call),
        )

    def requests(self, context: int) -> tuple[KernelRequest, ...]:
        """The kernels that a run loads."""
        wide = self.decision.attributes.nonportable_cluster
        main = self.runtime.trtllm_gen_request(self.decision.meta, context, nonportable_cluster=wide)
        return (main, *(self.runtime.request(kernel, context) for kernel in self._followers))

    def _decide(self, call: Call) -> Decision:
        problem = call.problem(self.device, (_ADDRESS, _BOUNDLESS), 0)
        return decide(problem, self._release.finder, self._occupancy(), batch_invariant=call.batch_invariant)

    def _occupancy(self) -> Occupancy:
        """Asks the driver how many clusters the device holds at once, which loads the kernel."""

        def ask(meta: KernelMeta, cluster: int, grid: tuple[int, int, int]) -> int:
            context = self.runtime.driver.context_on(self._ordinal)
            wide = cluster > LARGEST_PORTABLE_CLUSTER
            kernel = self.runtime.load_trtllm_gen(meta, context, nonportable_cluster=wide)
            attributes = LaunchAttributes(cluster=(cluster, 1, 1), scheduling_policy=1, nonportable_cluster=wide)
            config = launch_config(grid, (meta.threads, 1, 1), meta.shared_bytes, attributes)
            return self.runtime.active_clusters(kernel, context, config)

        return ask

    def _kernel_for(self, launch: OperationLaunch) -> NativeKernel:
        kernel = choose_kernel(self.runtime.native_release().kernels, launch.operation, launch.traits, self.device.sm)
        if kernel.status != MEASURED:
            warnings.warn(
                f"{kernel.name} runs after {self.kernel}: it was built for SM {self.device.sm} but never run there",
                stacklevel=stacklevel_of_user(),
            )
        return kernel

    def _prepare(self, context: int, stream: int) -> PreparedLaunches:
        runtime, wide = self.runtime, self.decision.attributes.nonportable_cluster
        runtime.check_process()
        main = runtime.load_trtllm_gen(self.decision.meta, context, stream, nonportable_cluster=wide)
        launches = PreparedLaunches(
            self.launch_plans(),
            (main, *(runtime.load(kernel, context, stream) for kernel in self._followers)),
            runtime.driver,
            Bindings._fields,
            resident=("key", "value"),
            descriptors=runtime.descriptors,
        )
        return self._prepared.setdefault(context, launches)

    def _taken(self, bindings: Bindings, address: int) -> int:
        """Bytes from ``address`` to the end of the statistics and scratch that a run writes."""
        problem, ends = self.decision.problem, [0]
        if problem.has_lse:
            rows = stats_bytes(problem.heads_q, problem.batch, problem.max_q)
            ends.append(bindings.softmax_stats + rows - address)
        if self.decision.scratch_bytes:
            ends.append(bindings.scratch + self.decision.scratch_bytes - address)
        return max(ends)
