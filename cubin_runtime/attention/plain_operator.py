"""Operators whose plans follow from the forms of their tensors and a few options alone: no bound, no output to make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..kernels.native.launches import NativeLaunch
from ..launch.driver import DeviceFacts
from ..launch.semaphore_workspace import check_workspace
from ..tensor import is_torch
from ..values import dataclass
from .backends import check_device_facts, resolve_backend
from .call_family import CallFamily, stream_of
from .checks import OptionCheck, check_options, option_checks
from .described_tensors import describe_tensors
from .fast_path import note_launch
from .operator import CallTensors, Operator
from .process import runtime_of
from .runtime import NativeRelease, PlanRuntime, Runtime
from .scales import split_scale
from .step_plan import StepPlan
from .torch_ops import RUNTIME_SCRATCH, TORCH_SCRATCH, TorchOp

if TYPE_CHECKING:
    from ..protocols import Stream


@dataclass(frozen=True, slots=True)
class PlainCall:
    """The tensors of one call, and its options as attributes."""

    tensors: CallTensors
    options: Any


@dataclass(frozen=True, slots=True)
class PlainOperator(Operator):
    """An operator: besides its tensors, what is written by hand for it.

    ``options`` is the frozen class of its options, whose fields have the names of arguments; ``backend`` is among them.
    ``scales`` are arguments that are numbers other than 0, or tensors, or left out, which is another plan. ``check``
    raises for a call that breaks a rule, ``launches`` plans a checked call.
    ``op_options`` are arguments of its torch op that are neither tensors nor options, with their kinds.
    """

    options: type[Any]
    scales: tuple[str, ...]
    check: Callable[[PlainCall], None]
    launches: Callable[[PlainCall, DeviceFacts, NativeRelease], Sequence[NativeLaunch[Any]]]
    op_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[OptionCheck, ...]:
        """The checks of the options that are no scales."""
        return _checks(self.options, self.scales)  # type: ignore[arg-type]  # classes are hashable

    @property
    def numbers(self) -> tuple[str, ...]:
        """As ``Operator``."""
        return self.scales

    @property
    def number_arguments(self) -> tuple[str, ...]:
        """As ``Operator``."""
        return self.scales


class PlainPlan(StepPlan):
    """A plan of such an operator."""

    operator: PlainOperator

    def numbers_of(self, arguments: dict[str, Any]) -> tuple[float, ...]:
        """As ``StepPlan``; a number that is left out is the plan's.

        Raises:
            UsageError: there is a number that the plan was made without.
        """
        names = self.operator.number_arguments
        numbers = []
        for name, number in zip(names, split_scales(names, arguments), strict=True):
            planned = getattr(self.options, name)
            if number is not None and planned is None:
                raise UsageError(f"{name}={number}: planned with None")
            numbers.append(planned if number is None else number)
        return _numbers(numbers)


PlanT = TypeVar("PlanT", bound=PlainPlan)
_OP_KINDS = {"str": "str", "bool": "bool"}  # of options -> those of a torch op's arguments


def split_scales(names: Sequence[str], arguments: dict[str, Any]) -> tuple[float | None, ...]:
    """The numbers among the scales ``names``, None where there is none; in ``arguments`` only tensors are left.

    Raises:
        UsageError: a number is 0 or not finite.
    """
    numbers = list[float | None]()
    for name in names:
        number, arguments[name] = split_scale(arguments[name], name)
        if number == 0:
            raise UsageError(f"{name}={number}: expected a number other than 0")
        numbers.append(number)
    return tuple(numbers)


def _numbers(scales: Sequence[float | None]) -> tuple[float, ...]:
    """The values that a launch takes for scales that may be left out or on the device."""
    return tuple(1.0 if scale is None else scale for scale in scales)


def plan_plain(
    plan_class: type[PlanT],
    operator: PlainOperator,
    tensors: Mapping[str, Any],
    options: Any,
    *,
    runtime: Runtime | None,
    device_facts: DeviceFacts | str | None,
) -> PlanT:
    """The plan for a call's ``tensors`` by name, scales among them, and its other ``options``."""
    own, facts, arguments = runtime_of(runtime), check_device_facts(device_facts), dict(tensors)
    of_torch = is_torch(arguments[operator.tensors[0].name])
    if facts is not None:
        describe_tensors(arguments)
    options = _options(operator, options, arguments)
    call = PlainCall(operator.read(arguments, options), options)
    return _plan(plan_class, operator, own.for_plans, call, facts, of_torch)


def run_plain(
    plan_class: type[PlainPlan],
    operator: PlainOperator,
    tensors: Mapping[str, Any],
    options: Any,
    *,
    workspace: Any,
    stream: Stream | None,
    runtime: Runtime | None,
) -> None:
    """Run a call with ``tensors`` and ``options`` as in ``plan_plain``; the runtime caches the plan."""
    rt, arguments = runtime_of(runtime), dict(tensors)
    first = arguments[operator.tensors[0].name]
    workspace = None if workspace is RUNTIME_SCRATCH else workspace
    handle = stream_of(rt, stream, first, operator.tensors[0].name)
    if workspace is not None and workspace is not TORCH_SCRATCH:
        check_workspace(workspace)
    options = _options(operator, options, arguments)
    views = operator.read(arguments, options)
    numbers = tuple(getattr(options, name) for name in operator.scales)
    planned = [number is not None for number in numbers]
    named = [getattr(options, name) for name in options.__slots__ if name not in operator.scales]
    form, of_torch = (operator.name, *named, *planned), is_torch(first)
    plans, own = rt.plans, rt.for_plans  # the runtime may keep the function below

    def plan(views: CallTensors, _: int | None) -> PlainPlan:
        def planned() -> PlainPlan:
            return _plan(plan_class, operator, own, PlainCall(views, options), None, of_torch)

        cached: PlainPlan = plans.get((form, views.specs), planned)
        return cached

    family, its = CallFamily(own, views, form, plan), plan(views, None)
    views.check_addresses()
    launched = family.launch(its, views.addresses, _numbers(numbers), workspace, first, handle)
    note_launch(launched._replace(family=family))


def plain_op(operator: PlainOperator, complete: Callable[[dict[str, Any]], Any] = lambda _: None) -> TorchOp:
    """The operator's torch op; ``complete`` is as in ``TorchOp``."""
    kinds = {arg.name: "Tensor?" if arg.optional else "Tensor" for arg in operator.tensors}
    kinds |= dict.fromkeys(operator.scales, "Scale")
    kinds |= {**operator.op_options, **{name: _OP_KINDS[kind] for name, kind in _kinds(operator).items()}}
    written = tuple(arg.name for arg in operator.tensors if arg.written)
    fixed = {"workspace": TORCH_SCRATCH, "stream": None, "runtime": None}
    return TorchOp(operator.name, kinds, written, fixed, complete)


def _options(operator: PlainOperator, options: Any, tensors: dict[str, Any]) -> Any:
    """The checked options of a call with the numbers of its scales; in ``tensors`` only scales on the device are left.

    Raises:
        UsageError: an option is of another kind than its default, or a scale is neither a number nor a tensor.
    """
    scales = dict(zip(operator.scales, split_scales(operator.scales, tensors), strict=True))
    named = {name: getattr(options, name) for name, _, _ in operator.checks}
    check_options(operator.checks, named)
    return operator.options(**scales, **named)


def _kinds(operator: PlainOperator) -> dict[str, str]:
    """The options that are no scales, with their kinds."""
    return {item.name: str(item.type) for item in fields(operator.options) if item.name not in operator.scales}


@cache
def _checks(options: type[Any], scales: tuple[str, ...]) -> tuple[OptionCheck, ...]:
    return option_checks({member.name: str(member.type) for member in fields(options) if member.name not in scales})


def _plan(
    plan_class: type[PlanT],
    operator: PlainOperator,
    runtime: PlanRuntime,
    call: PlainCall,
    device_facts: DeviceFacts | None,
    of_torch: bool,
) -> PlanT:
    operator.check(call)
    device = device_facts or runtime.driver.device(call.tensors[operator.tensors[0].name].device)
    resolve_backend(operator.name, call.options.backend, device)
    launches = operator.launches(call, device, runtime.native_release())
    return plan_class(runtime, operator, call.tensors, call.options, launches, of_torch=of_torch)
