"""Made-up tensors of a sparse MLA decode: 7 query tokens of 16 heads, lists of 256 slots in 100 pages of 64 rows."""

from __future__ import annotations

from typing import Any

from cubin_runtime.attention import TensorView

TOKENS, HEADS, WIDTH, PAGES, PAGE = 7, 16, 256, 100, 64


def view(dtype: str, *shape: int, at: int = 0x7F0000007000) -> TensorView:
    return TensorView.contiguous(at, dtype, shape)


def cache(dtype: str, *shape: int) -> TensorView:
    return view(dtype, *shape, at=0x7F0010000000)


def sparse_call(heads: int = HEADS, columns: int = 576, **changes: Any) -> dict[str, Any]:
    """Over rows of 656 bytes; a tensor that is None is left out."""
    given = {
        "q": view("bfloat16", TOKENS, heads, columns, at=0x7F0000100000),
        "kv_cache": cache("uint8", PAGES, PAGE, 656),
        "indices": view("int32", TOKENS, WIDTH, at=0x7F0000002000),
        "out": view("bfloat16", TOKENS, heads, 512, at=0x7F0000400000),
        "softmax_scale": 0.1,
    }
    return {name: value for name, value in {**given, **changes}.items() if value is not None}
