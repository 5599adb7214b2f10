"""The kernels of KV append and of merging, as a release of ours would list them."""

from __future__ import annotations

from cubin_runtime.artifacts.tables.native_kernels import MEASURED, NativeKernel
from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.kernels.native.layouts import LAYOUTS
from kernels_src.variants import VARIANTS, Variant

_THREADS = {"append_kv": CONSTANTS.append_threads, "merge_states": CONSTANTS.merge_threads}


def described(variant: Variant) -> NativeKernel:
    layout = LAYOUTS[variant.struct]
    return NativeKernel(
        name=variant.name,
        symbol=variant.symbol,
        file=variant.file,
        sm=variant.sm,
        family=variant.family,
        operation=variant.operation,
        traits=dict(variant.traits),
        struct=variant.struct,
        struct_bytes=layout.size,
        struct_fingerprint=layout.fingerprint,
        threads=_THREADS[variant.operation],
        dynamic_shared_bytes=0,
        static_shared_bytes=0,
        registers=48,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=MEASURED,
    )


COPYING_VARIANTS = tuple(variant for variant in VARIANTS if variant.operation in _THREADS)
KERNELS = tuple(map(described, COPYING_VARIANTS))
