"""The kernels of KV append, of merging and of draft masks, as a release of ours would list them."""

from __future__ import annotations

from cubin_runtime.artifacts.tables.native_kernels import MEASURED
from cubin_runtime.kernels.native.constants import CONSTANTS
from kernels_src.variants import VARIANTS
from tests.kernels.variant_kernels import kernel_of

_THREADS = {
    "append_kv": CONSTANTS.append_threads,
    "merge_states": CONSTANTS.merge_threads,
    "draft_mask": CONSTANTS.draft_mask_threads,
}


COPYING_VARIANTS = tuple(variant for variant in VARIANTS if variant.operation in _THREADS and variant.sm == "90a")
KERNELS = tuple(
    kernel_of(v, threads=_THREADS[v.operation], dynamic_shared_bytes=0, registers=48, status=MEASURED)
    for v in COPYING_VARIANTS
)
