"""Made-up decode kernels, as a release of ours would list them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubin_runtime.artifacts.tables.native_kernels import BUILT_NOT_RUN, MEASURED, NativeKernel

_HOPPER_ROWS = {32: (16,), 64: (8, 16, 64, 128), 128: (8, 16, 64, 128), 256: (8, 32), 512: (8,)}


def q_dtypes_of(dtype: str, rows: int, q_e4m3: bool) -> str:
    """As shipped: warpgroups of e4m3 caches are for e4m3 queries, or for others."""
    if dtype != "e4m3":
        return dtype
    if q_e4m3:
        return "e4m3"
    return "bf16,fp16" if rows >= 64 else "bf16,fp16,e4m3"


def decode_kernel(
    sm: str = "90a",
    rows: int = 8,
    dtype: str = "bf16",
    head_dim: int = 128,
    tile_tokens: int = 64,
    q_e4m3: bool = False,
    **changes: Any,
) -> NativeKernel:
    symbol = f"decode_{dtype}{'_q_e4m3' if q_e4m3 else ''}_d{head_dim}_rows{rows}"
    resident = 2 if sm == "90a" and rows < 64 else 1
    made = NativeKernel(
        name=f"{symbol}_sm{sm}",
        symbol=symbol,
        file=f"fmha/{symbol}_sm{sm}.cubin",
        sm=sm,
        family="fmha",
        operation="paged_decode",
        traits={
            "dtype": dtype,
            "q_dtypes": q_dtypes_of(dtype, rows, q_e4m3),
            "head_dim": head_dim,
            "rows": rows,
            "tile_tokens": tile_tokens,
            "ctas_per_multiprocessor": resident,
            "tma": sm == "90a",
            "arithmetic": f"warpgroups of {rows} rows" if sm == "90a" and rows >= 64 else "warps",
        },
        struct=f"PagedDecode{'Tma' if sm == '90a' else 'Copy'}{'E4m3' * (dtype == 'e4m3')}Params",
        struct_bytes=448,
        struct_fingerprint="0" * 64,
        threads=160,
        dynamic_shared_bytes=103424 if sm == "90a" else 82944,
        static_shared_bytes=0,
        registers=128,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=MEASURED if sm == "90a" else BUILT_NOT_RUN,
    )
    return replace(made, **changes)


HOPPER = tuple(
    decode_kernel("90a", rows, dtype, head_dim, tile_tokens=128 if rows == 128 else 64)
    for dtype in ("bf16", "fp16", "e4m3")
    for head_dim, all_rows in _HOPPER_ROWS.items()
    for rows in all_rows
    if rows < 128 or dtype != "e4m3"
) + tuple(decode_kernel("90a", rows, "e4m3", head_dim, q_e4m3=True) for head_dim in (64, 128) for rows in (64, 128))
PORTABLE = tuple(decode_kernel(sm, rows) for sm in ("80", "86", "89", "100", "120") for rows in (16, 8))


def segments_kernel(rows: int, head_dim: int, q_dtype: str = "") -> NativeKernel:
    """One that gives the bits of prefill, over e4m3 for queries of ``q_dtype`` if that is given."""
    made = decode_kernel(rows=rows, head_dim=head_dim, dtype="e4m3" if q_dtype else "bf16", tile_tokens=128)
    resident, shared_bytes = 128 // head_dim, made.dynamic_shared_bytes
    if q_dtype:
        resident = 1 if rows == 64 else 3 if (rows, head_dim) == (8, 64) else 2
        shared_bytes = 217088 // resident
    traits = {"arithmetic": "segments", "ctas_per_multiprocessor": resident}
    if q_dtype:
        traits["q_dtypes"] = q_dtype
    return replace(
        made,
        name=f"{made.name}{q_dtype and f'_q_{q_dtype}'}_segments",
        traits={**made.traits, **traits},
        dynamic_shared_bytes=shared_bytes,
    )
