"""The way of every call: read, check, choose and launch; plans are made for a user, or cached for plain functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..kernels.native.launches import NativeLaunch
from ..launch.driver import DeviceFacts
from ..launch.streams import stream_handle
from ..launch.workspace import SemaphoreWorkspace, Workspace, check_workspace, scratch_sizes
from ..tensor import is_torch, view_of
from ..values import dataclass
from .backends import automatic_backend, check_device_facts, resolve_backend
from .described_tensors import describe_tensors
from .fast_path.notes import Launched, Resized, note_launch, note_unrepeatable
from .hook import installed
from .memory import TensorMemory
from .operator import CallTensors, Operator, OutputForm, Resizer
from .runtime import PlanCache, PlanRuntime, Runtime, runtime_of, shared_bounds
from .step_plan import StepPlan
from .torch_ops import RUNTIME_SCRATCH, TORCH_SCRATCH, TorchOp, torch_bytes

if TYPE_CHECKING:
    from ..protocols import Stream

PlanT = TypeVar("PlanT", bound=StepPlan)
_SIZES = ("max_seq_len", "max_q_len")  # options, if an operator has them
_BOUND, _Q_LEN_BOUND = _SIZES
# Kinds of options -> those of a torch op's arguments, which may be symbolic.
_OP_KINDS = {"bool": "bool", "float": "float", "int": "SymInt", "str": "str"}
_NOT_IN_AN_OP = {"workspace": TORCH_SCRATCH, "stream": None, "runtime": None}


@dataclass(frozen=True, slots=True)
class CallFamily:
    """The calls like one that has ``tensors``, as ``fast_path.notes.Family``.

    ``plans`` keeps theirs: the runtime may keep a family, which therefore knows the runtime's parts alone. ``form`` is
    what else tells plans apart, ``kept_bound`` the bound on lengths up to which calls share a plan.
    """

    plan_class: type[StepPlan]
    operator: Operator
    runtime: PlanRuntime
    plans: PlanCache
    tensors: CallTensors
    options: Any
    form: tuple[object, ...]
    of_torch: bool
    kept_bound: int

    @property
    def max_q_len(self) -> int | None:
        """The bound on the query tokens of a request in this call; None: it has none."""
        return getattr(self.options, _Q_LEN_BOUND, None)

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
        sized, bound = self.tensors.sized, self.max_q_len
        return sized if bound is None else {**sized, _Q_LEN_BOUND: bound}

    def plan_of(self, sizes: Mapping[str, int], launches: Sequence[NativeLaunch[Any]] | None) -> StepPlan:
        """As ``Family``."""
        return self.plan(self.tensors.resized(sizes), sizes.get(_Q_LEN_BOUND), launches)

    def plan(
        self, tensors: CallTensors, max_q_len: int | None, launches: Sequence[NativeLaunch[Any]] | None = None
    ) -> StepPlan:
        """The plan of a call of the family; it is made unless the runtime has it, with all checks if there are no
        launches."""
        new = partial(self._new, tensors, max_q_len, launches)
        plan: StepPlan = self.plans.get((self.form, max_q_len, tensors.specs), new)
        return plan

    def _new(
        self, tensors: CallTensors, max_q_len: int | None, launches: Sequence[NativeLaunch[Any]] | None
    ) -> StepPlan:
        call, operator = self._call(tensors, max_q_len), self.operator
        if launches is None:
            return _plan(self.plan_class, operator, self.runtime, call, None, self.of_torch, self.kept_bound)
        options = operator.planned_options(call, self.kept_bound)
        return self.plan_class(self.runtime, operator, tensors, options, launches, of_torch=self.of_torch)

    def _call(self, tensors: CallTensors, max_q_len: int | None) -> Any:
        call = self.operator.call(tensors, self.options)
        if tensors is not self.tensors:
            call = self.operator.call(tensors, self.operator.resized_options(call, max_q_len))
        return call

    def resizer(self) -> Callable[[Mapping[str, int]], Resized]:
        """As ``Family``."""
        operator, runtime, kept = self.operator, self.runtime, self.kept_bound
        quick: Resizer | None = None
        like = operator.call(self.tensors, self.options)
        like = operator.call(self.tensors, operator.planned_options(like, kept))
        if operator.resizer is not None:
            quick = operator.resizer(like, _device_of(operator, runtime, like), runtime.native_release())

        def resized(sizes: Mapping[str, int]) -> Resized:
            call, launches = like, quick and quick(sizes)
            if launches is None:
                call = self._call(self.tensors.resized(sizes), sizes.get(_Q_LEN_BOUND))
                call, launches = _launches(operator, runtime, call, None, kept)
            return launches, operator.planned_bounds(call.options)[1]

        return resized

    def unsent(self, plan: StepPlan, workspace: Any, stream: int) -> Launched | None:
        """As ``Family``: a hook sees launches alone, and torch gives memory to captured ones and to lent regions."""
        if installed.hook is not None:
            return None
        if workspace is not None:
            is_plain = isinstance(workspace, (Workspace, SemaphoreWorkspace))
        else:
            of_plan = not any(region.lent for region in plan.regions)
            is_plain = not self.of_torch or (of_plan and not _is_captured(self.runtime, plan, stream))
        return plan.unsent(workspace, stream) if is_plain else None

    def launch(
        self,
        plan: StepPlan,
        addresses: tuple[int, ...],
        numbers: tuple[Any, ...],
        workspace: Any,
        like: Any,
        stream: int,
    ) -> Launched:
        """As ``OperatorPlan.launch``, with a workspace as the call gave it; ``like`` is its first tensor."""
        if self.of_torch:
            workspace = _scratch_of_call(self.runtime, plan, workspace, like, stream)
        elif workspace is TORCH_SCRATCH:  # of calls by FlashInfer's names that torch captures
            workspace = _scratch_of_torch(plan, plan.device)
        return plan.launch(addresses, numbers, workspace, stream)


def plan_call(
    plan_class: type[PlanT],
    operator: Operator,
    tensors: Mapping[str, Any],
    options: Any,
    *,
    runtime: Runtime | None,
    device_facts: DeviceFacts | str | None,
) -> PlanT:
    """The plan for a call's ``tensors`` by name, scales among them, and its other ``options``."""
    rt, facts, arguments = runtime_of(runtime), check_device_facts(device_facts), dict(tensors)
    named, of_torch = operator.checked(options), is_torch(arguments[operator.tensors[0].name])
    if facts is not None:
        describe_tensors(arguments)
    scales = operator.split_scales(arguments)
    views = operator.read(arguments, options)
    views.check_addresses()
    call = operator.call(views, operator.options(**operator.with_defaults(scales, views), **named))
    return _plan(plan_class, operator, rt.for_plans, call, facts, of_torch)


def run_call(
    plan_class: type[StepPlan],
    operator: Operator,
    tensors: Mapping[str, Any],
    options: Any,
    *,
    workspace: Any,
    stream: Stream | None,
    runtime: Runtime | None,
) -> Any:
    """Run a call with ``tensors`` and ``options`` as in ``plan_call``; its ``out``, if it has one.

    The plan comes from the runtime's cache or is made now.
    """
    rt, arguments = runtime_of(runtime), dict(tensors)
    named, scales = operator.checked(options), operator.split_scales(arguments)
    if operator.output is not None and arguments["out"] is None:
        arguments["out"] = _new_output(operator.output(arguments), rt.memory)
    name = operator.tensors[0].name
    first = arguments[name]
    of_torch = is_torch(first)
    handle = _stream_of(rt, stream, first, name, of_torch=of_torch)
    workspace = None if workspace is RUNTIME_SCRATCH else workspace
    if workspace is not None and workspace is not TORCH_SCRATCH:
        check_workspace(workspace)
    operator.with_bounds(named, arguments, rt, handle)
    views = operator.read(arguments, options)
    numbers = operator.with_defaults(scales, views)
    bound = named.get(_BOUND)
    shortest, kept = (0, 0) if bound is None else shared_bounds(bound)
    fixed = [value for option, value in named.items() if option not in _SIZES]
    form = (operator.name, kept, *fixed, *[number is None for number in numbers.values()])
    options = operator.options(**numbers, **named)
    family = CallFamily(plan_class, operator, rt.for_plans, rt.plans, views, options, form, of_torch, kept)
    plan = family.plan(views, named.get(_Q_LEN_BOUND))
    views.check_addresses()
    of_launch = operator.launch_numbers(plan.options, numbers, bound)
    launched = family.launch(plan, views.addresses, of_launch, workspace, first, handle)
    note_launch(launched._replace(bounds=(shortest, launched.bounds[1]), family=family))
    return arguments.get("out")


def torch_op(operator: Operator) -> TorchOp:
    """The operator's torch op: its tensors, scales and options as declared."""
    kinds = {arg.name: "Tensor?" if arg.optional else "Tensor" for arg in operator.tensors}
    kinds |= dict.fromkeys(operator.scales, "Scale")
    kinds |= {**operator.op_options, **{name: _op_kind(kind) for name, kind in operator.option_kinds.items()}}
    written = tuple(arg.name for arg in operator.tensors if arg.written)

    def complete(arguments: dict[str, Any]) -> Any:
        import torch

        if operator.output is not None and arguments["out"] is None:
            like, shape, dtype = operator.output(arguments)
            dtype = like.dtype if dtype is None else getattr(torch, dtype)
            arguments["out"] = torch.empty(shape, dtype=dtype, device=like.device)
        return arguments.get("out")

    return TorchOp(operator.name, kinds, written, _NOT_IN_AN_OP, complete)


def _op_kind(annotation: str) -> str:
    required = annotation.removesuffix(" | None")
    return _OP_KINDS[required] + ("" if required == annotation else "?")


def _plan(
    plan_class: type[PlanT],
    operator: Operator,
    runtime: PlanRuntime,
    call: Any,
    device_facts: DeviceFacts | None,
    of_torch: bool,
    kept_bound: int | None = None,
) -> PlanT:
    """The plan, checked first; ``kept_bound`` is that which other calls may share it up to."""
    call, launches = _launches(operator, runtime, call, device_facts, kept_bound)
    return plan_class(runtime, operator, call.tensors, call.options, launches, of_torch=of_torch)


def _launches(
    operator: Operator, runtime: PlanRuntime, call: Any, device_facts: DeviceFacts | None, kept_bound: int | None
) -> tuple[Any, Sequence[NativeLaunch[Any]]]:
    """A call with the options that it is planned with, and its launches; it is checked first."""
    operator.check(call)
    device = device_facts or _device_of(operator, runtime, call)
    if not automatic_backend(operator.name, call.options.backend, device.capability):
        resolve_backend(operator.name, call.options.backend, device)
    options = operator.planned_options(call, kept_bound)
    if options is not call.options:
        call = operator.call(call.tensors, options)
    return call, operator.launches(call, device, runtime.native_release())


def _device_of(operator: Operator, runtime: PlanRuntime, call: Any) -> DeviceFacts:
    return runtime.driver.device(call.tensors[operator.tensors[0].name].device)


def _new_output(form: OutputForm, memory: TensorMemory) -> Any:
    """The output of a call that leaves it out.

    Raises:
        UsageError: it cannot be made from the call's tensors.
    """
    try:
        return memory.empty(*form)
    except UsageError as error:
        raise UsageError(f"None, expected a tensor ({error})", argument="out") from error


def _stream_of(runtime: PlanRuntime, stream: Stream | None, first: Any, name: str, *, of_torch: bool) -> int:
    """The handle of a call's stream; None: the current one for its ``first`` tensor, the argument ``name``.

    Raises:
        UsageError: the stream is none; or ``first`` is no tensor, or is not on a CUDA device.
    """
    if stream is not None:
        return stream_handle(stream)
    if isinstance(first, int) or (of_torch and first.device.type != "cuda"):
        first = view_of(first, name)  # which refuses it
    return runtime.memory.current_stream(first)


def _scratch_of_torch(plan: StepPlan, device: int) -> SemaphoreWorkspace:
    """Memory for one run of a plan, zeroed where it must be; torch frees it in stream order, behind the run."""
    tensors, parts = list[Any](), list[tuple[int, int]]()
    for zeroed, size in zip((True, False), scratch_sizes(plan.regions), strict=True):
        tensor = torch_bytes(size, device, zeroed=zeroed) if size else None
        tensors.append(tensor)
        parts.append((0 if tensor is None else tensor.data_ptr(), size))
    semaphores, scratch = parts
    return SemaphoreWorkspace(semaphores, scratch, owner=tensors)


def _with_lent_scratch(
    runtime: PlanRuntime, plan: StepPlan, workspace: SemaphoreWorkspace | None, like: Any
) -> SemaphoreWorkspace:
    """Scratch for one run from the framework of the tensor ``like``, beside a workspace's semaphores, or new ones."""
    zeroed, other = scratch_sizes(plan.regions)
    scratch = runtime.memory.empty(like, (other,), "uint8")
    place = view_of(scratch, "workspace").pointer, other
    if workspace is not None:
        note_unrepeatable()  # repeated calls would take the workspace's own scratch
        return replace(workspace, scratch=place, owner=(workspace.owner, scratch))
    semaphores = runtime.memory.zeros(like, (zeroed,), "uint8")
    return SemaphoreWorkspace((view_of(semaphores, "workspace").pointer, zeroed), place, owner=(semaphores, scratch))


def _is_captured(runtime: PlanRuntime, plan: StepPlan, stream: int) -> bool:
    """Return whether a launch on the stream is captured, in the primary context if none is current."""
    with runtime.driver.using(runtime.driver.context_on(plan.device)):
        return runtime.driver.is_capturing(stream)


def _scratch_of_call(runtime: PlanRuntime, plan: StepPlan, workspace: Any, like: Any, stream: int) -> Any:
    """The workspace of a call that asked for ``workspace`` with the torch tensor ``like``; None: the plan's own.

    In a capture by torch that is memory of the graph: nobody could have reserved room for it in a plan that the call
    finds by itself. Regions that are lent are torch's memory too, beside semaphores that the caller may give.
    """
    lent = any(region.lent for region in plan.regions)
    if (workspace is None or lent) and stream == runtime.memory.stream_query(plan.device):
        if isinstance(workspace, SemaphoreWorkspace):
            return _with_lent_scratch(runtime, plan, workspace, like)
        if workspace is None:
            if _is_captured(runtime, plan, stream):
                note_unrepeatable()
                workspace = TORCH_SCRATCH
            elif lent:
                return _with_lent_scratch(runtime, plan, None, like)
    return _scratch_of_torch(plan, plan.device) if workspace is TORCH_SCRATCH else workspace
