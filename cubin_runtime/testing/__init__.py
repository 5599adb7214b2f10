"""Test a kernel without a serving stack: devices, data, references and tolerances; ``plugin`` has pytest's fixtures.

Needs numpy, but for ``require_module``. What is here is imported when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import DecodeCase, mla_case, paged_case
    from .compare import assert_attention_close, assert_lse_close
    from .cubin_under_test import CubinUnderTest
    from .device import Device, missing_device
    from .first_device import on_first_device
    from .graph_driver import GraphDriver
    from .requirements import require_module
    from .standin import StandIn, build_standin
    from .standin_device import StandInDevice
    from .values import from_bits, to_bits

_MODULES = {
    "CubinUnderTest": "cubin_under_test",
    "DecodeCase": "cases",
    "Device": "device",
    "GraphDriver": "graph_driver",
    "StandIn": "standin",
    "StandInDevice": "standin_device",
    "assert_attention_close": "compare",
    "assert_lse_close": "compare",
    "build_standin": "standin",
    "from_bits": "values",
    "missing_device": "device",
    "mla_case": "cases",
    "on_first_device": "first_device",
    "paged_case": "cases",
    "require_module": "requirements",
    "to_bits": "values",
}

__all__ = [
    "CubinUnderTest",
    "DecodeCase",
    "Device",
    "GraphDriver",
    "StandIn",
    "StandInDevice",
    "assert_attention_close",
    "assert_lse_close",
    "build_standin",
    "from_bits",
    "missing_device",
    "mla_case",
    "on_first_device",
    "paged_case",
    "require_module",
    "to_bits",
]


if not TYPE_CHECKING:  # a name that is not there is an error of type checkers

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return __all__
