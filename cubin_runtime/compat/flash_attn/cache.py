"""Attention over a KV cache: appending first, then decoding or context attention, by pages or by requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...attention.checks import integer
from ...attention.operator import dtype_of
from ...attention.operators.append_kv import append_kv
from ...attention.operators.paged_decode import paged_decode
from ...attention.paged_cache import E4M3, has_decode_kernel
from ...errors import UsageError, WorkspaceError
from ...kernels.native.prefill.select import SEGMENT_HEAD_DIMS
from ..renaming import renamed
from ..shapes import is_torch, shape_of
from .attention import attend
from .options import Options
from .tensors import chosen, column, filled, lengthened, numbers, requests_of, whole_cache

MOST_DECODED = 8  # query tokens of a request that the decode kernels are for
# Keys of a request from which on they are faster without lengths, too: they divide the keys over the GPU, and that is
# then worth more than the two small tensors cost that they need.
DECODED_FROM = 2048
_APPEND_NAMES = {
    "seq_lens": "cache_seqlens",
    "q_cu_seq_lens": "cu_seqlens_k_new",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


class Cache(NamedTuple):
    """A cache: ``[pages, page_size, kv_heads, head_dim]`` with a ``table``, else ``[batch, tokens, ...]``."""

    k: Any
    v: Any
    table: Any
    capacity: int


class Queries(NamedTuple):
    """Queries ``[batch, q_len, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with running sums."""

    q: Any
    sums: Any
    bound: int | None
    batch: int


def queries_of(q: Any, cu_seqlens_q: Any, max_seqlen_q: Any) -> Queries:
    """The queries of a call; raises ``UsageError`` where rank and running sums do not fit."""
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise UsageError("expected only with cu_seqlens_q", argument="max_seqlen_q", value=max_seqlen_q)
        return Queries(q, None, None, shape_of(q, "q", 4)[0])
    shape_of(q, "q", 3)
    bound = None if max_seqlen_q is None else integer("max_seqlen_q", max_seqlen_q)
    return Queries(q, cu_seqlens_q, bound, requests_of(cu_seqlens_q))


def cache_of(k_cache: Any, v_cache: Any, table: Any, table_name: str, cache_batch_idx: Any, batch: int) -> Cache:
    """The cache of a call; ``cache_batch_idx`` chooses rows of ``table`` for the ``batch``, or is a page table of whole
    requests.

    Raises:
        UsageError: a tensor has another rank, or ``cache_batch_idx`` cannot choose rows.
    """
    tokens = shape_of(k_cache, "k_cache", 4)[1]
    if table is not None:
        if cache_batch_idx is not None:
            table = chosen(table, table_name, cache_batch_idx, "cache_batch_idx", batch)
        return Cache(k_cache, v_cache, table, shape_of(table, table_name, 2)[1] * tokens)
    if cache_batch_idx is None:
        return Cache(k_cache, v_cache, None, tokens)
    return Cache(k_cache, v_cache, column(cache_batch_idx, "cache_batch_idx"), tokens)


def lengths_of(cache_seqlens: Any, queries: Queries, cache: Cache) -> Any:
    """The lengths in the cache; None: all of a cache without pages is used."""
    if isinstance(cache_seqlens, int):
        if not 0 <= integer("cache_seqlens", cache_seqlens) <= cache.capacity:
            raise UsageError(
                f"expected 0 to {cache.capacity}, what a request's cache holds",
                argument="cache_seqlens",
                value=cache_seqlens,
            )
        return filled(queries.q, queries.batch, cache_seqlens)
    if cache_seqlens is None and cache.table is not None:
        return filled(queries.q, queries.batch, cache.capacity)
    return cache_seqlens


def append(
    k: Any, v: Any, sums: Any, lengths: Any, queries: Queries, cache: Cache, cache_name: Mapping[str, str], scales: Any
) -> Any:
    """Append ``k`` and ``v``, ragged by ``sums`` or ``[batch, new tokens, ...]``; the lengths with them.

    16-bit keys and values are divided by ``scales`` for an e4m3 cache.

    Raises:
        as ``append_kv``, in the caller's names.
    """
    if v is None:
        raise UsageError("None with k, expected the values of the new tokens", argument="v")
    new_tokens = shape_of(k, "k", 4 if sums is None else 3)[1]
    after = lengthened(lengths, new_tokens, sums, queries.batch)
    table = numbers(queries.q, queries.batch) if cache.table is None else cache.table
    try:
        quantised = dtype_of(k, "k") != dtype_of(cache.k, cache_name["k_cache"])
        by = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if quantised else {}
        append_kv(k, v, cache.k, cache.v, table, lengths, q_cu_seq_lens=sums, lengths_include_new=False, **by)
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, {**_APPEND_NAMES, **cache_name}) from error
    return after


def attend_cache(
    queries: Queries,
    cache: Cache,
    lengths: Any,
    options: Options,
    decode: Callable[..., Any] | None = None,
    context: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    """Attention of the queries over the cache with these lengths; output and log-sum-exp, as ``attend``.

    Other operators may take the place of ``paged_decode`` and of ``context_attention``.
    """
    if _is_decode(queries, cache, lengths, options):
        return _decode(queries, cache, lengths, options, decode or paged_decode), None
    return attend(
        queries.q,
        cache.k,
        cache.v,
        options,
        context,
        page_table=cache.table,
        seq_lens=lengths,
        q_cu_seq_lens=queries.sums,
        max_q_len=queries.bound,
        max_seq_len=cache.capacity,
    )


def _is_decode(queries: Queries, cache: Cache, lengths: Any, options: Options) -> bool:
    """Return whether the decode kernels serve: a few causal tokens of each request over many keys, only the output."""
    if queries.sums is not None or options.returns_lse or options.softcap != 0:
        return False
    if cache.table is None and not is_torch(queries.q):
        return False
    # Without a cache, the bits of a token are those of its prompt if they have to be the same.
    if cache.table is None and lengths is None and (cache.capacity < DECODED_FROM or options.batch_invariant):
        return False
    _, q_len, heads, head_dim = shape_of(queries.q, "q", 4)
    requests, _, kv_heads, _ = shape_of(cache.k, options.names["k_cache"], 4)
    if not has_decode_kernel(heads, kv_heads, head_dim, shape_of(cache.v, options.names["v_cache"], 4)[3]):
        return False
    if cache.table is None and requests != queries.batch:
        return False  # whose context attention is an error
    of_e4m3 = dtype_of(cache.k, options.names["k_cache"]) == E4M3
    if options.batch_invariant and of_e4m3 and head_dim not in SEGMENT_HEAD_DIMS:
        return False  # decodes over e4m3 have other bits than prompts there
    return q_len == 1 or (options.causal and q_len <= MOST_DECODED)


def _decode(queries: Queries, cache: Cache, lengths: Any, options: Options, decode: Callable[..., Any]) -> Any:
    q, batch, table = queries.q, queries.batch, cache.table
    if table is None and lengths is None:
        table, lengths = whole_cache(q, batch, cache.capacity)
    elif table is None:
        table = numbers(q, batch)
    elif lengths is None:
        lengths = filled(q, batch, cache.capacity)
    try:
        return decode(
            q,
            cache.k,
            cache.v,
            table,
            lengths,
            max_seq_len=cache.capacity,
            softmax_scale=options.softmax_scale,
            k_scale=options.k_descale,
            v_scale=options.v_descale,
            window_left=options.window[0],
            sinks=options.sinks,
            batch_invariant=options.batch_invariant,
            out=options.out,
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, options.names) from error
