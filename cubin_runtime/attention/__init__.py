"""What a user calls: checks, plans and operators on paged attention."""

from ..tensor import TensorView, view_of
from .backends import BackendError
from .context_attention import ContextAttentionPlan, context_attention, plan_context_attention
from .mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
from .operator_plan import ClampedInputError
from .paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
from .process import default_runtime, set_default_runtime
from .runtime import Runtime, RuntimeStats

__all__ = [
    "BackendError",
    "ClampedInputError",
    "ContextAttentionPlan",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "RuntimeStats",
    "TensorView",
    "context_attention",
    "default_runtime",
    "mla_decode",
    "paged_decode",
    "plan_context_attention",
    "plan_mla_decode",
    "plan_paged_decode",
    "set_default_runtime",
    "view_of",
]
