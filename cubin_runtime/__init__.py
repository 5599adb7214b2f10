"""Fetch, verify and launch prebuilt attention kernels; nothing here needs a GPU, torch or libcuda at import.

Operators, plans and the runtime are imported when their names are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import Config
from .errors import CubinRuntimeError

if TYPE_CHECKING:
    from .attention.append import AppendKvPlan, append_kv, plan_append_kv
    from .attention.backends import BackendError
    from .attention.draft_masks import DraftMaskPlan, draft_mask, plan_draft_mask
    from .attention.gqa import PagedDecodePlan, paged_decode, plan_paged_decode
    from .attention.merge import MergeStatesPlan, merge_states, plan_merge_states
    from .attention.mla import MlaDecodePlan, mla_decode, plan_mla_decode
    from .attention.operator_plan import ClampedInputError
    from .attention.prefill import ContextAttentionPlan, context_attention, plan_context_attention
    from .attention.process import default_runtime, set_default_runtime
    from .attention.runtime import Runtime, RuntimeStats
    from .attention.sparse_mla import SparseMlaDecodePlan, plan_sparse_mla_decode, sparse_mla_decode
    from .protocols import Stream
    from .tensor import Tensor, TensorView, view_of

__all__ = [
    "AppendKvPlan",
    "BackendError",
    "ClampedInputError",
    "Config",
    "ContextAttentionPlan",
    "CubinRuntimeError",
    "DraftMaskPlan",
    "MergeStatesPlan",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "RuntimeStats",
    "SparseMlaDecodePlan",
    "Stream",
    "Tensor",
    "TensorView",
    "__version__",
    "append_kv",
    "context_attention",
    "default_runtime",
    "draft_mask",
    "merge_states",
    "mla_decode",
    "paged_decode",
    "plan_append_kv",
    "plan_context_attention",
    "plan_draft_mask",
    "plan_merge_states",
    "plan_mla_decode",
    "plan_paged_decode",
    "plan_sparse_mla_decode",
    "set_default_runtime",
    "sparse_mla_decode",
    "view_of",
]

_MODULES = {"Stream": ".protocols", "Tensor": ".tensor", "TensorView": ".tensor", "view_of": ".tensor"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES.get(name, ".attention"), __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
