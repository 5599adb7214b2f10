"""A release's MLA decode kernels for the tests."""

from __future__ import annotations

from dataclasses import replace

from cubin_runtime.artifacts.tables.native_kernels import BUILT_NOT_RUN, MEASURED, NativeKernel


def kernel(latent: int = 512, rows: int = 64, rope: int = 64) -> NativeKernel:
    name = f"mla_latent{latent}{'' if rope == 64 else f'_rope{rope}'}_rows{rows}"
    return NativeKernel(
        name=f"{name}_sm90a",
        symbol=name,
        file=f"mla/{name}_sm90a.cubin",
        sm="90a",
        family="mla",
        operation="paged_mla_decode",
        traits={
            "dtype": "bf16",
            "latent": latent,
            "rope": rope,
            "rows": rows,
            "tile_tokens": 64,
            "box_columns": 64,
            "swizzle": "128B",
        },
        struct="PagedMlaDecodeParams",
        struct_bytes=384,
        struct_fingerprint="0" * 64,
        threads=384,
        dynamic_shared_bytes=223232,
        static_shared_bytes=0,
        registers=168,
        spill_bytes=0,
        flags=(),
        sources_sha256="0" * 64,
        status=MEASURED,
    )


WIDE = tuple(kernel(latent) for latent in (512, 256))
FEW = tuple(kernel(latent, 16) for latent in (512, 256))
KERNELS = (*WIDE, *FEW)
# For rows without rope columns, and narrow ones.
OTHER_COLUMNS = tuple(kernel(*columns) for columns in ((512, 64, 0), (512, 16, 0), (256, 64, 32), (128, 64, 32)))


# For values that do not lie in their keys.
SEPARATE = replace(
    kernel(),
    name="mla_separate_values_sm90a",
    symbol="mla_separate_values",
    file="mla/mla_separate_values_sm90a.cubin",
    struct="PagedMlaDecodeValuesParams",
    traits={
        **kernel().traits,
        "dtype": "e4m3",
        "q_dtypes": "e4m3",
        "swizzle": "64B",
        "separate_values": True,
    },
)


def portable(latent: int, sm: str) -> NativeKernel:
    """A kernel for several SMs, with e4m3 queries and cache and tiles of 32 keys."""
    name = f"mla_portable_latent{latent}"
    wide = kernel(latent)
    return replace(
        wide,
        name=f"{name}_sm{sm}",
        symbol=name,
        file=f"mla/{name}_sm{sm}.cubin",
        sm=sm,
        traits={**wide.traits, "dtype": "e4m3", "q_dtypes": "e4m3", "tile_tokens": 32},
        threads=256,
        dynamic_shared_bytes=99328,
        status=BUILT_NOT_RUN if sm == "120" else MEASURED,
    )


PORTABLE = tuple(portable(latent, sm) for sm in ("90", "120") for latent in (512, 256))
