"""What a user calls: checks, plans and operators on paged attention."""

from ..tensor import TensorView, view_of
from .append_kv import AppendKvPlan, append_kv, plan_append_kv
from .backends import BackendError
from .context_attention import ContextAttentionPlan, context_attention, plan_context_attention
from .merge_states import MergeStatesPlan, merge_states, plan_merge_states
from .mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
from .operator_plan import ClampedInputError
from .paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
from .process import default_runtime, set_default_runtime
from .runtime import Runtime, RuntimeStats

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
