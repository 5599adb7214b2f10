"""The demo's decode: planned from metadata, shown field by field, launched where there is a GPU."""

from __future__ import annotations

from demo_text import detail

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.pins import Pin


def plan_and_launch(library: Library, pin: Pin) -> None:
    """Plan a decode with the kernels of ``pin`` and launch it if a device is there."""
    detail(f"no operator plans with {pin.name} yet")
