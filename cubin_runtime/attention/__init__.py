"""What a user calls: checks, plans and operators on paged attention."""

from .backends import BackendError
from .decode import paged_decode, plan_paged_decode
from .decode_plan import PagedDecodePlan
from .launched_plan import ClampedInputError
from .mla import MlaDecodePlan, mla_decode, plan_mla_decode
from .runtime import Runtime, default_runtime, set_default_runtime
from .views import TensorView, view_of

__all__ = [
    "BackendError",
    "ClampedInputError",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "TensorView",
    "default_runtime",
    "mla_decode",
    "paged_decode",
    "plan_mla_decode",
    "plan_paged_decode",
    "set_default_runtime",
    "view_of",
]
