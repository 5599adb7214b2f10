"""The operators that users call: paged attention, its checks and its plans."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..launch.workspace import SemaphoreWorkspace, Workspace
    from ..protocols import Stream
    from ..tensor import Tensor, TensorView, view_of
    from .backends import BackendError
    from .operator_plan import ClampedInputError
    from .operators.append_kv import AppendKvPlan, append_kv, plan_append_kv
    from .operators.context_attention import ContextAttentionPlan, context_attention, plan_context_attention
    from .operators.draft_mask import DraftMaskPlan, draft_mask, plan_draft_mask
    from .operators.merge_states import MergeStatesPlan, merge_states, plan_merge_states
    from .operators.mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
    from .operators.paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
    from .operators.sparse_mla_decode import SparseMlaDecodePlan, plan_sparse_mla_decode, sparse_mla_decode
    from .runtime import Runtime, RuntimeStats, default_runtime, set_default_runtime
    from .step_plan import BoundStep

# Modules, each loaded when one of its names is first asked for -> their names.
_MODULES = {
    "..launch.workspace": ("SemaphoreWorkspace", "Workspace"),
    "..protocols": ("Stream",),
    "..tensor": ("Tensor", "TensorView", "view_of"),
    ".backends": ("BackendError",),
    ".operator_plan": ("ClampedInputError",),
    ".operators.append_kv": ("AppendKvPlan", "append_kv", "plan_append_kv"),
    ".operators.context_attention": ("ContextAttentionPlan", "context_attention", "plan_context_attention"),
    ".operators.draft_mask": ("DraftMaskPlan", "draft_mask", "plan_draft_mask"),
    ".operators.merge_states": ("MergeStatesPlan", "merge_states", "plan_merge_states"),
    ".operators.mla_decode": ("MlaDecodePlan", "mla_decode", "plan_mla_decode"),
    ".operators.paged_decode": ("PagedDecodePlan", "paged_decode", "plan_paged_decode"),
    ".operators.sparse_mla_decode": ("SparseMlaDecodePlan", "plan_sparse_mla_decode", "sparse_mla_decode"),
    ".runtime": ("Runtime", "RuntimeStats", "default_runtime", "set_default_runtime"),
    ".step_plan": ("BoundStep",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AppendKvPlan",
    "BackendError",
    "BoundStep",
    "ClampedInputError",
    "ContextAttentionPlan",
    "DraftMaskPlan",
    "MergeStatesPlan",
    "MlaDecodePlan",
    "PagedDecodePlan",
    "Runtime",
    "RuntimeStats",
    "SemaphoreWorkspace",
    "SparseMlaDecodePlan",
    "Stream",
    "Tensor",
    "TensorView",
    "Workspace",
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


if not TYPE_CHECKING:  # a name that is not there is an error of type checkers

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return __all__
