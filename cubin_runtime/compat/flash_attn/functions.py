"""flash-attention 2's functions; what version 3 adds is taken by name."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from ..shapes import shape_of
from .append_checks import check_before_append
from .attention import attend_ragged
from .cache import Cache, append, attend_cache, cache_of, lengths_of, queries_of
from .options import NAMES, Options, check_kinds, one_of, refuse, sinks_of


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """Attention of requests of one size; other parameters as in ``flash_attn_varlen_func``.

    Args:
        q: ``[batch, q_len, heads, head_dim]``, all tokens at one stride.
        k, v: ``[batch, kv_len, kv_heads, head_dim]``.

    Returns:
        ``out``, or (``out``, softmax_lse, None); softmax_lse is float32 ``[batch, heads, q_len]``, not contiguous.
    """
    check_kinds(
        flash_attn_func,
        dropout_p=dropout_p,
        causal=causal,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, qv=qv, attention_chunk=attention_chunk, sm_margin=sm_margin)
    refuse(q_descale=q_descale)
    name, sinks = sinks_of(s_aux, learnable_sink)
    names = {**NAMES, "k_cache": "k", "v_cache": "v", "sinks": name}
    options = Options(
        names=names,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        out=out,
        returns_lse=return_attn_probs,
        batch_invariant=bool(deterministic),
        k_descale=k_descale,
        v_descale=v_descale,
    )
    cache = Cache(k, v, None, shape_of(k, "k", 4)[1])
    result, lse = attend_cache(queries_of(q, None, None), cache, None, options)
    return (result, lse, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    page_table: Any = None,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """Attention of ragged requests.

    Args:
        q: ``[tokens, heads, head_dim]``, bf16 or fp16; the head dimensions are those of ``context_attention``. k and v
            have its dtype or are float8_e4m3fn.
        k, v: ``[kv_tokens, kv_heads, head_dim]``; with a block table ``[pages, page_size, kv_heads, head_dim]``, pages
            of a power of two from 16 to 1024 tokens.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, running sums of the query and KV lengths; a request may have
            none of either. With a block table the lengths are made from ``cu_seqlens_k`` by a launch of their own,
            unless ``seqused_k`` is given; then it may be None.
        max_seqlen_q, max_seqlen_k: bounds on them.
        softmax_scale: a number or a float32 scalar on the device; None: 1 / sqrt(head_dim).
        causal: a token sees no key behind its own position; the last tokens of queries and keys are at one position.
        window_size: keys before and behind its own position that a token sees; -1: all. With ``causal`` none behind.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: they do not.
        deterministic: give a token the output that ``flash_attn_with_kvcache`` gives it with this option, bit for bit,
            if head_dim is 64 or 128. Without it, too, the output of a token depends on its own request alone.
        num_splits, pack_gqa: accepted; they change nothing.
        return_attn_probs: return the log-sum-exp too; the third of the tuple, the probabilities, is None.
        block_table, page_table: int32 ``[batch, columns]``, one of them.
        seqused_q: int32 ``[batch]``, the first query tokens of each request that are used; the output of the others is
            0. It takes a few launches of its own, and torch tensors.
        k_descale, v_descale: float32 ``[batch, kv_heads]`` on the device with any strides, factors of e4m3 keys and
            values; also ``[kv_heads]``, one element, or numbers.
        seqused_k: int32 ``[batch]``, KV length of each request, at most what ``cu_seqlens_k`` says.
        s_aux, learnable_sink: ``[heads]``, a logit of each head in the softmax's denominator; one of them. float32, or
            16-bit, which is converted by a launch of its own.
        out: like ``q``; None: made here.
        dropout_p, alibi_slopes, qv, q_descale, attention_chunk, sm_margin: refused unless at their defaults.

    Returns:
        ``out``, or (``out``, softmax_lse, None); softmax_lse is float32 ``[heads, tokens]`` in base e, with the sink. A
        token that sees no key has output 0 and -inf (flash-attention 2: +inf), or its sink.

    Raises:
        UsageError: an argument is outside its domain, or is not honoured; the message names it.
        BackendError: nothing runs this on the device.
    """
    check_kinds(
        flash_attn_varlen_func,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        causal=causal,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, qv=qv, attention_chunk=attention_chunk, sm_margin=sm_margin)
    refuse(q_descale=q_descale)
    sinks_name, sinks = sinks_of(s_aux, learnable_sink)
    table_name, table = one_of("block_table", block_table, "page_table", page_table)
    names = {**NAMES, "sinks": sinks_name, "page_table": table_name, "seq_lens": "seqused_k"}
    options = Options(
        names=names,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        out=out,
        returns_lse=return_attn_probs,
        batch_invariant=bool(deterministic),
        k_descale=k_descale,
        v_descale=v_descale,
    )
    result, lse = attend_ragged(
        q,
        k,
        v,
        options,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        table=table,
    )
    return (result, lse, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    deterministic: bool = False,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """Attention over a KV cache, to which new keys and values are appended first; other parameters as in
    ``flash_attn_varlen_func``.

    Up to 8 causal tokens of each request, without softcap and log-sum-exp, are decoded (``paged_decode``); all else is
    ``context_attention``. No length is read on the host.

    Args:
        q: ``[batch, q_len, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with ``cu_seqlens_q``.
        k_cache, v_cache: ``[batch, tokens, kv_heads, head_dim]``; with a block table ``[pages, page_size, kv_heads,
            head_dim]``.
        k, v: ``[batch, new tokens, kv_heads, head_dim]`` to write into the caches behind ``cache_seqlens``, by a launch
            of its own; ``[new tokens, kv_heads, head_dim]`` with ``cu_seqlens_k_new``. For an e4m3 cache, 16-bit ones
            are divided by the descales and rounded. A token that its request's pages
            have no room for is skipped.
        cache_seqlens: int32 ``[batch]``, or one number: keys in the cache, without the new ones. None: all of it.
        cache_batch_idx: int32 ``[batch]``, the request in the cache of each request, or the row of the block table,
            which a few launches of their own then take. A number that is none has no pages.
        num_splits: 1 makes a request's bits independent of other requests, as ``deterministic`` does; if head_dim is 64
            or 128, also of whether a token is in a prompt, a draft or a step of its own.
        cu_seqlens_q, max_seqlen_q: as in ``flash_attn_varlen_func``.
        cu_seqlens_k_new: int32 ``[batch + 1]``, running sums of the numbers of new tokens; unused without ``k``, as
            engines pass it then too.
        rotary_interleaved, rotary_seqlens, scheduler_metadata: unused.
        rotary_cos, rotary_sin, cache_leftpad: refused.

    Returns:
        ``out``, or (``out``, softmax_lse); softmax_lse as in ``flash_attn_func``.
    """
    check_kinds(
        flash_attn_with_kvcache,
        causal=causal,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        max_seqlen_q=max_seqlen_q,
        attention_chunk=attention_chunk,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        deterministic=deterministic,
    )
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
    refuse(alibi_slopes=alibi_slopes, qv=qv, attention_chunk=attention_chunk, sm_margin=sm_margin)
    refuse(q_descale=q_descale)
    if k is None and v is not None:
        raise UsageError("given without k, expected None", argument="v")
    if k is not None and cache_seqlens is None:
        raise UsageError("None with k, expected where the new tokens go", argument="cache_seqlens")
    sinks_name, sinks = sinks_of(s_aux, learnable_sink)
    table_name, table = one_of("block_table", block_table, "page_table", page_table)
    queries = queries_of(q, cu_seqlens_q, max_seqlen_q)
    cache = cache_of(k_cache, v_cache, table, table_name, cache_batch_idx, queries.batch)
    table_name = table_name if cache_batch_idx is None or table is not None else "cache_batch_idx"
    caches = {"k_cache": "k_cache", "v_cache": "v_cache", "page_table": table_name}
    names = {**NAMES, **caches, "k": "k_cache", "v": "v_cache", "seq_lens": "cache_seqlens", "sinks": sinks_name}
    options = Options(
        names=names,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks,
        out=out,
        returns_lse=return_softmax_lse,
        batch_invariant=bool(deterministic or num_splits == 1),
        k_descale=k_descale,
        v_descale=v_descale,
    )
    lengths = lengths_of(cache_seqlens, queries, cache)
    if k is not None:
        check_before_append(queries, cache, lengths, options)
        lengths = append(k, v, cu_seqlens_k_new, lengths, queries, cache, caches, (k_descale, v_descale))
    result, lse = attend_cache(queries, cache, lengths, options)
    return (result, lse) if return_softmax_lse else result
