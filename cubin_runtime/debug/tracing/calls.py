"""A run of a plan as a traced call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...attention.hook import Run
from ...attention.operator import CallTensors
from ...attention.operator_plan import OperatorPlan
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


def _call_of(plan: OperatorPlan, run: Run) -> Any:
    """The call: the plan's tensors where the run has them, and its options with the run's numbers."""
    views = [
        None if spec is None else TensorView(address, *spec) for spec, address in zip(plan.specs, run.call, strict=True)
    ]
    operator = plan.operator
    return operator.call(CallTensors(operator.tensors, views), operator.options_of_run(plan.options, run.numbers))
