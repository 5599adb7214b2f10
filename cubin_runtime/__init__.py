"""Fetch, verify and launch prebuilt attention kernels; nothing here needs a GPU, torch or libcuda at import.

Everything but errors and ``Config`` is imported when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import Config, Network
from .errors import (
    AbiError,
    CorruptError,
    CubinRuntimeError,
    DeviceError,
    DriverError,
    ExtraError,
    FrozenError,
    MissingError,
    PinError,
    SourceError,
    StoreError,
    UsageError,
    WorkspaceError,
)

if TYPE_CHECKING:
    from .artifacts.api import Artifact, FetchReport, fetch, load, open_library, verify
    from .artifacts.cubins.cubin import Cubin, CubinFormatError, KernelFacts
    from .artifacts.library import Library
    from .artifacts.path import PathError
    from .artifacts.pins.signed_statement import SignatureError
    from .artifacts.verification import VerifyReport
    from .attention.backends import BackendError
    from .attention.operator_plan import ClampedInputError
    from .attention.operators.append_kv import AppendKvPlan, append_kv, plan_append_kv
    from .attention.operators.context_attention import ContextAttentionPlan, context_attention, plan_context_attention
    from .attention.operators.draft_mask import DraftMaskPlan, draft_mask, plan_draft_mask
    from .attention.operators.merge_states import MergeStatesPlan, merge_states, plan_merge_states
    from .attention.operators.mla_decode import MlaDecodePlan, mla_decode, plan_mla_decode
    from .attention.operators.paged_decode import PagedDecodePlan, paged_decode, plan_paged_decode
    from .attention.operators.sparse_mla_decode import SparseMlaDecodePlan, plan_sparse_mla_decode, sparse_mla_decode
    from .attention.runtime import Runtime, RuntimeStats, default_runtime, set_default_runtime
    from .attention.step_plan import BoundStep
    from .kernels.trtllm_gen.errors import PlanRefused, WorkspaceRefused
    from .launch.driver import DeviceFacts
    from .launch.driver_errors import DriverCallError, DriverLibraryError
    from .launch.semaphore_workspace import SemaphoreWorkspace
    from .launch.tensormap import TensorMapError
    from .launch.workspace import Workspace
    from .protocols import Stream
    from .tensor import Tensor, TensorView, view_of

# Modules, each loaded when one of its names is first asked for -> their names.
_MODULES = {
    ".artifacts.api": ("Artifact", "FetchReport", "fetch", "load", "open_library", "verify"),
    ".artifacts.cubins.cubin": ("Cubin", "CubinFormatError", "KernelFacts"),
    ".artifacts.library": ("Library",),
    ".artifacts.path": ("PathError",),
    ".artifacts.pins.signed_statement": ("SignatureError",),
    ".artifacts.verification": ("VerifyReport",),
    ".kernels.trtllm_gen.errors": ("PlanRefused", "WorkspaceRefused"),
    ".launch.driver": ("DeviceFacts",),
    ".launch.driver_errors": ("DriverCallError", "DriverLibraryError"),
    ".launch.semaphore_workspace": ("SemaphoreWorkspace",),
    ".launch.tensormap": ("TensorMapError",),
    ".launch.workspace": ("Workspace",),
    ".protocols": ("Stream",),
    ".tensor": ("Tensor", "TensorView", "view_of"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AbiError",
    "AppendKvPlan",
    "Artifact",
    "BackendError",
    "BoundStep",
    "ClampedInputError",
    "Config",
    "ContextAttentionPlan",
    "CorruptError",
    "Cubin",
    "CubinFormatError",
    "CubinRuntimeError",
    "DeviceError",
    "DeviceFacts",
    "DraftMaskPlan",
    "DriverCallError",
    "DriverError",
    "DriverLibraryError",
    "ExtraError",
    "FetchReport",
    "FrozenError",
    "KernelFacts",
    "Library",
    "MergeStatesPlan",
    "MissingError",
    "MlaDecodePlan",
    "Network",
    "PagedDecodePlan",
    "PathError",
    "PinError",
    "PlanRefused",
    "Runtime",
    "RuntimeStats",
    "SemaphoreWorkspace",
    "SignatureError",
    "SourceError",
    "SparseMlaDecodePlan",
    "StoreError",
    "Stream",
    "Tensor",
    "TensorMapError",
    "TensorView",
    "UsageError",
    "VerifyReport",
    "Workspace",
    "WorkspaceError",
    "WorkspaceRefused",
    "__version__",
    "append_kv",
    "context_attention",
    "default_runtime",
    "draft_mask",
    "fetch",
    "load",
    "merge_states",
    "mla_decode",
    "open_library",
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
    "verify",
    "view_of",
]


if not TYPE_CHECKING:  # a name that is not there is an error of type checkers

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_MODULE_OF.get(name, ".attention"), __name__), name)
        return value


def __dir__() -> list[str]:
    return __all__
