"""Fetch, verify and launch prebuilt attention kernels; nothing here needs a GPU, torch or libcuda at import.

Everything but errors and ``Config`` is imported when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import attention
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
    from .attention import *  # noqa: F403  # the names of its __all__
    from .kernels.trtllm_gen.errors import PlanRefused, WorkspaceRefused
    from .launch.driver import DeviceFacts
    from .launch.driver_errors import DriverCallError, DriverLibraryError
    from .launch.tensormap import TensorMapError

# Modules, each loaded when one of its names is first asked for -> their names; those of `attention` are its own.
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
    ".launch.tensormap": ("TensorMapError",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AbiError",
    "Artifact",
    "Config",
    "CorruptError",
    "Cubin",
    "CubinFormatError",
    "CubinRuntimeError",
    "DeviceError",
    "DeviceFacts",
    "DriverCallError",
    "DriverError",
    "DriverLibraryError",
    "ExtraError",
    "FetchReport",
    "FrozenError",
    "KernelFacts",
    "Library",
    "MissingError",
    "Network",
    "PathError",
    "PinError",
    "PlanRefused",
    "SignatureError",
    "SourceError",
    "StoreError",
    "TensorMapError",
    "UsageError",
    "VerifyReport",
    "WorkspaceError",
    "WorkspaceRefused",
    "__version__",
    "fetch",
    "load",
    "open_library",
    "verify",
]
__all__ += attention.__all__


if not TYPE_CHECKING:  # a name that is not there is an error of type checkers

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_MODULE_OF.get(name, ".attention"), __name__), name)
        return value


def __dir__() -> list[str]:
    return __all__
