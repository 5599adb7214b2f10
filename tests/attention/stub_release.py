"""A release of decode kernels that do nothing: every dtype and head dimension, for what reaches the parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.mla.select import COLUMNS
from kernels_src.build import build
from kernels_src.kernel_cache import kernel_cache
from kernels_src.toolchain import find_toolchain
from kernels_src.variants import VARIANTS, Variant
from tests.attention.attention_examples import RELEASE_NAME, pin_release
from tests.kernels.copying_kernels import COPYING_VARIANTS

SOURCE = """
#include "PagedDecodeTmaParams.h"
extern "C" __global__ void __launch_bounds__(160) KERNEL_NAME(const __grid_constant__ PagedDecodeTmaParams p) {
    asm volatile("// dynamic shared bytes: 102400");
    if (p.batch < 0) *static_cast<int*>(p.status) = p.q_len;
}
"""


MLA_SOURCE = SOURCE.replace("PagedDecodeTmaParams", "PagedMlaDecodeParams").replace("102400", "99328")


def mla_stub_variant(dtype: str, q_dtype: str, columns: tuple[int, int], sm: str = "90a") -> Variant:
    """An MLA kernel with the traits of a real one."""
    latent, rope = columns
    return Variant(
        source="mla/stub.cu",
        symbol=f"stub_paged_mla_decode_{dtype}_q_{q_dtype}_latent{latent}{'' if rope == 64 else f'_rope{rope}'}",
        sm=sm,
        operation="paged_mla_decode",
        struct="PagedMlaDecodeParams",
        traits={
            "dtype": dtype,
            "q_dtypes": q_dtype,
            "latent": latent,
            "rope": rope,
            "rows": 64,
            "tile_tokens": 64,
            "box_columns": 64,
            "swizzle": "none" if dtype == "e4m3" else "128B",
        },
    )


SPARSE_MLA_SOURCE = SOURCE.replace("PagedDecodeTmaParams", "SparseMlaDecodeParams").replace("p.q_len", "p.width")
E4M3_SOURCE = SOURCE.replace("PagedDecodeTmaParams", "PagedDecodeTmaE4m3Params")
CONTEXT_SOURCE = SOURCE.replace("PagedDecodeTmaParams", "ContextAttentionParams")
CONTEXT_E4M3_SOURCE = SOURCE.replace("PagedDecodeTmaParams", "ContextAttentionE4m3Params")


def context_stub_variant(
    dtype: str, head_dim: int, soft_cap: bool, segments: bool = False, e4m3: bool = False
) -> Variant:
    """A context attention kernel for sm_90a with the traits of a real one."""
    options = f"{'_soft_cap' * soft_cap}{'_segments' * segments}"
    return Variant(
        source=f"prefill/stub{'_e4m3' * e4m3}.cu",
        symbol=f"stub_context_attention_{dtype}{'_over_e4m3' * e4m3}_d{head_dim}{options}",
        sm="90a",
        operation="context_attention",
        struct="ContextAttentionE4m3Params" if e4m3 else "ContextAttentionParams",
        traits={
            "dtype": dtype,
            "kv_dtype": "e4m3" if e4m3 else dtype,
            "head_dim": head_dim,
            "rows": 128,
            "tile_tokens": 128,
            "soft_cap": soft_cap,
            "segments": segments,
        },
    )


def stub_variant(dtype: str, head_dim: int, rows: int) -> Variant:
    """A kernel for sm_90a with the traits of a real one."""
    e4m3 = dtype == "e4m3"
    return Variant(
        source=f"fmha/stub{'_e4m3' * e4m3}.cu",
        symbol=f"stub_paged_decode_{dtype}_d{head_dim}_rows{rows}",
        sm="90a",
        operation="paged_decode",
        struct="PagedDecodeTmaE4m3Params" if e4m3 else "PagedDecodeTmaParams",
        traits={
            "dtype": dtype,
            "q_dtypes": "bf16,fp16,e4m3" if e4m3 else dtype,
            "head_dim": head_dim,
            "rows": rows,
            "tile_tokens": 64,
            "ctas_per_multiprocessor": 2,
            "tma": True,
            "arithmetic": "warps" if rows < 64 else f"warpgroups of {rows} rows",
        },
    )


def build_stub_release(folder: Path) -> tuple[Path, Path]:
    """The tree with the stubs, and the pin file that trusts it."""
    sources = folder / "sources"
    texts = {"fmha/stub.cu": SOURCE, "mla/stub.cu": MLA_SOURCE, "prefill/stub.cu": CONTEXT_SOURCE}
    texts |= {"fmha/stub_e4m3.cu": E4M3_SOURCE, "prefill/stub_e4m3.cu": CONTEXT_E4M3_SOURCE}
    for source, text in texts.items():
        (sources / source).parent.mkdir(parents=True, exist_ok=True)
        (sources / source).write_text(text)
    variants = [stub_variant(dtype, 128, rows) for dtype in ("bf16", "fp16", "e4m3") for rows in (8, 16)]
    variants += [stub_variant("bf16", 512, 8), stub_variant("bf16", 64, 64)]
    # A source for each struct.
    conversions = [v for v in VARIANTS if v.operation == "cache_conversion"]
    copying = [replace(v, source=v.source.replace(".cu", f"_{v.struct}.cu")) for v in (*COPYING_VARIANTS, *conversions)]
    for variant in copying:
        (sources / variant.source).parent.mkdir(exist_ok=True)
        text = SOURCE.replace("PagedDecodeTmaParams", variant.struct).replace("p.batch", "p.tokens")
        (sources / variant.source).write_text(re.sub(r"\*static_cast<int\*>.*", "__trap();", text))
    variants += copying
    variants += [replace(v, source="mla/sparse_stub.cu") for v in VARIANTS if v.operation == "sparse_mla_decode"]
    (sources / "mla/sparse_stub.cu").write_text(SPARSE_MLA_SOURCE)
    types = (("bf16", "bf16"), ("e4m3", "bf16"), ("e4m3", "e4m3"))
    variants += [mla_stub_variant(*own, columns) for own in types for columns in COLUMNS]
    apart = next(v for v in VARIANTS if v.struct == "PagedMlaDecodeValuesParams")
    variants.append(replace(apart, source="mla/values_stub.cu"))
    (sources / "mla/values_stub.cu").write_text(MLA_SOURCE.replace("PagedMlaDecodeParams", apart.struct))
    variants += [mla_stub_variant("e4m3", "e4m3", (latent, 64), "120") for latent in (512, 256)]
    switches = (False, True)
    variants += [context_stub_variant("bf16", 128, cap, segments) for cap in switches for segments in switches]
    variants += [context_stub_variant("bf16", 192, False)]
    variants += [context_stub_variant("bf16", 128, False, segments, e4m3=True) for segments in switches]
    build(
        folder / "tree",
        variants,
        LAYOUTS,
        find_toolchain(),
        sources=sources,
        release=RELEASE_NAME,
        jobs=2,
        cache=kernel_cache(),
    )
    return folder / "tree", pin_release(folder)
