"""Calls that differ in sizes alone, as the steps of a server do, and how they are planned and launched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..launch.regions import workspace_size
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.streams import stream_handle
from ..tensor import is_torch, view_of
from ..values import dataclass
from .fast_path.notes import Launched, note_unrepeatable
from .operator import CallTensors
from .torch_ops import TORCH_SCRATCH, torch_bytes

if TYPE_CHECKING:
    from ..launch.semaphore_workspace import AnyWorkspace
    from ..protocols import Stream
    from .operator_plan import OperatorPlan
    from .runtime import PlanRuntime

PlanT_co = TypeVar("PlanT_co", bound="OperatorPlan", covariant=True)
Q_LEN_BOUND = "max_q_len"  # the option that is a size


@dataclass(frozen=True, slots=True)
class CallFamily(Generic[PlanT_co]):
    """The calls like one that has ``tensors``, as ``fast_path.notes.Family``.

    ``form`` is what else tells plans apart. ``plan`` gives the plan of tensors with a bound on the query tokens of a
    request, which is ``max_q_len`` in this call; None: it has none.
    """

    runtime: PlanRuntime
    tensors: CallTensors
    form: tuple[object, ...]
    plan: Callable[[CallTensors, int | None], PlanT_co]
    max_q_len: int | None = None

    @property
    def key(self) -> Hashable:
        """As ``Family``."""
        sized = self.tensors.sized
        named = zip(self.tensors.declared, self.tensors.specs, strict=True)
        specs = [spec and (spec._replace(shape=spec.shape[1:]) if arg.name in sized else spec) for arg, spec in named]
        return self.form, self.max_q_len is None, tuple(specs)

    @property
    def sizes(self) -> Mapping[str, int]:
        """As ``Family``."""
        sized = self.tensors.sized
        return sized if self.max_q_len is None else {**sized, Q_LEN_BOUND: self.max_q_len}

    def plan_of(self, sizes: Mapping[str, int]) -> PlanT_co:
        """As ``Family``; it is made, with all checks, unless the runtime has it."""
        return self.plan(self.tensors.resized(sizes), sizes.get(Q_LEN_BOUND))

    def launch(
        self,
        plan: OperatorPlan,
        addresses: tuple[int, ...],
        numbers: tuple[Any, ...],
        workspace: AnyWorkspace | None,
        like: Any,
        stream: int,
    ) -> Launched:
        """As ``OperatorPlan.launch``, with a workspace as the call gave it; ``like`` is its first tensor."""
        return plan.launch(addresses, numbers, scratch_of_call(self.runtime, plan, workspace, like, stream), stream)


def stream_of(runtime: PlanRuntime, stream: Stream | None, first: Any, name: str) -> int:
    """The handle of a call's stream; None: the current one for its ``first`` tensor, the argument ``name``.

    Raises:
        UsageError: the stream is none; or ``first`` is no tensor, or is not on a CUDA device.
    """
    if stream is not None:
        return stream_handle(stream)
    if isinstance(first, int) or (is_torch(first) and first.device.type != "cuda"):
        first = view_of(first, name)  # which refuses it
    return runtime.memory.current_stream(first)


def scratch_of_torch(plan: OperatorPlan, device: int) -> SemaphoreWorkspace:
    """Memory for one run of a plan, zeroed where it must be; torch frees it in stream order, behind the run."""
    tensors, parts = list[Any](), list[tuple[int, int]]()
    for zeroed in (True, False):
        size = workspace_size([region for region in plan.regions if region.zeroed == zeroed])
        tensor = torch_bytes(size, device, zeroed=zeroed) if size else None
        tensors.append(tensor)
        parts.append((0 if tensor is None else tensor.data_ptr(), size))
    semaphores, scratch = parts
    return SemaphoreWorkspace(semaphores, scratch, owner=tensors)


def scratch_of_call(runtime: PlanRuntime, plan: OperatorPlan, workspace: Any, like: Any, stream: int) -> Any:
    """The workspace of a call that asked for ``workspace`` with the tensor ``like``; None: the plan's own.

    In a capture by torch that is memory of the graph: nobody could have reserved room for it in a plan that the call
    finds by itself.
    """
    if workspace is None and is_torch(like) and stream == runtime.memory.current_stream(like):
        with runtime.driver.using(runtime.driver.context_on(plan.device)):
            if runtime.driver.is_capturing(stream):
                note_unrepeatable()
                workspace = TORCH_SCRATCH
    return scratch_of_torch(plan, plan.device) if workspace is TORCH_SCRATCH else workspace
