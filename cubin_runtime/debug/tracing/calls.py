"""A run of a plan as a traced call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...attention.decode_call import DecodeCall
from ...attention.hook import Run
from ...attention.operator import CallTensors
from ...attention.operator_plan import OperatorPlan
from ...attention.plain_operator import PlainCall, PlainOperator
from ...kernels.native.problem import LOG2_E
from ...tensor import TensorView
from .append import traced_append
from .context import traced_context
from .decode import traced_decode
from .mla import traced_mla_decode
from .schema import TracedCall

# Operator -> its definition; the others have none.
_DEFINITIONS: Mapping[str, Callable[[Any], TracedCall | str]] = {
    "append_kv": traced_append,
    "context_attention": traced_context,
    "mla_decode": traced_mla_decode,
    "paged_decode": traced_decode,
}


def traced(run: Run) -> TracedCall | str:
    """The call that a run of a plan makes, or the reason why it cannot be traced."""
    plan = run.plan
    if not isinstance(plan, OperatorPlan):
        from .trtllm_gen import traced_trtllm_gen

        return traced_trtllm_gen(run.call)
    define = _DEFINITIONS.get(plan.operator.name)
    return f"{plan.operator.name}: no definition" if define is None else define(_call_of(plan, run))


def _call_of(plan: OperatorPlan, run: Run) -> DecodeCall | PlainCall:
    """The call: the plan's tensors where the run has them, and its options with the run's numbers."""
    views = [
        None if spec is None else TensorView(address, spec.dtype, spec.shape, spec.strides, spec.device)
        for spec, address in zip(plan.specs, run.call, strict=True)
    ]
    tensors = CallTensors(plan.operator.tensors, views)
    if isinstance(plan.operator, PlainOperator):
        scales = zip(plan.operator.scales, run.numbers, strict=True)
        numbers = {name: number for name, number in scales if getattr(plan.options, name) is not None}
        return PlainCall(tensors, replace(plan.options, **numbers))
    bound, scale_log2, output_scale = run.numbers
    # Scales of keys and values are parts of the other two.
    factors = {"softmax_scale": scale_log2 / LOG2_E, "output_scale": output_scale, "k_scale": 1.0, "v_scale": 1.0}
    return DecodeCall(tensors, replace(plan.options, max_seq_len=bound, **factors))
