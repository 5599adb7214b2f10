"""Attention of continuous batching: requests of any lengths in one row, over transformers' paged cache."""

from __future__ import annotations

from operator import attrgetter
from threading import local
from typing import Any, NamedTuple
from weakref import ref

from ...attention.paged_cache import PAGE_SIZES
from ...errors import UsageError
from .arguments import Options, Packed, check_rest, packed_of
from .operators import Operators
from .widths import fits

# The attributes that are read of a ``PagedAttentionCache``, besides its ``update``.
_POOLS = {"block_size", "key_cache", "layer_index_to_group_indices", "sliding_windows", "value_cache"}
_POOLS_OF = attrgetter(*_POOLS)


_last = local()


def attend_paged(
    operators: Operators,
    layer: int,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    cache: Any,
    options: Options,
    arguments: dict[str, Any],
) -> Any:
    """Write the new keys and values into the cache, and attend to it.

    A layer of full attention reads the cache's pages where they are, one token of each request by the decode kernels.
    A layer with a sliding window reads the copy that the cache makes of what is in the window.

    Args:
        query: ``[1, heads, tokens, head_dim]``; ``key`` and ``value`` alike: all requests' new tokens.
        cache: transformers' ``PagedAttentionCache``.
        arguments: what is left of the call's arguments: the running sums, the bounds, ``read_index``, ``write_index``.

    Returns:
        ``[1, tokens, heads, head_dim]``.

    Raises:
        UsageError: a mask, a block table, or anything else that is not honoured.
    """
    if attention_mask is not None:
        raise UsageError("attention_mask: given with a paged cache, where the lengths say what is seen; expected None")
    if arguments.pop("block_table", None) is not None:
        raise UsageError("block_table: set max_blocks_per_request=0; decoding reads the pages by read_index")
    try:
        _POOLS_OF(cache)
    except AttributeError:
        named = sorted(_POOLS)
        raise UsageError(f"cache: a {type(cache).__name__} without {named}, as transformers 5.17 has them") from None
    read, write, tokens = arguments.pop("read_index"), arguments.pop("write_index"), query.shape[2]
    # Pages of other columns than a kernel's would be copied as a whole.
    pool = _pages_in_place(cache, layer, read) if fits(query.shape[-1], value.shape[-1]) else None
    if pool is None:
        key, value = cache.update(key, value, layer, read_index=read, write_index=write)
        packed = _packed(cache, arguments, tokens, options)
        check_rest(arguments)
        return operators.ragged(_by_token(query), key, value, *packed, **options.words()).unsqueeze(0)
    group, k_cache, v_cache = pool
    packed = _packed(cache, arguments, tokens, options)
    check_rest(arguments)
    for states, stored in ((key, k_cache), (value, v_cache)):
        stored.index_copy_(0, write[group], _by_token(states))
    size = cache.block_size
    k, v = (stored.view(-1, size, *stored.shape[1:]) for stored in (k_cache, v_cache))
    table, lengths = _page_table_of_step(layer, read[group], packed, size)
    if packed.q_bound == 1 and tokens == lengths.shape[0]:
        q = query.permute(2, 0, 1, 3)
        return operators.cached(q, k, v, cache_seqlens=lengths, block_table=table, **options.words()).transpose(0, 1)
    q = _by_token(query)
    return operators.ragged(q, k, v, *packed, seqused_k=lengths, block_table=table, **options.words()).unsqueeze(0)


def _by_token(states: Any) -> Any:
    """``[tokens, heads, head_dim]`` of the only row of ``[1, heads, tokens, head_dim]``."""
    return states[0].transpose(0, 1)


def _pages_in_place(cache: Any, layer: int, read: Any) -> tuple[int, Any, Any] | None:
    """The layer's group and pools, ``[tokens, kv_heads, head_dim]``; None where the cache must make a copy."""
    group, index = cache.layer_index_to_group_indices[layer]
    windowed = cache.sliding_windows[layer] != 1
    # An empty read index: all keys are new, and come with the call.
    if windowed or read[group].numel() == 0 or cache.block_size not in PAGE_SIZES:
        return None
    return group, cache.key_cache[index], cache.value_cache[index]


def _packed(cache: Any, arguments: dict[str, Any], tokens: int, options: Options) -> Packed:
    """The running sums and bounds of the layer; a cache with two kinds of layers has them by kind."""
    kind = "full_attention" if options.window_size == (-1, -1) else "sliding_attention"
    for name in ("cu_seq_lens_k", "max_seqlen_k", "max_length_k"):
        if isinstance(arguments.get(name), dict):
            arguments[name] = arguments[name][kind]
    packed = packed_of(arguments, tokens)
    if packed is None:
        raise UsageError("cu_seq_lens_q, cu_seq_lens_k: None with a paged cache, expected the requests' running sums")
    return packed


class _Pages(NamedTuple):
    """The page table that a layer used, and weak references to what it was made from."""

    layer: int
    read: Any
    sums: Any
    bound: int
    table: Any
    lengths: Any


def _page_table_of_step(layer: int, read: Any, packed: Packed, size: int) -> tuple[Any, Any]:
    """The page table of the layer before, where this is the same step, or a new one.

    A step hands the same tensors to its layers, which come in order: to its first layer they are new, whatever it is
    that they held before. What is made while the stream captures belongs to the graph.
    """
    import torch

    if torch.compiler.is_compiling() or (read.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _page_table(read, packed, size)
    sums, bound, last = packed.k_sums, packed.k_bound, getattr(_last, "pages", None)
    if last is None or layer <= last.layer or last.bound != bound or last.read() is not read or last.sums() is not sums:
        last = _Pages(layer, ref(read), ref(sums), bound, *_page_table(read, packed, size))
    _last.pages = last._replace(layer=layer)
    return last.table, last.lengths


def _page_table(read: Any, packed: Packed, size: int) -> tuple[Any, Any]:
    """Page ids, int32 ``[requests, columns]``, and lengths, int32, from where each key is; made on the device.

    A column behind a request's keys holds some page, which nothing reads.
    """
    import torch

    sums = packed.k_sums
    columns = torch.arange(-(-packed.k_bound // size), device=read.device) * size
    firsts = (sums[:-1, None] + columns).clamp_(max=read.shape[0] - 1)
    table = torch.div(read[firsts], size, rounding_mode="floor").to(torch.int32)
    return table, sums[1:] - sums[:-1]
