"""The functions that attention goes through, with flash-attention's names for their arguments.

They are those of ``cubin_runtime.compat.flash_attn`` without its checks of what ``arguments`` has made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...attention.growing_cache import decode_growing
from ...attention.operators.context_attention import context_attention
from ...attention.operators.paged_decode import paged_decode
from ...attention.paged_cache import has_decode_kernel
from ...compat.flash_attn.attention import attend_ragged
from ...compat.flash_attn.cache import DECODED_FROM, MOST_DECODED, Cache, Queries, attend_cache
from ...compat.flash_attn.options import NAMES
from ...compat.flash_attn.options import Options as FlashOptions
from ...compat.flash_attn.tensors import in_float32, numbers
from ...compat.renaming import renamed
from ...errors import UsageError, WorkspaceError

# Arguments of our operators -> those of a layer, in errors.
_EVEN = {**NAMES, "k_cache": "k", "v_cache": "v", "sinks": "s_aux"}
_PACKED = {**NAMES, "sinks": "s_aux", "page_table": "block_table", "seq_lens": "seqused_k"}
_CACHED = {**_EVEN, "page_table": "block_table", "seq_lens": "cache_seqlens"}


def attend_even(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Any = None,
) -> Any:
    """Attention of ``q`` ``[batch, q_len, heads, head_dim]`` over all of ``k`` and ``v`` ``[batch, kv_len, ...]``."""
    sinks = None if s_aux is None else in_float32(s_aux)
    (left, right), length = window_size, k.shape[1]
    try:
        if q.shape[1] == 1 and not softcap:
            out = decode_growing(q, k, v, softmax_scale=softmax_scale, window_left=left, sinks=sinks)
            if out is not None:
                return out
        if length < DECODED_FROM or q.shape[1] > MOST_DECODED:
            return context_attention(
                q,
                k,
                v,
                max_seq_len=length,
                causal=causal,
                window_left=left,
                window_right=right,
                logit_soft_cap=softcap,
                sinks=sinks,
                softmax_scale=softmax_scale,
                lse_base="e",
            )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _EVEN) from error
    options = FlashOptions(_EVEN, softmax_scale, causal, window_size, softcap, sinks, None, False, False)
    return attend_cache(Queries(q, None, None, q.shape[0]), Cache(k, v, None, length), None, options)[0]


def attend_cached(
    q: Any,
    k: Any,
    v: Any,
    *,
    cache_seqlens: Any,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Any = None,
) -> Any:
    """Attention over the first ``cache_seqlens`` int32 ``[batch]`` keys of a cache, in pages with a table."""
    bound = k.shape[1] * (1 if block_table is None else block_table.shape[1])
    (batch, q_len, heads, head_dim), (requests, _, kv_heads, _) = q.shape, k.shape
    of_pages = block_table is not None or requests == batch
    if q_len > 1 or softcap or not of_pages or not has_decode_kernel(heads, kv_heads, head_dim, v.shape[3]):
        options = _flash_options(_CACHED, softmax_scale, causal, window_size, softcap, s_aux)
        return attend_cache(Queries(q, None, None, batch), Cache(k, v, block_table, bound), cache_seqlens, options)[0]
    try:  # one token of each request, which it would decode too, behind its checks
        return paged_decode(
            q,
            k,
            v,
            numbers(q, batch) if block_table is None else block_table,
            cache_seqlens,
            max_seq_len=bound,
            softmax_scale=softmax_scale,
            window_left=max(-1, window_size[0]),
            sinks=None if s_aux is None else in_float32(s_aux),
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, _CACHED) from error


def attend_packed(
    q: Any,
    k: Any,
    v: Any,
    q_sums: Any,
    k_sums: Any,
    q_bound: int,
    k_bound: int,
    *,
    seqused_k: Any = None,
    block_table: Any = None,
    out: Any = None,
    **options: Any,
) -> Any:
    """Attention of ``q`` ``[tokens, heads, head_dim]`` with running sums, over packed keys or pages with a table."""
    return attend_ragged(
        q,
        k,
        v,
        _flash_options(_PACKED, out=out, **options),
        cu_seqlens_q=q_sums,
        cu_seqlens_k=k_sums,
        max_seqlen_q=q_bound,
        max_seqlen_k=k_bound,
        seqused_k=seqused_k,
        table=block_table,
    )[0]


def _flash_options(
    names: Mapping[str, str],
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Any = None,
    out: Any = None,
) -> FlashOptions:
    sinks = None if s_aux is None else in_float32(s_aux)
    return FlashOptions(names, softmax_scale, causal, window_size, softcap, sinks, out, False, False)


def decode_masked(
    q: Any,
    k: Any,
    v: Any,
    *,
    lengths: Any,
    mask: Any,
    softmax_scale: Any = None,
    softcap: float = 0.0,
    s_aux: Any = None,
) -> Any:
    """Attention of new tokens ``[batch, q_len, heads, head_dim]`` over a cache ``[batch, tokens, ...]``, with a mask
    among them.

    Raises:
        UsageError: a soft cap, or as ``paged_decode``.
    """
    if softcap:
        raise UsageError(f"softcap={softcap}: with a dense mask; the kernels with masks have no soft cap")
    return paged_decode(
        q,
        k,
        v,
        numbers(q, q.shape[0]),
        lengths,
        max_seq_len=k.shape[1],
        softmax_scale=softmax_scale,
        mask=mask,
        sinks=None if s_aux is None else in_float32(s_aux),
    )


class Operators(NamedTuple):
    """The functions that attend, by the form of the call. A test without a GPU gives functions of its own."""

    even: Callable[..., Any] = attend_even
    ragged: Callable[..., Any] = attend_packed
    cached: Callable[..., Any] = attend_cached
    masked: Callable[..., Any] = decode_masked
