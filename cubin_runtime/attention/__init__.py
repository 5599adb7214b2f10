"""What a user calls: checks, plans and operators on paged attention."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..protocols import Stream
from ..tensor import Tensor, TensorView, view_of
from .backends import BackendError
from .mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
from .operator_plan import ClampedInputError
from .paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
from .process import default_runtime, set_default_runtime
from .runtime import Runtime, RuntimeStats

if TYPE_CHECKING:
    from .append import AppendKvPlan, append_kv, plan_append_kv
    from .merge import MergeStatesPlan, merge_states, plan_merge_states
    from .prefill import ContextAttentionPlan, context_attention, plan_context_attention

# Names of operators that not every program needs -> their modules, which are loaded when a name is first asked for.
_LATER = {
    **dict.fromkeys(("AppendKvPlan", "append_kv", "plan_append_kv"), "append"),
    **dict.fromkeys(("MergeStatesPlan", "merge_states", "plan_merge_states"), "merge"),
    **dict.fromkeys(("ContextAttentionPlan", "context_attention", "plan_context_attention"), "prefill"),
}

__all__ = [
    "AppendKvPlan",
    "BackendError",
    "ClampedInputError",
    "ContextAttentionPlan",
    "MergeStatesPlan",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "RuntimeStats",
    "Stream",
    "Tensor",
    "TensorView",
    "append_kv",
    "context_attention",
    "default_runtime",
    "merge_states",
    "mla_decode",
    "paged_decode",
    "plan_append_kv",
    "plan_context_attention",
    "plan_merge_states",
    "plan_mla_decode",
    "plan_paged_decode",
    "set_default_runtime",
    "view_of",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
