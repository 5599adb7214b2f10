"""Calls that differ in sizes alone, as the steps of a server do, and how they are planned and launched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..launch.streams import stream_handle
from ..tensor import view_of
from ..values import dataclass
from .fast_path.notes import Launched
from .operator import CallTensors
from .torch_ops import scratch_of_call

if TYPE_CHECKING:
    from ..protocols import Stream
    from .operator_plan import AnyWorkspace, OperatorPlan
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
        UsageError: the stream is none; or ``first`` is a number, which would be taken for a device.
    """
    if stream is not None:
        return stream_handle(stream)
    if isinstance(first, int):
        first = view_of(first, name)  # type: ignore[arg-type]  # which refuses it
    return runtime.memory.current_stream(first)
