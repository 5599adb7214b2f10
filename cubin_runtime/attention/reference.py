"""Paged decode in float64 on the host: the reference of every kernel. Needs numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .values import bfloat16_bits, bfloat16_values, e4m3_bits, e4m3_values

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

__all__ = [
    "bfloat16_bits",
    "bfloat16_values",
    "e4m3_bits",
    "e4m3_values",
    "mla_decode_reference",
    "paged_decode_reference",
]

_LOG2_E = math.log2(math.e)


def paged_decode_reference(  # noqa: PLR0915
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    softmax_scale: float,
    *,
    output_scale: float = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    q_cu_seq_lens: Any = None,
    mask: Any = None,
    sinks: Any = None,
    window_left: int = -1,
    draft_position: str = "depth",
    causal: bool = True,
    global_seq_lens: Any = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> tuple[Float64, Float64]:
    """Attention of the last tokens of each request over its pages.

    The query tokens of a request are its newest: their keys are the last ones of the cache. Token i sits at position
    ``kv_len - q_len + i``, or with a mask and ``draft_position="depth"`` at ``kv_len - q_len + (bits set in its word) -
    1``.

    Args:
        q: ``[tokens, q_heads, head_dim]``, the requests' tokens one after another; values of any float dtype,
            taken to float64.
        k_cache: ``[pages, page_size, kv_heads, head_dim]`` (a view of an HND cache transposed serves too).
        v_cache: likewise; head_dim may be another, which then is that of the output.
        page_table: integers ``[batch, columns]``, or ``[batch, 2, columns]`` of keys and values; entries past a length
            are never read.
        seq_lens: integers ``[batch]``, keys of each request, its query tokens' included.
        softmax_scale: factor of the scores.
        output_scale: factor of the output, not of the log-sum-exp.
        k_scale, v_scale: factors of keys and of values: numbers, or arrays ``[kv_heads]`` or ``[batch, kv_heads]``.
        q_cu_seq_lens: integers ``[batch + 1]``, where each request's tokens begin, ending with ``tokens``; None: all
            requests have ``tokens / batch``.
        mask: integers ``[tokens]``: bit j of a token's word lets it see the j-th query token of its own request;
            keys in front of them are always seen. None: causal.
        sinks: ``[q_heads]`` or ``[kv_heads, group]``, logits that enter the denominator alone; None: none.
        window_left: how many keys before its own position a token sees; -1: all.
        draft_position: as ``paged_decode``.
        causal: False, without a mask: every query token sees all keys.
        global_seq_lens, cp_world, cp_rank, cp_interleave: as ``paged_decode``: the keys are those of one rank.

    Returns:
        Output ``[tokens, q_heads, head_dim]`` and log-sum-exp ``[tokens, q_heads]``, base 2, the sink included. A
        token that sees no key has output 0 and log-sum-exp -inf, or its sink times log2(e). That is so for the
        first ``q_len - kv_len`` tokens of a request with fewer keys than query tokens.
    """
    import numpy as np

    tokens, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    value_dim = v_cache.shape[3]
    group, batch = q_heads // kv_heads, len(seq_lens)
    bounds = np.arange(batch + 1) * (tokens // batch) if q_cu_seq_lens is None else np.asarray(q_cu_seq_lens)
    logits = None if sinks is None else np.asarray(sinks, dtype=np.float64).reshape(q_heads)
    out = np.zeros((tokens, q_heads, value_dim))
    lse = np.full((tokens, q_heads), -math.inf) if logits is None else np.tile(logits * _LOG2_E, (tokens, 1))
    factors = [np.broadcast_to(by, (batch, kv_heads)).astype(np.float64)[..., None, None] for by in (k_scale, v_scale)]
    for b in range(batch):
        begin, end, length = int(bounds[b]), int(bounds[b + 1]), int(seq_lens[b])
        rows = end - begin
        if rows == 0 or length == 0:
            continue
        if global_seq_lens is None:
            words = None if mask is None else np.asarray(mask[begin:end])
            visible = _visible(rows, length, words, window_left, draft_position == "index", causal)
        else:
            every = np.arange(int(global_seq_lens[b]))
            rank_keys = every[every // cp_interleave % cp_world == cp_rank][:length]
            position = len(every) - rows + np.arange(rows)[:, None]
            visible = (rank_keys <= position) & ((rank_keys >= position - window_left) | (window_left < 0))
        if not visible.any():
            continue
        first = int(visible.any(axis=0).argmax())  # a window leaves out what is in front of it
        last = length - first
        table = np.asarray(page_table[b], dtype=np.int64)[..., first // page_size : -(-length // page_size)]
        k_pages, v_pages = table if table.ndim == 2 else (table, table)
        keys = _gathered(k_cache, k_pages, kv_heads, head_dim, first % page_size, last) * factors[0][b]
        values = _gathered(v_cache, v_pages, kv_heads, value_dim, first % page_size, last) * factors[1][b]
        queries = np.asarray(q[begin:end], dtype=np.float64).reshape(rows, kv_heads, group, head_dim)
        queries = queries.transpose(1, 0, 2, 3).reshape(kv_heads, rows * group, head_dim)
        scores = (queries @ keys.transpose(0, 2, 1) * softmax_scale).reshape(kv_heads, rows, group, last)
        scores = np.where(visible[:, None, first:], scores, -math.inf)
        top = scores.max(axis=-1, keepdims=True)
        sink = None if logits is None else logits.reshape(kv_heads, 1, group, 1)
        if sink is not None:
            top = np.maximum(top, sink)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - top)
        attention = weights.reshape(kv_heads, rows * group, last) @ values
        attention = attention.reshape(kv_heads, rows, group, value_dim) / np.where(total == 0, 1.0, total)
        out[begin:end] = attention.transpose(1, 0, 2, 3).reshape(rows, q_heads, value_dim) * output_scale
        with np.errstate(divide="ignore"):
            sums = np.log2(total) + top * _LOG2_E
        lse[begin:end] = sums[..., 0].transpose(1, 0, 2).reshape(rows, q_heads)
    return out, lse


def mla_decode_reference(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    seq_lens: Any,
    softmax_scale: float,
    *,
    latent: int,
    output_scale: float = 1.0,
    q_cu_seq_lens: Any = None,
    mask: Any = None,
    sinks: Any = None,
    v_cache: Any = None,
    q_rope: Any = None,
    **dealing: Any,
) -> tuple[Float64, Float64]:
    """Latent attention: all heads share the rows of one cache, whose first ``latent`` columns are the values.

    Args:
        q: ``[tokens, heads, width]``, the requests' tokens one after another.
        kv_cache: ``[pages, page_size, width]``.
        latent: columns of a value.
        v_cache: values in memory of their own, ``[pages, page_size, latent]``.
        q_rope: rope columns of the queries in memory of their own, ``[tokens, heads, rope]``; ``q`` has the others.
        page_table, seq_lens, softmax_scale, output_scale, q_cu_seq_lens, mask, sinks: as ``paged_decode_reference``.
        dealing: its ``global_seq_lens``, ``cp_world``, ``cp_rank`` and ``cp_interleave``.

    Returns:
        Output ``[tokens, heads, latent]`` and log-sum-exp ``[tokens, heads]``, base 2, as ``paged_decode_reference``.
    """
    import numpy as np

    rows = kv_cache[:, :, None]
    return paged_decode_reference(
        q if q_rope is None else np.concatenate([q, q_rope], axis=-1),
        rows,
        rows[..., :latent] if v_cache is None else v_cache[:, :, None],
        page_table,
        seq_lens,
        softmax_scale,
        output_scale=output_scale,
        q_cu_seq_lens=q_cu_seq_lens,
        mask=mask,
        sinks=sinks,
        **dealing,
    )


def _visible(rows: int, length: int, words: Any, window_left: int, by_index: bool, causal: bool) -> Any:
    """Mark which of ``length`` keys each of ``rows`` query tokens of one request sees: ``[rows, length]``."""
    import numpy as np

    token, key = np.arange(rows), np.arange(length)
    prefix = length - rows  # below 0: the first query tokens have no key of their own
    if words is None:
        position = prefix + token[:, None]
        visible = key <= position if causal else np.ones((rows, length), dtype=bool)
        return visible & (key >= position - window_left) if window_left >= 0 else visible
    draft = key - prefix
    bits = words.astype(np.uint64)[:, None] >> np.arange(rows, dtype=np.uint64) & np.uint64(1)
    visible = (draft < 0) | (bits[:, np.maximum(draft, 0)] == 1)
    if window_left >= 0:
        position = prefix + (token if by_index else bits.sum(axis=1).astype(np.int64) - 1)
        visible &= key >= position[:, None] - window_left
    return visible & (token[:, None] >= -prefix)


def _gathered(cache: Any, pages: Any, kv_heads: int, head_dim: int, skip: int, count: int) -> Float64:
    """``count`` tokens of the pages after the first ``skip``, as float64 ``[kv_heads, count, head_dim]``."""
    import numpy as np

    tokens = cache[pages].reshape(-1, kv_heads, head_dim)[skip : skip + count]
    return np.ascontiguousarray(tokens.transpose(1, 0, 2), dtype=np.float64)
