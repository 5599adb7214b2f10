"""Plan, preload and run trtllm-gen calls."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from ...dtypes import ITEM_BYTES
from ...errors import UsageError, WorkspaceError
from ...kernels.trtllm_gen.call import Call
from ...kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall
from ...launch.modules import KernelRequest, PreloadReport
from ...launch.streams import stream_handle
from ...tensor import TensorView, view_of
from ..backends import AUTO, TRTLLM_GEN, resolve_backend
from ..fast_path.notes import Launched, note_launch
from ..hook import Run, installed
from ..runtime import Runtime, runtime_of
from ..torch_ops import TorchScratch, torch_bytes
from .checks import check_call, check_device, check_kinds, check_scales
from .plan_key import bounded, plan_key
from .plans import AttentionPlan

if TYPE_CHECKING:
    from ...protocols import Stream, TrtllmGenBackend
    from ...tensor import Tensor

COUNTER_ALIGNMENT = 16
OPERATORS: Mapping[type[Call], str] = {
    DecodeCall: "trtllm_batch_decode_with_kv_cache",
    ContextCall: "trtllm_batch_context_with_kv_cache",
    RaggedCall: "trtllm_ragged_attention_deepseek",
}


def plan(call: Call, *, backend: TrtllmGenBackend = AUTO, runtime: Runtime | None = None) -> AttentionPlan:
    """The plan for calls with these shapes and dtypes, from the runtime's cache or made now.

    The bound on the keys is rounded up to a power of two (at most what the block table holds), so that one plan serves
    growing lengths. Planning reads no tensor. It loads the kernel only if the driver must be asked how many clusters
    of it fit.

    Raises:
        UsageError: an argument or a field is invalid, or no kernel serves the call (``PlanRefused``,
            ``KernelMissing``).
        BackendError: no backend runs the operator on the device.
        MissingError, SourceError, CorruptError: the release is not available.
    """
    rt = runtime_of(runtime)
    check_kinds(call)

    def make() -> AttentionPlan:
        rounded = bounded(call)
        device = rounded.query.device
        resolve_backend(OPERATORS[type(rounded)], TRTLLM_GEN if backend == AUTO else backend, rt.driver.device(device))
        check_call(rounded)
        return AttentionPlan(rt.for_plans, rounded, device)

    cached: AttentionPlan = rt.plans.get(("trtllm-gen", backend, *plan_key(call)), make)
    return cached


def run(
    call: Call,
    workspace: Tensor,
    *,
    counters: Tensor | None = None,
    stream: Stream | None = None,
    backend: TrtllmGenBackend = AUTO,
    runtime: Runtime | None = None,
) -> None:
    """Compute ``call.out`` (and ``call.lse``).

    Args:
        call: what to compute.
        workspace: a contiguous tensor of any dtype on the call's device, ``workspace_size`` bytes or more. Its contents
            do not matter. One stream's work must have finished before another stream uses it.
        counters: 16-byte aligned, zeroed memory of ``counter_size`` bytes, left zeroed. None allocates it on torch's
            current stream and is therefore refused together with ``stream``.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream; None: torch's current one.
        backend: "auto" or "trtllm-gen".
        runtime: the runtime to use. None: the process's default runtime.

    Raises:
        UsageError, BackendError, MissingError, SourceError, CorruptError: as ``plan``.
        WorkspaceError: workspace or counters are too small; the message names the bytes needed.
        DeviceError: a kernel cannot be loaded or launched.
    """
    rt = runtime_of(runtime)
    call_plan = plan(call, backend=backend, runtime=rt)
    check_scales(call)
    if isinstance(workspace, TorchScratch):
        workspace = torch_bytes(call_plan.workspace_bytes or 1, call.query.device, zeroed=False)
    scratch = view_of(workspace, "workspace_buffer", written=True)
    check_device("workspace_buffer", scratch, call.query.device)
    if not scratch.is_contiguous:
        raise UsageError(f"strides {scratch.strides}, expected a contiguous tensor", argument="workspace_buffer")
    handle = rt.memory.current_stream(workspace) if stream is None else stream_handle(stream)
    held, address = _counters(call_plan, counters, workspace, call.query.device, stream, rt)

    def launch() -> Launched:
        return call_plan.run(call, (scratch.pointer, _bytes_of(scratch)), address, handle)

    hook = installed.hook
    note_launch(launch() if hook is None else hook(Run(call_plan, call, (), handle), launch))
    del held  # freed in stream order, after the launch


def workspace_size(call: Call, *, backend: TrtllmGenBackend = AUTO, runtime: Runtime | None = None) -> int:
    """Bytes of workspace that a run of ``call`` needs, at any address; errors as ``plan``."""
    return plan(call, backend=backend, runtime=runtime).workspace_bytes


def counter_size(call: Call, *, backend: TrtllmGenBackend = AUTO, runtime: Runtime | None = None) -> int:
    """Bytes of zeroed counters that a run of ``call`` needs, or 0; errors as ``plan``."""
    return plan(call, backend=backend, runtime=runtime).counter_bytes


def preload(*calls: Call, backend: TrtllmGenBackend = AUTO, runtime: Runtime | None = None) -> PreloadReport:
    """Plan the calls, and fetch, load and gate their kernels ahead of serving.

    Raises:
        as ``plan``; FrozenError after ``freeze()`` or while a stream captures.
    """
    rt = runtime_of(runtime)
    requests: list[KernelRequest] = []
    for call in calls:
        call_plan = plan(call, backend=backend, runtime=rt)
        requests += call_plan.requests(rt.driver.context_on(call.query.device))
    return rt.modules.preload(requests)


def _counters(
    call_plan: AttentionPlan, counters: Any, like: Any, device: int, stream: Any, runtime: Runtime
) -> tuple[Any, int]:
    needed = call_plan.counter_bytes
    if counters is None:
        if not needed:
            return None, 0
        if stream is not None:
            raise UsageError(f"None with a stream of its own; expected {needed} zeroed bytes", argument="counters")
        counters = runtime.memory.zeros(like, (needed // 4,), "int32")
    view = view_of(counters, "counters", written=True)
    check_device("counters", view, device)
    if view.pointer % COUNTER_ALIGNMENT or not view.is_contiguous:
        raise UsageError(
            f"at {view.pointer:#x}, strides {view.strides}; expected 16-byte aligned, contiguous", argument="counters"
        )
    if _bytes_of(view) < needed:
        raise WorkspaceError(f"counters of {_bytes_of(view)} bytes: {call_plan.kernel} needs {needed} bytes")
    return counters, view.pointer


def _bytes_of(view: TensorView) -> int:
    return prod(view.shape) * ITEM_BYTES[view.dtype]
