"""The key of a call in the plan cache: its form and a rounded bound on its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from ...kernels.trtllm_gen.arguments import OutScales, Sage, Scale
from ...kernels.trtllm_gen.arithmetic import INT32_MAX
from ...kernels.trtllm_gen.call import Call
from ...kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall
from ...tensor import TensorView
from ..runtime import shared_bounds

CallT = TypeVar("CallT", bound=Call)
_FORM_FIELDS: Mapping[type[Call], tuple[str, ...]] = {
    kind: tuple(member.name for member in fields(kind) if member.name != "max_kv")
    for kind in (DecodeCall, ContextCall, RaggedCall)
}


def bound_of(call: Call) -> int:
    """The bound on the keys, rounded up to a power of two but not over the call's capacity."""
    if not 1 <= call.max_kv <= INT32_MAX:
        return call.max_kv  # for the checks to refuse
    return min(shared_bounds(call.max_kv)[1], INT32_MAX if call.capacity is None else call.capacity)


def bounds_of(call: Call) -> tuple[int, int]:
    """A range of bounds on the keys that ``bound_of`` rounds alike, the call's among them."""
    least, rounded = shared_bounds(call.max_kv)
    return max(1, least), INT32_MAX if bound_of(call) < rounded else rounded


def bounded(call: CallT) -> CallT:
    """``call`` with the rounded bound, for which its plan is made."""
    bound = bound_of(call)
    return call if bound == call.max_kv else replace(call, max_kv=bound)


def plan_key(call: Call) -> tuple[object, ...]:
    """The values that a plan depends on: shapes, strides, dtypes, options, rounded bound; no address and no scale."""
    parts = [_form(getattr(call, name)) for name in _FORM_FIELDS[type(call)]]
    return (type(call), bound_of(call), call.shares_pool, *parts)


def _form(value: object) -> object:
    if isinstance(value, TensorView):
        return value.spec
    if isinstance(value, Scale):
        return value.pointer != 0
    if isinstance(value, OutScales):
        return (_form(value.scales), value.block)
    if isinstance(value, Sage):
        return (tuple(_form(scale) for scale in value.scales), value.blocks)
    return value
