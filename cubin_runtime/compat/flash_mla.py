"""FlashMLA's decode functions on our operators: its parameters, positions and defaults.

Import these instead of ``flash_mla``. The differences:

- An argument that no kernel honours is an error that names it.
- Nothing is planned ahead, so metadata are empty and may be reused for other lengths.
- Heads are not padded: 1 to 128 of them, in any number. Lists may have any width up to 32,768.
- Dense requests with several query tokens are causal.
"""

from __future__ import annotations

import math
from typing import Any

from ..attention.attention_operator import default_scale
from ..attention.operator import dtype_of
from ..attention.operators.mla_decode import mla_decode
from ..attention.operators.sparse_mla_decode import LATENT, sparse_mla_decode
from ..errors import UsageError, WorkspaceError
from ..values import dataclass
from .flash_attn.options import check_kinds
from .renaming import renamed
from .shapes import check_torch, check_vector, shape_of

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


_NAMES = {
    "kv_cache": "k_cache",
    "page_table": "block_table",
    "seq_lens": "cache_seqlens",
    "sinks": "attn_sink",
    "topk_lens": "topk_length",
}
# Kernels subtract a sink from itself, of which infinity is not a number; either leaves 0 of every output.
_LARGEST_SINK = 1e38


@dataclass(frozen=True, slots=True)
class FlashMLASchedMeta:
    """A stand-in for FlashMLA's scheduling metadata; kernels here need none."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return empty metadata; arguments of earlier versions are accepted and change nothing."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> tuple[Any, Any]:
    """MLA decode, over the lists ``indices`` or over all keys of each request; torch tensors.

    Args:
        q: bfloat16 ``[batch, q_len, heads, 576]``, or 512 columns without rope.
        k_cache: ``[pages, page_size, 1, 576]`` (or 512) of bfloat16, or with ``is_fp8_kvcache`` and ``indices`` rows of
            656 bytes, ``[pages, page_size, 1, 656]``; see ``sparse_mla_decode``.
        block_table, cache_seqlens: int32 ``[batch, columns]`` and ``[batch]``, without ``indices`` alone.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: accepted; they change nothing.
        softmax_scale: None: 1 / sqrt(columns of q).
        causal: without ``indices``, required if q_len is over 1.
        is_fp8_kvcache: whether the cache has rows of 656 bytes.
        indices: int32 ``[batch, q_len, width]``, slots of the cache; negative entries are holes. Where pages have gaps
            between them, and a size that is no power of two, torch converts the slots in launches of its own.
        attn_sink: float32 ``[heads]``, with ``indices`` alone: changes the output, not the log-sum-exp. Infinite ones
            are taken, for which torch makes a copy in a launch of its own.
        topk_length: int32 ``[batch]``, with ``indices`` alone: entries of each request's lists that count. Torch copies
            them for each query token if there are several, in a launch of its own.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: refused unless None.

    Returns:
        The output, bfloat16 ``[batch, q_len, heads, 512]``, and the log-sum-exp in base e, float32 ``[batch, heads,
        q_len]``, +inf for a query token without keys.

    Raises:
        UsageError: an argument is outside its domain, or is not honoured; the message names it.
        BackendError: no kernel runs on the device.
    """
    import torch

    check_kinds(
        flash_mla_with_kvcache,
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
    )
    extra = {
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    _refuse(extra, "no kernel takes a second cache, expected None")
    if head_dim_v != LATENT:
        raise UsageError(f"expected {LATENT}", argument="head_dim_v", value=repr(head_dim_v))
    batch, q_len, heads, columns = shape_of(q, "q", 4)
    if shape_of(k_cache, "k_cache", 4)[2] != 1:
        raise UsageError(
            f"shape {tuple(k_cache.shape)}, expected one head, [pages, page_size, 1, width]", argument="k_cache"
        )
    scale = default_scale((columns,)) if softmax_scale is None else softmax_scale
    out = torch.empty(batch, q_len, heads, LATENT, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, q_len, heads, dtype=torch.float32, device=q.device)
    if indices is None:
        _refuse({"attn_sink": attn_sink, "topk_length": topk_length}, "given without indices, expected None")
        if is_fp8_kvcache:
            raise UsageError("is_fp8_kvcache=True: without indices, expected False: no kernel reads rows of 656 bytes")
        if q_len > 1 and not causal:
            raise UsageError(f"causal=False: with {q_len} query tokens per request, expected True")
        _decode_keys(q, k_cache, block_table, cache_seqlens, softmax_scale=scale, out=out, lse=lse)
        lse = lse * math.log(2)
    else:
        if causal:
            raise UsageError("causal=True: with indices, expected False: a list decides what a query token sees")
        if is_fp8_kvcache != (k_cache.element_size() == 1):
            raise UsageError(f"k_cache has dtype {k_cache.dtype}", argument="is_fp8_kvcache", value=is_fp8_kvcache)
        if shape_of(indices, "indices", 3)[:2] != (batch, q_len):
            raise UsageError(f"shape {tuple(indices.shape)}, expected [{batch}, {q_len}, width]", argument="indices")
        _decode_lists(q, k_cache, indices, attn_sink, topk_length, softmax_scale=scale, out=out, lse=lse)
    return out, torch.where(lse == -math.inf, math.inf, lse).transpose(1, 2)


def _decode_keys(q: Any, cache: Any, table: Any, lengths: Any, **options: Any) -> None:
    bound = shape_of(table, "block_table", 2)[1] * cache.shape[1]
    try:
        mla_decode(q, cache[:, :, 0], table, lengths, max_seq_len=bound, **options)
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _NAMES) from error


def _decode_lists(
    q: Any, cache: Any, indices: Any, sinks: Any, lengths: Any, *, softmax_scale: float, out: Any, lse: Any
) -> None:
    check_torch(indices, "indices", "slots of query tokens would be made")
    if dtype_of(indices, "indices") != "int32":
        raise UsageError(f"dtype {dtype_of(indices, 'indices')}, expected int32", argument="indices")
    if sinks is not None:
        check_vector(sinks, "attn_sink", q.shape[2], "finite sinks would be made", "float32")
    if lengths is not None:
        check_vector(lengths, "topk_length", q.shape[0], "lengths of query tokens would be made")
    rows, slots = _without_gaps(cache, indices.flatten(0, 1))
    try:
        sparse_mla_decode(
            q.flatten(0, 1),
            rows,
            slots,
            softmax_scale=softmax_scale,
            topk_lens=_of_tokens(lengths, q.shape[1]),
            sinks=None if sinks is None else sinks.clamp(max=_LARGEST_SINK),
            lse_base="e",
            lse_sink=False,
            out=out.flatten(0, 1),
            lse=lse.flatten(0, 1),
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _NAMES) from error


def _without_gaps(cache: Any, slots: Any) -> tuple[Any, Any]:
    """The rows of a cache with the gaps between its pages, and slots of these rows: kernels divide by powers of two.

    Where a gap is no whole rows, rows begin as often as the distances of pages and of rows both are whole steps. A
    cache that needs no conversion comes back as it is.
    """
    pages, page_size = cache.shape[:2]
    page, row = cache.stride()[:2]
    if pages <= 1 or page_size.bit_count() == 1 or page <= page_size * row or row == 0:
        return cache, slots
    step = math.gcd(page, row)
    in_page, in_row = page // step, row // step
    count = (pages - 1) * in_page + (page_size - 1) * in_row + 1
    rows = cache.as_strided((count, cache.shape[3]), (step, cache.stride(3)))
    # Holes stay holes: below 0, or behind the last row.
    slots = slots.clamp(-1, pages * page_size)
    return rows, slots * in_row + slots.div(page_size, rounding_mode="floor") * (in_page - page_size * in_row)


def _of_tokens(lengths: Any, q_len: int) -> Any:
    """The lengths of requests as those of their query tokens."""
    return lengths if lengths is None or q_len == 1 else lengths.repeat_interleave(q_len)


def _refuse(arguments: dict[str, Any], why: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UsageError(f"{why}", argument=name)
