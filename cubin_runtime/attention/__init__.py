"""What a user calls: checks, plans and operators on paged attention."""

from ..protocols import Stream
from ..tensor import Tensor, TensorView, view_of
from .backends import BackendError
from .mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
from .operator_plan import ClampedInputError
from .paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
from .process import default_runtime, set_default_runtime
from .runtime import Runtime, RuntimeStats

__all__ = [
    "BackendError",
    "ClampedInputError",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "RuntimeStats",
    "Stream",
    "Tensor",
    "TensorView",
    "default_runtime",
    "mla_decode",
    "paged_decode",
    "plan_mla_decode",
    "plan_paged_decode",
    "set_default_runtime",
    "view_of",
]


def __dir__() -> list[str]:
    return __all__
