"""Made-up tensors of a KV append and of a merge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubin_runtime.attention import TensorView

TOKENS, BATCH, KV_HEADS, DIM, PAGES, PAGE, COLUMNS = 23, 4, 8, 128, 100, 64, 16


def view(dtype: str, *shape: int, at: int = 0x7F0000007000) -> TensorView:
    return TensorView.contiguous(at, dtype, shape)


def append_call(**changes: Any) -> dict[str, Any]:
    """23 tokens of four requests by offsets; a tensor that is None is left out."""
    given = {
        "k": view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000100000),
        "v": view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000200000),
        "k_cache": view("bfloat16", PAGES, PAGE, KV_HEADS, DIM, at=0x7F0010000000),
        "v_cache": view("bfloat16", PAGES, PAGE, KV_HEADS, DIM, at=0x7F0020000000),
        "page_table": view("int32", BATCH, COLUMNS, at=0x7F0000002000),
        "seq_lens": view("int32", BATCH, at=0x7F0000003000),
        "q_cu_seq_lens": view("int32", BATCH + 1, at=0x7F0000004000),
    }
    return {name: value for name, value in {**given, **changes}.items() if value is not None}


def quantised_call(**changes: Any) -> dict[str, Any]:
    """Into e4m3 caches."""
    given = append_call()
    caches = {name: replace(given[name], dtype="float8_e4m3fn") for name in ("k_cache", "v_cache")}
    return append_call(**{**caches, **changes})


def token_call(**changes: Any) -> dict[str, Any]:
    """By positions, with a ragged table."""
    more = {
        "seq_lens": None,
        "q_cu_seq_lens": None,
        "positions": view("int32", TOKENS, at=0x7F0000003000),
        "batch_indices": view("int32", TOKENS, at=0x7F0000004000),
        "page_table": view("int32", 61, at=0x7F0000002000),
        "page_indptr": view("int32", BATCH + 1, at=0x7F0000005000),
    }
    return append_call(**{**more, **changes})


def merge_call(**changes: Any) -> dict[str, Any]:
    """Three parts of 23 tokens."""
    given = {
        "parts": view("bfloat16", TOKENS, 3, KV_HEADS, DIM, at=0x7F0000100000),
        "part_lses": view("float32", TOKENS, 3, KV_HEADS, at=0x7F0000003000),
        "out": view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000200000),
        "lse": view("float32", TOKENS, KV_HEADS, at=0x7F0000004000),
    }
    return {name: value for name, value in {**given, **changes}.items() if value is not None}
