"""Made-up tensors of an MLA decode: 4 requests, 16 heads, 100 pages of 64 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubin_runtime.attention import TensorView
from cubin_runtime.kernels.native.layouts import LAYOUTS
from tests.kernels.mla_examples import KERNELS

BATCH, HEADS, PAGES, PAGE, COLUMNS = 4, 16, 100, 64, 16
PARAMS = LAYOUTS["PagedMlaDecodeParams"]
E4M3_KERNELS = tuple(
    replace(
        kernel,
        name=kernel.name.replace("mla_", f"mla_{q}_e4m3_"),
        symbol=kernel.symbol.replace("mla_", f"mla_{q}_e4m3_"),
        file=kernel.file.replace("mla_latent", f"mla_{q}_e4m3_latent"),
        traits={**kernel.traits, "dtype": "e4m3", "q_dtypes": q},
    )
    for q in ("bf16", "e4m3")
    for kernel in KERNELS
)


def view(dtype: str, *shape: int, pointer: int = 0x7F0000007000) -> TensorView:
    return TensorView.contiguous(pointer, dtype, shape)


def latent_call(
    *tokens: int,
    heads: int = HEADS,
    latent: int = 512,
    rope: int = 64,
    dtypes: tuple[str, str, str] = ("bfloat16", "bfloat16", "bfloat16"),
    **more: Any,
) -> dict[str, Any]:
    """Tensors by name; ``tokens`` lead in q, ``dtypes`` are of cache, q and out, ``more`` replaces or adds some."""
    lead = tokens or (BATCH,)
    kv, q, out = dtypes
    given = {
        "q": view(q, *lead, heads, latent + rope, pointer=0x7F0000100000),
        "kv_cache": view(kv, PAGES, PAGE, latent + rope, pointer=0x7F0010000000),
        "page_table": view("int32", BATCH, COLUMNS, pointer=0x7F0000002000),
        "seq_lens": view("int32", BATCH, pointer=0x7F0000003000),
        "out": view(out, *lead, heads, latent, pointer=0x7F0000400000),
    }
    return {**given, **more}


def ragged_call(tokens: int = 7, **more: Any) -> dict[str, Any]:
    """With ``tokens`` query tokens over the four requests."""
    return latent_call(tokens, **{"q_cu_seq_lens": view("int32", BATCH + 1, pointer=0x7F0000005000), **more})
