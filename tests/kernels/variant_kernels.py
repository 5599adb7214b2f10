"""Variants that were not built, as a release of ours would list them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.layouts import LAYOUTS
from kernels_src.variants import Variant


def kernel_of(variant: Variant, struct: str = "", **changes: Any) -> NativeKernel:
    """An entry of kernels.json with made-up facts of its cubin, which ``changes`` replace; ``struct``: another one."""
    layout = LAYOUTS[struct or variant.struct]
    made = NativeKernel(
        name=variant.name,
        symbol=variant.symbol,
        file=variant.file,
        sm=variant.sm,
        family=variant.family,
        operation=variant.operation,
        traits=dict(variant.traits),
        struct=layout.name,
        struct_bytes=layout.size,
        struct_fingerprint=layout.fingerprint,
        threads=384,
        dynamic_shared_bytes=102400,
        static_shared_bytes=0,
        registers=128,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=variant.status,
    )
    return replace(made, **changes)
