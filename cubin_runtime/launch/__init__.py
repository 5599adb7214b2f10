"""The layer on the CUDA driver: structs, descriptors, the ABI gate, modules and launches; no network.

What users need of it is in ``__all__`` and imported when its name is first used; its modules are internal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "cubin_runtime launches kernels from parameter blocks that are thread-safe only with the global interpreter "
        "lock, which is disabled in this process: start a free-threaded Python with -X gil=1 or PYTHON_GIL=1"
    )

if TYPE_CHECKING:
    from .driver import DeviceFacts
    from .history import LaunchRecord
    from .plan import LaunchAttributes, LaunchPlan
    from .structs import Field, StructLayout

_MODULES = {
    "DeviceFacts": "driver",
    "Field": "structs",
    "LaunchAttributes": "plan",
    "LaunchPlan": "plan",
    "LaunchRecord": "history",
    "StructLayout": "structs",
}

__all__ = ["DeviceFacts", "Field", "LaunchAttributes", "LaunchPlan", "LaunchRecord", "StructLayout"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
