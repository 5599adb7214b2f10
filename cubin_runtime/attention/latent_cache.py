"""The paged latent cache of MLA: its forms, sizes, and its declaration as an argument."""

from __future__ import annotations

from ..errors import UsageError
from ..kernels.native.mla.select import COLUMNS, MAX_HEADS
from ..tensor import TensorView
from .checks import check_dtype, check_shape, listed
from .operator import TensorArg
from .paged_cache import PAGE_SIZES

# Columns of a row of the cache -> the latent ones of them.
LATENTS = {latent + rope: latent for latent, rope in COLUMNS}
# Those that no head dimension of keys and values has.
MLA_WIDTHS = frozenset(latent + rope for latent, rope in COLUMNS if rope)
# Dtype of the cache -> what q may be, if a kernel takes it; the output may be any.
Q_DTYPES = {"bfloat16": ("bfloat16",), "float8_e4m3fn": ("bfloat16", "float8_e4m3fn")}
OUT_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def latent_view(cache: TensorView, name: str = "kv_cache") -> TensorView:
    """A latent cache of either form as ``[pages, page_size, 1, width]``: the same memory.

    Raises:
        UsageError: it has another rank, or more heads than one.
    """
    shape, strides = cache.shape, cache.strides
    if len(shape) == 4 and shape[1] == 1:
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    if len(shape) != 3:
        raise UsageError(
            f"shape {cache.shape}, expected [pages, page_size, width] or [pages, 1, page_size, width]", argument=name
        )
    pages, tokens, width = shape
    view_strides = (strides[0], strides[1], width, strides[2])
    return TensorView(cache.pointer, cache.dtype, (pages, tokens, 1, width), view_strides, cache.device)


def check_cache(q: TensorView, cache: TensorView, q_rope: TensorView | None) -> None:
    """Check the sizes of queries and cache against each other; the cache is ``[pages, page_size, 1, width]``.

    With ``q_rope``, their rope columns are there and not in ``q``.

    Raises:
        UsageError: the message names the tensor.
    """
    pages, page_size, _, width = cache.shape
    heads, columns = q.shape[-2:]
    if pages < 1:
        raise UsageError("no pages, expected at least one", argument="kv_cache")
    if width not in LATENTS:
        raise UsageError(f"rows of {width} columns, expected one of {listed(tuple(LATENTS))}", argument="kv_cache")
    if q_rope is None:
        if columns != width:
            raise UsageError(f"{columns} columns per head, expected {width}, like the rows of kv_cache", argument="q")
    else:
        _check_rope(q, q_rope, width)
    if page_size not in PAGE_SIZES:
        raise UsageError(f"page size {page_size}, expected one of {listed(PAGE_SIZES)}", argument="kv_cache")
    if not 1 <= heads <= MAX_HEADS:
        raise UsageError(f"{heads} heads, expected 1 to {MAX_HEADS}", argument="q")


def _check_rope(q: TensorView, q_rope: TensorView, width: int) -> None:
    """Check rope columns of queries in memory of their own against the latent ones; keys have ``width`` columns."""
    latent = LATENTS[width]
    if latent == width:
        raise UsageError(f"given with rows of {width} columns, which are latent, expected None", argument=Q_ROPE.name)
    if q.shape[-1] != latent:
        raise UsageError(
            f"{q.shape[-1]} columns per head with q_rope, expected {latent}, the latent ones of kv_cache", argument="q"
        )
    check_shape(Q_ROPE.name, q_rope, (*q.shape[:-1], width - latent))
    check_dtype(Q_ROPE.name, q_rope, (q.dtype,), ", like q")


SEPARATE_DTYPE = "float8_e4m3fn"  # of keys, and of values in memory of their own
# Rows of queries are moved in pieces of 16 bytes.
Q_ROPE = TensorArg("q_rope", Q_DTYPES, dtypes_by="kv_cache", optional=True, alignment=16, stride_bytes=16, rows=True)
V_CACHE = TensorArg(
    "v_cache",
    (SEPARATE_DTYPE,),
    optional=True,
    alignment=16,
    stride_bytes=16,
    rows=True,
    resident=True,
    canonical=lambda view, _: latent_view(view, "v_cache"),
)
KV_CACHE = TensorArg(
    "kv_cache",
    tuple(Q_DTYPES),
    alignment=16,
    stride_bytes=16,
    rows=True,
    resident=True,
    canonical=lambda view, _: latent_view(view),
)
