"""The package's arrays for tests, by the name that tests know them by."""

from __future__ import annotations

from cubin_runtime.testing.device import GUARD, POISON, DeviceArrays

__all__ = ["GUARD", "POISON", "DeviceArrays"]
