"""Paged decode in float64 on the host: what every kernel is held against. Needs numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def paged_decode_reference(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, softmax_scale: float
) -> tuple[Float64, Float64]:
    """Attention of one query token a request over its pages.

    Args:
        q: ``[batch, q_heads, head_dim]``; values of any float dtype, taken to float64.
        k_cache: ``[pages, page_size, kv_heads, head_dim]`` (a view of an HND cache transposed serves too).
        v_cache: likewise.
        page_table: integers ``[batch, columns]``; entries past a length are never read.
        seq_lens: integers ``[batch]``.
        softmax_scale: factor of the scores.

    Returns:
        Output ``[batch, q_heads, head_dim]`` and log-sum-exp ``[batch, q_heads]``, base 2. A request of length 0
        has output 0 and log-sum-exp -inf.
    """
    import numpy as np

    batch, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    group = q_heads // kv_heads
    out = np.zeros((batch, q_heads, head_dim))
    lse = np.full((batch, q_heads), -math.inf)
    for b in range(batch):
        length = int(seq_lens[b])
        if length == 0:
            continue
        pages = np.asarray(page_table[b][: -(-length // page_size)], dtype=np.int64)
        keys = k_cache[pages].reshape(-1, kv_heads, head_dim)[:length].astype(np.float64)
        values = v_cache[pages].reshape(-1, kv_heads, head_dim)[:length].astype(np.float64)
        queries = q[b].reshape(kv_heads, group, head_dim).astype(np.float64)
        scores = np.einsum("hgd,nhd->hgn", queries, keys) * softmax_scale
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out[b] = np.einsum("hgn,nhd->hgd", weights / total, values).reshape(q_heads, head_dim)
        lse[b] = (np.log2(total) + top * math.log2(math.e)).reshape(q_heads)
    return out, lse


def bfloat16_bits(values: Any) -> NDArray[np.uint16]:
    """float32 values rounded to the nearest bfloat16 (ties to even), as their 16 bits. NaN stays NaN."""
    import numpy as np

    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bfloat16_values(bits: Any) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    import numpy as np

    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
