"""Context attention in float64 on the host: what the kernels are compared with. Needs numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def context_attention_reference(  # noqa: PLR0915
    q: Any,
    k: Any,
    v: Any,
    q_lens: Any,
    kv_lens: Any,
    softmax_scale: float,
    *,
    page_table: Any = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_soft_cap: float = 0.0,
    sinks: Any = None,
    output_scale: float = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    lse_base: str = "2",
    lse_sink: bool = True,
) -> tuple[Float64, Float64]:
    """Attention of each request's query tokens over its keys; the last query token stands at the last key.

    Args:
        q: ``[tokens, q_heads, head_dim]``, the requests' tokens one after another; any float dtype.
        k, v: ``[tokens, kv_heads, head_dim]``, the requests' keys one after another (v of any columns); with
            ``page_table`` ``[pages, page_size, kv_heads, head_dim]``.
        q_lens, kv_lens: integers ``[batch]``.
        softmax_scale: factor of the scores.
        page_table: integers ``[batch, columns]``, or ``[batch, 2, columns]`` of keys and values; entries past a length,
            and those of keys that no row sees, are not read.
        k_scale, v_scale: numbers, or arrays ``[kv_heads]`` or ``[batch, kv_heads]``.
        causal, window_left, window_right, logit_soft_cap, sinks, output_scale, lse_base, lse_sink: as
            ``context_attention``.

    Returns:
        Output ``[tokens, q_heads, columns of v]`` and log-sum-exp ``[tokens, q_heads]``.
    """
    import numpy as np

    tokens, heads, head_dim = q.shape
    value_dim = v.shape[-1]
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    logits = None if sinks is None else np.asarray(sinks, dtype=np.float64).reshape(kv_heads, group, 1, 1)
    per_head = len(q_lens), kv_heads
    factors = [np.broadcast_to(by, per_head).astype(np.float64)[..., None, None] for by in (k_scale, v_scale)]
    out, lse = np.zeros((tokens, heads, value_dim)), np.zeros((tokens, heads))
    row = key = 0
    for request, (q_len, kv_len) in enumerate(zip(map(int, q_lens), map(int, kv_lens), strict=True)):
        position = np.arange(q_len)[:, None] + kv_len - q_len
        seen = _seen(position, np.arange(kv_len), causal, window_left, window_right)
        first = int(seen.any(axis=0).argmax()) if seen.any() else kv_len
        both: Any = [slice(key + first, key + kv_len)] * 2
        if page_table is not None:
            size = k.shape[1]
            at = np.arange(first, kv_len)
            pages = np.asarray(page_table[request])[..., at // size]
            both = [(ids, at % size) for ids in (pages if pages.ndim == 2 else (pages, pages))]
        keys, values = (np.asarray(side[of], dtype=np.float64) for side, of in zip((k, v), both, strict=True))
        keys, values = (side.transpose(1, 0, 2) * by[request] for side, by in zip((keys, values), factors, strict=True))
        queries = np.asarray(q[row : row + q_len], dtype=np.float64).reshape(q_len, kv_heads, group, head_dim)
        queries = queries.transpose(1, 2, 0, 3).reshape(kv_heads, group * q_len, head_dim)
        scores = (queries @ keys.transpose(0, 2, 1) * softmax_scale).reshape(kv_heads, group, q_len, kv_len - first)
        if logit_soft_cap:
            scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
        scores = np.where(seen[:, first:], scores, -math.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-math.inf)
        anchor = top if logits is None else np.maximum(top, logits)
        anchor = np.where(np.isneginf(anchor), 0.0, anchor)
        weights = np.exp(scores - anchor)
        total = weights.sum(axis=-1, keepdims=True)
        with_sink = total if logits is None else total + np.exp(logits - anchor)
        weights = (weights / np.where(with_sink == 0, 1.0, with_sink)).reshape(kv_heads, group * q_len, kv_len - first)
        result = (weights @ values).reshape(kv_heads, group, q_len, value_dim).transpose(2, 0, 1, 3)
        out[row : row + q_len] = result.reshape(q_len, heads, value_dim) * output_scale
        with np.errstate(divide="ignore"):
            sums = np.log(with_sink if lse_sink else total) + anchor
        lse[row : row + q_len] = sums[..., 0].transpose(2, 0, 1).reshape(q_len, heads)
        row += q_len
        key += kv_len
    return out, lse / math.log(2) if lse_base == "2" else lse


def _seen(position: Any, key: Any, causal: bool, window_left: int, window_right: int) -> Any:
    """Mark the keys that each row sees, ``[q_len, kv_len]``."""
    seen = key >= position - window_left if window_left >= 0 else key >= position * 0
    if causal:
        return seen & (key <= position)
    return seen & (key <= position + window_right) if window_right >= 0 else seen
