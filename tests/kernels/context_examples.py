"""A release's context attention kernels for the tests."""

from __future__ import annotations

from cubin_runtime.artifacts.tables.native_kernels import MEASURED, NativeKernel
from cubin_runtime.kernels.native.prefill.params import CONTEXT_ATTENTION, CONTEXT_ATTENTION_E4M3
from kernels_src.variants import VARIANTS
from tests.kernels.variant_kernels import kernel_of


def kernel(
    dtype: str = "bf16",
    head_dim: int = 128,
    soft_cap: bool = False,
    segments: bool = False,
    e4m3: bool = False,
    split_keys: bool = False,
) -> NativeKernel:
    struct = CONTEXT_ATTENTION_E4M3 if e4m3 else CONTEXT_ATTENTION
    words = {"_soft_cap": soft_cap, "_segments": segments, "_split_keys": split_keys}
    options = "".join(word for word, is_there in words.items() if is_there)
    name = f"context_{dtype}{'_over_e4m3' if e4m3 else ''}_d{head_dim}{options}"
    return NativeKernel(
        name=f"{name}_sm90a",
        symbol=name,
        file=f"prefill/{name}_sm90a.cubin",
        sm="90a",
        family="prefill",
        operation="context_attention",
        traits={
            "dtype": dtype,
            "kv_dtype": "e4m3" if e4m3 else dtype,
            "head_dim": head_dim,
            "value_dim": 128 if head_dim == 192 else head_dim,
            "rows": 192 if head_dim == 64 and not e4m3 else 128,
            "tile_tokens": 64 if head_dim == 256 else 128,
            "soft_cap": soft_cap,
            "segments": segments,
            "split_keys": split_keys,
        },
        struct=struct.name,
        struct_bytes=struct.size,
        struct_fingerprint="0" * 64,
        threads=384,
        dynamic_shared_bytes=200000,
        static_shared_bytes=0,
        registers=168,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=MEASURED,
    )


CONVERSIONS, MERGES = (
    tuple(
        kernel_of(v, threads=256, dynamic_shared_bytes=0, registers=40, status=MEASURED)
        for v in VARIANTS
        if (v.operation, v.sm) == (operation, "90a")
    )
    for operation in ("cache_conversion", "merge_parts")
)
ATTENTION = tuple(
    kernel(dtype, dim, cap, arithmetic == "segments", e4m3, arithmetic == "split keys")
    for e4m3 in (False, True)
    for dtype in ("bf16", "fp16")
    for dim in (64, 128, 192, 256)
    for cap in (False, True)
    for arithmetic in ("", "split keys", *(("segments",) if dim <= 128 else ()))
)
KERNELS = (*CONVERSIONS, *MERGES, *ATTENTION)
