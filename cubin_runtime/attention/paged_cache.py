"""The paged KV caches of grouped-query attention: layouts, sizes, and their declaration as arguments."""

from __future__ import annotations

from math import prod
from typing import Any

from ..errors import UsageError
from ..tensor import TensorView
from .checks import check_shape, flat_scalar, listed
from .operator import CallTensors, TensorArg

LAYOUTS = ("NHD", "HND")
E4M3 = "float8_e4m3fn"
KV_SCALES = ("k_scale", "v_scale")
# In any of the forms of ``check_kv_scales``, with any strides.
KV_SCALE_TENSORS = tuple(
    TensorArg(name, ("float32",), optional=True, canonical=lambda view, _: flat_scalar(view)) for name in KV_SCALES
)
MAX_GROUP = 32
MAX_QUERIES = 64  # of a request that decodes
HEAD_DIMS = (32, 64, 128, 256, 512)
PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
MOST_KEYS = 1 << 30  # of a request on all ranks: positions, and windows subtracted from them, fit an int32
# KV dtype -> what queries, and new keys and values, may be; an output may be any of them.
Q_DTYPES = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float8_e4m3fn": ("bfloat16", "float16", "float8_e4m3fn"),
}


def has_decode_kernel(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> bool:
    """Return whether the decode kernels take so many heads and columns; reads numbers alone, which torch may trace."""
    return head_dim == value_dim and head_dim in HEAD_DIMS and kv_heads > 0 and heads <= MAX_GROUP * kv_heads


def cache_view(cache: TensorView, name: str, kv_layout: str) -> TensorView:
    """A cache of either layout as ``[pages, page_size, kv_heads, head_dim]``: strides change, bytes do not.

    Raises:
        UsageError: the layout is unknown or the cache has another rank than 4.
    """
    if kv_layout not in LAYOUTS:
        raise UsageError("expected NHD or HND", argument="kv_layout", value=repr(kv_layout))
    if len(cache.shape) != 4:
        raise UsageError(f"shape {cache.shape}, expected 4 dimensions in layout {kv_layout}", argument=name)
    if kv_layout == "NHD":
        return cache
    order = (0, 2, 1, 3)
    shape = tuple(cache.shape[i] for i in order)
    return TensorView(cache.pointer, cache.dtype, shape, tuple(cache.strides[i] for i in order), cache.device)


def check_caches(q: TensorView, k: TensorView, v: TensorView, columns: int) -> None:
    """Check the sizes of queries and caches against each other; caches are ``[pages, page_size, kv_heads, head_dim]``.

    A page that is a request's only one, where the page table has one of the ``columns``, has any size.

    Raises:
        UsageError: the message names the tensor.
    """
    pages, page_size, kv_heads, _ = k.shape
    q_heads, head_dim = q.shape[-2:]
    if head_dim not in HEAD_DIMS:
        raise UsageError(f"head dimension {head_dim}, expected one of {listed(HEAD_DIMS)}", argument="q")
    if pages < 1 or kv_heads < 1:
        raise UsageError(f"{pages} pages of {kv_heads} KV heads, expected at least one of each", argument="k_cache")
    check_page_size("k_cache", page_size, columns, kv_heads)
    if q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        raise UsageError(
            f"{q_heads} heads over {kv_heads} KV heads, expected a multiple of {kv_heads}: 1 to {MAX_GROUP} "
            "query heads per KV head",
            argument="q",
        )
    check_shape("k_cache", k, (pages, page_size, kv_heads, head_dim))
    check_shape("v_cache", v, k.shape)


def check_table(table: TensorView, batch: int, *, separate: bool = False) -> None:
    """Check the shape of a page table; ``separate``: K and V may have tables of their own.

    Raises:
        UsageError: it has another shape.
    """
    forms = [(batch,), (batch, 2)][: 1 + separate]
    if table.shape[:-1] not in forms or table.shape[-1] < 1:
        shapes = " or ".join(f"[{', '.join(map(str, form))}, columns]" for form in forms)
        raise UsageError(f"shape {table.shape}, expected {shapes}", argument="page_table")


def value_table_offset(table: TensorView) -> int:
    """Elements from the page ids of a request's keys to those of its values, 0 where they are the same."""
    return table.strides[1] if len(table.shape) == 3 else 0


def check_page_size(name: str, page_size: int, columns: int, kv_heads: int) -> None:
    """Check the tokens of a page, which is any number where the page table has one of the ``columns``.

    A cache whose ``kv_heads`` could be a page size was perhaps laid out in the other way.

    Raises:
        UsageError: another number; the message names the cache.
    """
    if page_size not in PAGE_SIZES and not (columns == 1 and 1 <= page_size <= MOST_KEYS):
        hint = f"; the other kv_layout makes it {kv_heads}" if kv_heads in PAGE_SIZES else ""
        raise UsageError(
            f"page size {page_size}, expected {listed(PAGE_SIZES)}, or any up to {MOST_KEYS} with one column "
            f"in page_table{hint}",
            argument=name,
        )


def check_kv_scales(tensors: CallTensors, kv_dtype: str, batch: int, kv_heads: int) -> None:
    """Check the scales of keys and values that are tensors."""
    for name in KV_SCALES:
        scale = tensors.get(name)
        if scale is None:
            continue
        check_shape(name, scale, (1,), (kv_heads,), (batch, kv_heads))
        if kv_dtype != E4M3:
            raise UsageError(f"a tensor with {kv_dtype} keys and values, expected a number or None", argument=name)


def scale_strides(view: TensorView | None) -> tuple[int, int]:
    """Elements between the scales of requests and between those of KV heads; 0 where all have one."""
    if view is None or prod(view.shape) == 1:
        return 0, 0
    return (0, view.strides[0]) if len(view.shape) == 1 else (view.strides[0], view.strides[1])


def cache_arg(name: str, **dtypes: Any) -> TensorArg:
    """The declaration of one of the caches, with its ``dtypes``."""
    return TensorArg(
        name,
        alignment=16,
        stride_bytes=16,
        rows=True,
        resident=True,
        canonical=lambda view, options: cache_view(view, name, options.kv_layout),
        **dtypes,
    )


def strides_of(cache: TensorView) -> tuple[int, ...]:
    """The strides of a cache that has at least one element in each dimension, but for that of its columns."""
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    sizes = zip(cache.shape[:-1], cache.strides, strict=False)
    return tuple(stride if size > 1 else cache.shape[-1] for size, stride in sizes)
