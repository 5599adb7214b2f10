"""KV append and merging of partial results in numpy: the reference of the kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

_LOG2_E = math.log2(math.e)


def append_kv_reference(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    *,
    positions: Any,
    batch_indices: Any,
    page_indptr: Any = None,
) -> None:
    """Write new keys and values into the caches, in place.

    Args:
        key, value: ``[tokens, kv_heads, dim]``, as the caches store them.
        k_cache, v_cache: ``[pages, page_size, kv_heads, dim]``, any strides.
        page_table: integers ``[batch, columns]``, or ``[page ids]`` with ``page_indptr``.
        positions, batch_indices: integers ``[tokens]``; a token with a negative one is skipped, and so is one whose
            page is not in the table or not in the pool.
        page_indptr: integers ``[batch + 1]``.
    """
    pages, page_size = k_cache.shape[:2]
    for token, (position, request) in enumerate(zip(map(int, positions), map(int, batch_indices), strict=True)):
        if position < 0 or request < 0:
            continue
        own = (
            page_table[request] if page_indptr is None else page_table[page_indptr[request] : page_indptr[request + 1]]
        )
        column, slot = divmod(position, page_size)
        if column < len(own) and 0 <= own[column] < pages:
            k_cache[own[column], slot] = key[token]
            v_cache[own[column], slot] = value[token]


def token_positions(
    seq_lens: Any, q_cu_seq_lens: Any, tokens: int, *, lengths_include_new: bool = True
) -> tuple[list[int], list[int]]:
    """The positions and the requests of ``tokens`` new tokens, -1 for padding; arguments as ``append_kv`` has them."""
    positions, requests = [-1] * tokens, [-1] * tokens
    for request, length in enumerate(map(int, seq_lens)):
        begin, end = int(q_cu_seq_lens[request]), int(q_cu_seq_lens[request + 1])
        first = length - (end - begin) if lengths_include_new else length
        for token in range(begin, min(end, tokens)):
            positions[token], requests[token] = max(-1, first + token - begin), request
    return positions, requests


def merge_states_reference(v: Any, s: Any, *, sinks: Any = None, lse_base: str = "2") -> tuple[Float64, Float64]:
    """Merge attention results over disjoint sets of keys.

    Args:
        v: ``[tokens, parts, heads, dim]``.
        s: ``[tokens, parts, heads]``, log-sum-exps in base ``lse_base``; a part with -inf does not count.
        sinks: ``[heads]``, logits (natural exponent) that enter the denominator once; None: none.

    Returns:
        Output ``[tokens, heads, dim]`` and log-sum-exp ``[tokens, heads]``; 0 and -inf where nothing counts.
    """
    import numpy as np

    unit = 1.0 if lse_base == "e" else 1 / _LOG2_E
    exponents = np.asarray(s, dtype=np.float64) * unit
    values = np.where(np.isneginf(exponents)[..., None], 0.0, np.asarray(v, dtype=np.float64))
    top = exponents.max(axis=1)
    sink = np.full(top.shape, -math.inf) if sinks is None else np.broadcast_to(np.asarray(sinks, np.float64), top.shape)
    top = np.maximum(top, sink)
    safe = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(exponents - safe[:, None])
    total = weights.sum(axis=1) + np.exp(sink - safe)
    out = (weights[..., None] * values).sum(axis=1) / np.where(total == 0, 1.0, total)[..., None]
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + safe) / unit
    return out, lse
