"""The pipeline that all decodes share: defaults, the plan cache, and the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..kernels.native.launches import NativeLaunch
from ..kernels.native.problem import LOG2_E
from ..launch.driver import DeviceFacts
from ..launch.semaphore_workspace import check_workspace
from ..launch.streams import stream_handle
from ..tensor import is_torch, view_of
from ..values import dataclass
from .backends import check_device_facts, resolve_backend
from .call_family import Q_LEN_BOUND, CallFamily, stream_of
from .checks import OptionCheck, check_options, integer, option_checks
from .decode_call import KV_SCALES, DecodeCall, DecodeOptions, check_query_bounds
from .described_tensors import describe_tensors
from .fast_path import note_launch
from .operator import CallTensors, Operator
from .plan_cache import shared_bounds
from .process import runtime_of
from .runtime import NativeRelease, PlanRuntime, Runtime
from .scales import split_scale
from .step_plan import StepPlan
from .torch_ops import RUNTIME_SCRATCH, TORCH_SCRATCH

if TYPE_CHECKING:
    from ..protocols import Stream

# The arguments that numbers of a launch are products of, beside those of ``KV_SCALES``.
SCALES = ("softmax_scale", "output_scale")


@dataclass(frozen=True, slots=True)
class DecodeOperator(Operator):
    """A decode operator: besides its tensors, what is written by hand for it.

    ``options`` names those of ``options_type`` that it has. ``check`` raises for a call that breaks a rule.
    ``capacity`` is the most keys that a request can have. ``launches`` plans a checked call for a device with the
    kernels of a release; its bound is ``max_seq_len`` of its options. ``output`` is the shape and dtype (None: that of
    q) of an output to be made for q, ``scale`` the default softmax scale for the shape of q. ``max_queries`` are the
    most query tokens of a request; None: any number, and their bound is never read back.
    """

    options: tuple[str, ...]
    check: Callable[[DecodeCall], None]
    capacity: Callable[[DecodeCall], int]
    launches: Callable[[DecodeCall, DeviceFacts, NativeRelease], Sequence[NativeLaunch[Any]]]
    output: Callable[[Any], tuple[tuple[int, ...], str | None]]
    scale: Callable[[tuple[int, ...]], float]
    options_type: type[DecodeOptions] = DecodeOptions
    max_queries: int | None = None

    @property
    def kv_scales(self) -> tuple[str, ...]:
        """The scales of keys and values that it takes."""
        return tuple(arg.name for arg in self.tensors if arg.name in KV_SCALES)

    @property
    def number_arguments(self) -> tuple[str, ...]:
        """As ``Operator``."""
        return "softmax_scale", "output_scale", "max_seq_len", *self.kv_scales

    @property
    def checks(self) -> tuple[OptionCheck, ...]:
        """The checks of the options and the bound."""
        return _checks(self.options_type, self.options)  # type: ignore[arg-type]  # classes are hashable


class DecodePlan(StepPlan):
    """A decode for one set of shapes, strides and options."""

    operator: DecodeOperator
    options: DecodeOptions

    @property
    def bounds(self) -> tuple[int, int]:
        """As ``OperatorPlan``."""
        return 0, self.options.max_seq_len

    def numbers_of(self, arguments: dict[str, Any]) -> tuple[int, float, float]:
        """The numbers of a run by its arguments, the plan's where it has none; scales on the device stay there."""
        options, bound = self.options, arguments["max_seq_len"]
        scales = {name: getattr(options, name) for name in (*SCALES, *KV_SCALES)}
        for name in (*SCALES, *self.operator.kv_scales):
            number, arguments[name] = split_scale(arguments[name], name)
            scales[name] = scales[name] if number is None else number
        return self.numbers(
            options.max_seq_len if bound is None else integer("max_seq_len", bound), *factors_of(scales)
        )

    def numbers(self, max_seq_len: int, softmax_scale: float, output_scale: float) -> tuple[int, float, float]:
        """The numbers of a run in the order of ``kernels.native.problem.NUMBERS``.

        Raises:
            UsageError: the bound is over the plan's, or a scale is not finite.
        """
        if not 0 <= max_seq_len <= self.options.max_seq_len:
            raise UsageError(f"max_seq_len={max_seq_len}: expected 0 to {self.options.max_seq_len}, the plan's bound")
        if not isfinite(softmax_scale):
            raise UsageError(f"softmax_scale={softmax_scale}: expected a finite number")
        if not isfinite(output_scale):
            raise UsageError(f"output_scale={output_scale}: expected a finite number")
        return max_seq_len, softmax_scale * LOG2_E, output_scale


PlanT = TypeVar("PlanT", bound=DecodePlan)


def plan_decode(
    plan_class: type[PlanT],
    operator: DecodeOperator,
    tensors: Mapping[str, Any],
    options: DecodeOptions,
    *,
    runtime: Runtime | None,
    device_facts: DeviceFacts | str | None,
) -> PlanT:
    """The plan for a call's ``tensors`` by name, scales among them, and its other ``options``."""
    rt, facts, arguments = runtime_of(runtime), check_device_facts(device_facts), dict(tensors)
    named, of_torch = _checked(operator, options), is_torch(arguments["q"])
    if facts is not None:
        describe_tensors(arguments)
    options = operator.options_type(**{**_split_scales(operator, arguments), **named})
    call = DecodeCall(operator.read(arguments, options), options)
    return _plan(plan_class, operator, rt.for_plans, call, facts, of_torch)


def run_decode(
    plan_class: type[DecodePlan],
    operator: DecodeOperator,
    tensors: Mapping[str, Any],
    options: DecodeOptions,
    *,
    workspace: Any,
    stream: Stream | None,
    runtime: Runtime | None,
) -> Any:
    """Run a call with ``tensors`` and ``options`` as in ``plan_decode``; the output.

    The plan comes from the runtime's cache or is made now. Its bound is the next power of two, as far as the page table
    goes, so one plan serves while lengths grow.
    """
    rt, arguments = runtime_of(runtime), dict(tensors)
    q, named = arguments["q"], _checked(operator, options)
    scales = _split_scales(operator, arguments)
    if arguments["out"] is None:
        arguments["out"] = _made_output(operator, rt, q)
    handle = stream_of(rt, stream, q, "q")
    workspace = None if workspace is RUNTIME_SCRATCH else workspace
    if workspace is not None and workspace is not TORCH_SCRATCH:
        check_workspace(workspace)
    most = operator.max_queries
    if most is not None and named["max_q_len"] is None and arguments["q_cu_seq_lens"] is not None:
        named["max_q_len"] = _longest(rt, q, arguments["q_cu_seq_lens"], handle, most)
    bound = named["max_seq_len"]
    shortest, kept = shared_bounds(bound)
    options = operator.options_type(**{**scales, **named})
    family = _family(plan_class, operator, rt, operator.read(arguments, options), options, is_torch(q), kept)
    plan = family.plan(family.tensors, options.max_q_len)
    family.tensors.check_addresses()
    numbers = plan.numbers(bound, *factors_of(scales))
    launched = family.launch(plan, family.tensors.addresses, numbers, workspace, q, handle)
    note_launch(launched._replace(bounds=(shortest, plan.options.max_seq_len), family=family))
    return arguments["out"]


def _family(
    plan_class: type[DecodePlan],
    operator: DecodeOperator,
    runtime: Runtime,
    tensors: CallTensors,
    options: DecodeOptions,
    of_torch: bool,
    kept: int,
) -> CallFamily[DecodePlan]:
    """The calls that differ from one in sizes alone, whose plans are from the cache or made now."""
    form = (operator.name, kept, *[getattr(options, name) for name in operator.options if name != Q_LEN_BOUND])
    plans, own = runtime.plans, runtime.for_plans  # the runtime may keep the function below

    def plan(of: CallTensors, max_q_len: int | None) -> DecodePlan:
        def planned() -> DecodePlan:
            call = DecodeCall(of, options)
            if of is not tensors:
                bound = min(options.max_seq_len, operator.capacity(call))
                if (bound, max_q_len) != (options.max_seq_len, options.max_q_len):
                    call = DecodeCall(of, replace(options, max_seq_len=bound, max_q_len=max_q_len))
            return _plan(plan_class, operator, own, call, None, of_torch, kept)

        cached: DecodePlan = plans.get((form, max_q_len, of.specs), planned)
        return cached

    return CallFamily(own, tensors, form, plan, options.max_q_len)


@cache
def _checks(options_type: type[Any], names: tuple[str, ...]) -> tuple[OptionCheck, ...]:
    kinds = {member.name: str(member.type) for member in fields(options_type)}
    return option_checks({name: kinds[name] for name in ("max_seq_len", *names)})


def _checked(operator: DecodeOperator, options: DecodeOptions) -> dict[str, Any]:
    """The bound and the options that are no scales by name; raises ``UsageError`` for one of another kind."""
    named = {name: getattr(options, name) for name in ("max_seq_len", *operator.options)}
    check_options(operator.checks, named)
    return named


def _plan(
    plan_class: type[PlanT],
    operator: DecodeOperator,
    runtime: PlanRuntime,
    call: DecodeCall,
    device_facts: DeviceFacts | None,
    of_torch: bool,
    kept_bound: int | None = None,
) -> PlanT:
    """The plan, checked first; ``kept_bound`` raises the bound as far as the page table goes."""
    operator.check(call)
    options = call.options
    bound = options.max_seq_len
    if kept_bound is not None:
        bound = min(operator.capacity(call), kept_bound)
    device = device_facts or runtime.driver.device(call.q.device)
    resolve_backend(operator.name, options.backend, device)
    # A window wider than all keys hides nothing more, and a position less a window fits an int32.
    widest = options.keys_of_all_ranks(bound)
    if bound != options.max_seq_len or options.window_left > widest:
        options = replace(options, max_seq_len=bound, window_left=min(options.window_left, widest))
        call = DecodeCall(call.tensors, options)
    launches = operator.launches(call, device, runtime.native_release())
    return plan_class(runtime, operator, call.tensors, options, launches, of_torch=of_torch)


def _split_scales(operator: DecodeOperator, arguments: dict[str, Any]) -> dict[str, float]:
    """The scales' numbers by name, 1 where the device has one; in ``arguments`` only those on the device are left."""
    number, tensor = split_scale(arguments["softmax_scale"], "softmax_scale")
    arguments["softmax_scale"] = tensor
    if number is None:
        number = 1.0 if tensor is not None else operator.scale(view_of(arguments["q"], "q").shape)
    scales = {"softmax_scale": number}
    for name in ("output_scale", *operator.kv_scales):
        factor, arguments[name] = split_scale(arguments[name], name)
        scales[name] = 1.0 if factor is None else factor
    return scales


def factors_of(scales: Mapping[str, float]) -> tuple[float, float]:
    """The factors of scores and output, from scales by name; those of keys and values are parts of them."""
    keys, values = (scales.get(name, 1.0) for name in KV_SCALES)
    return scales["softmax_scale"] * keys, scales["output_scale"] * values


def default_scale(shape: tuple[int, ...]) -> float:
    """1 / sqrt(head_dim); the rules refuse what has no head_dim."""
    return 1 / math.sqrt(shape[-1]) if shape and shape[-1] else 1.0


def _made_output(operator: DecodeOperator, runtime: Runtime, q: Any) -> Any:
    """An output for ``q``.

    Raises:
        UsageError: an output cannot be made from a tensor like ``q``.
    """
    shape, dtype = operator.output(view_of(q, "q"))
    try:
        return runtime.memory.empty(q, shape, dtype)
    except UsageError as error:
        raise UsageError(f"out: None, expected a tensor ({error})") from error


def _longest(runtime: Runtime, q: Any, q_cu_seq_lens: Any, stream: Any, most: int) -> int:
    """The most query tokens of a request, read back from the device.

    Raises:
        UsageError: q_cu_seq_lens is not what it should be or cannot be read, or a request has too many.
    """
    view, tokens = view_of(q_cu_seq_lens, "q_cu_seq_lens"), prod(view_of(q, "q").shape[:-2])
    check_query_bounds(view)
    driver = runtime.driver
    with driver.using(driver.context_on(view.device)):
        if driver.is_capturing(stream_handle(stream)):
            raise UsageError("max_q_len: None while a stream captures, expected the bound")
    try:
        bounds = runtime.memory.to_host(q_cu_seq_lens)
    except UsageError as error:
        raise UsageError(f"max_q_len: None, expected the bound ({error})") from error
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens:
        came = f"from {bounds[0]} to {bounds[-1]}" if bounds else "empty"
        raise UsageError(f"q_cu_seq_lens: {came}, expected from 0 to q's {tokens} tokens")
    for before, after in pairwise(bounds):
        if after < before:
            raise UsageError(f"q_cu_seq_lens: {before} is followed by {after}, expected none to decrease")
        if after - before > most:
            raise UsageError(f"q_cu_seq_lens: a request of {after - before} query tokens, expected at most {most}")
    return max((after - before for before, after in pairwise(bounds)), default=0) or 1
