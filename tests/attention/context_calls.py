"""Made-up tensors of a context attention: 3 requests, 8 query heads over 2 KV heads."""

from __future__ import annotations

from typing import Any

from cubin_runtime.attention import TensorView

BATCH, HEADS, KV_HEADS, DIM = 3, 8, 2, 128
TOKENS, KV_TOKENS = 300, 900
PAGES, PAGE, COLUMNS = 100, 64, 16


def view(dtype: str, *shape: int, pointer: int = 0x7F0000007000) -> TensorView:
    return TensorView.contiguous(pointer, dtype, shape)


def ragged_call(dtype: str = "bfloat16", dim: int = DIM, *, kv_dtype: str | None = None, **more: Any) -> dict[str, Any]:
    """Tensors by name, ragged queries and keys, those of ``dtype`` too; ``more`` replaces or adds some."""
    kv_dtype = kv_dtype or dtype
    columns = 128 if dim == 192 else dim
    given = {
        "q": view(dtype, TOKENS, HEADS, dim, pointer=0x7F0000100000),
        "k": view(kv_dtype, KV_TOKENS, KV_HEADS, dim, pointer=0x7F0010000000),
        "v": view(kv_dtype, KV_TOKENS, KV_HEADS, columns, pointer=0x7F0020000000),
        "out": view(dtype, TOKENS, HEADS, columns, pointer=0x7F0000900000),
        "q_cu_seq_lens": view("int32", BATCH + 1, pointer=0x7F0000005000),
        "kv_cu_seq_lens": view("int32", BATCH + 1, pointer=0x7F0000006000),
    }
    return {**given, **more}


def paged_call(kv_dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    """With paged keys."""
    given = ragged_call(
        k=view(kv_dtype, PAGES, PAGE, KV_HEADS, DIM, pointer=0x7F0010000000),
        v=view(kv_dtype, PAGES, PAGE, KV_HEADS, DIM, pointer=0x7F0020000000),
        page_table=view("int32", BATCH, COLUMNS, pointer=0x7F0000002000),
        seq_lens=view("int32", BATCH, pointer=0x7F0000003000),
    )
    del given["kv_cu_seq_lens"]
    return {**given, **more}


def even_call(q_len: int = 100, kv_len: int = 300, **more: Any) -> dict[str, Any]:
    """With requests of one size."""
    given = {
        "q": view("bfloat16", BATCH, q_len, HEADS, DIM, pointer=0x7F0000100000),
        "k": view("bfloat16", BATCH, kv_len, KV_HEADS, DIM, pointer=0x7F0010000000),
        "v": view("bfloat16", BATCH, kv_len, KV_HEADS, DIM, pointer=0x7F0020000000),
        "out": view("bfloat16", BATCH, q_len, HEADS, DIM, pointer=0x7F0000900000),
    }
    return {**given, **more}
