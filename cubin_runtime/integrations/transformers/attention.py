"""The attention function of a model's layers: which operator serves which call."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from .arguments import (
    UNUSED,
    Options,
    Packed,
    causal_without_mask,
    check_rest,
    check_window,
    check_window_without_mask,
    options_of,
    packed_of,
)
from .continuous import attend_paged
from .dense import drafts_of, is_dense
from .masks import EVERY_KEY, Mask, read, read_before
from .operators import Operators
from .widths import fitting


def attention(
    operators: Operators,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    **arguments: Any,
) -> tuple[Any, None]:
    """The function that ``register`` gives to transformers' ``AttentionInterface``, its operators bound.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, bf16 or fp16.
        key, value: ``[batch, kv_heads, kv_len, head_dim]``.
        attention_mask: what ``masks.mask`` returned, which says what is causal; without one, ``is_causal`` does.
        sliding_window: keys that a token sees, its own included.
        s_aux: ``[heads]``, a logit of each head in the softmax's denominator.
        arguments: ``cache`` with what continuous batching says about it, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of
            sequences that the caller packed into one row; the rest is refused unless it has no consequence.

    Returns:
        ``[batch, q_len, heads, head_dim]``, and None for the probabilities. Rows of padding are 0.

    Raises:
        UsageError: an argument is not honoured; the message names it.
    """
    words = (scaling, dropout, sliding_window, softcap, s_aux)
    operators = fitting(operators, query.shape[-1], value.shape[-1])
    q_len, kv_len, packed = query.shape[2], key.shape[2], None
    if not UNUSED.issuperset(arguments):
        cache = arguments.pop("cache", None)
        if cache is not None:
            # Requests in one row are causal whatever the layer says, as with transformers' own functions.
            options = options_of(True, *words)
            layer = module.layer_idx
            return attend_paged(operators, layer, query, key, value, attention_mask, cache, options, arguments), None
        packed = packed_of(arguments, q_len)
        check_rest(arguments)
    if attention_mask is None:
        check_window_without_mask(sliding_window, packed, kv_len)
        options = options_of(causal_without_mask(module, is_causal, 1 if packed else q_len), *words)
        return _attend_rows(operators, query, key, value, Mask(), packed, options), None
    mask = read_before(attention_mask, q_len, kv_len)
    if mask is None and is_dense(attention_mask, q_len, kv_len):
        if packed is not None or sliding_window is not None:
            raise UsageError("attention_mask: dense, with packed sequences or a sliding window; expected it alone")
        return _attend_masked(operators, query, key, value, attention_mask, options_of(True, *words)), None
    mask = mask or read(attention_mask, q_len, kv_len)
    options = options_of(mask.pattern != EVERY_KEY, *words)
    check_window(mask.pattern, sliding_window)
    return _attend_rows(operators, query, key, value, mask, packed, options), None


def paged_attention(operators: Operators, *positional: Any, **named: Any) -> tuple[Any, None]:
    """``attention`` for continuous batching alone: under this name transformers asks for no mask.

    Raises:
        UsageError: there is no cache of continuous batching, or as ``attention``.
    """
    if named.get("cache") is None:
        raise UsageError("cache: None; an implementation called paged|... is for generate_batch, which gives a cache")
    return attention(operators, *positional, **named)


def _attend_rows(
    operators: Operators, query: Any, key: Any, value: Any, mask: Mask, packed: Packed | None, options: Options
) -> Any:
    """Attention of the rows of a batch, with a mask of one of the forms that ``masks`` lists."""
    if packed is not None and (mask.lengths is not None or mask.places is not None):
        raise UsageError("attention_mask, cu_seq_lens_q: both; expected packed sequences without padding and room")
    if mask.lengths is not None:
        return _attend_prefix(operators, query, key, value, mask.lengths, options)
    if mask.places is not None:
        return _attend_sorted(operators, query, key, value, mask.places, mask.chunks, options)
    if packed is None and mask.sums is not None:
        packed = Packed(mask.sums, mask.sums, query.shape[2], query.shape[2])
    if packed is not None:
        return _attend_packed(operators, query, key, value, packed, options)
    return operators.even(_by_token(query), key.transpose(1, 2), value.transpose(1, 2), **options.words())


def _attend_prefix(operators: Operators, query: Any, key: Any, value: Any, lengths: Any, options: Options) -> Any:
    """Attention over the first keys of a cache with room."""
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    return operators.cached(_by_token(query), k, v, cache_seqlens=lengths, **options.words())


def _attend_masked(operators: Operators, query: Any, key: Any, value: Any, dense: Any, options: Options) -> Any:
    """Attention of a few new tokens, with a mask among them."""
    lengths, bits = drafts_of(dense, query.shape[0])
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    words = {"softmax_scale": options.softmax_scale, "softcap": options.softcap, "s_aux": options.s_aux}
    return operators.masked(_by_token(query), k, v, lengths=lengths, mask=bits, **words)


def _attend_sorted(
    operators: Operators, query: Any, key: Any, value: Any, places: Any, chunks: int, options: Options
) -> Any:
    """Attention within chunks, tokens sorted by chunk, those that take no part last; nothing waits for a length."""
    import torch

    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    (k_order, k_sums), (q_order, q_sums) = (_order(part, chunks) for part in (places[:, :kv_len], places[:, kv_len:]))
    q, k, v = (
        states.transpose(1, 2).flatten(0, 1).index_select(0, order)
        for states, order in ((query, q_order), (key, k_order), (value, k_order))
    )
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    operators.ragged(q, k, v, q_sums, k_sums, q_len, kv_len, out=out, **options.words())
    return torch.empty_like(out).index_copy_(0, q_order, out).view(batch, q_len, heads, -1)


def _attend_packed(operators: Operators, query: Any, key: Any, value: Any, packed: Packed, options: Options) -> Any:
    """Attention of sequences that follow one another through the rows."""
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = operators.ragged(q, k, v, *packed, **options.words())
    return out.view(query.shape[0], query.shape[2], query.shape[1], -1)


def _by_token(query: Any) -> Any:
    """``[batch, q_len, heads, head_dim]``, its tokens at one stride."""
    q = query.transpose(1, 2)
    even = q.shape[0] == 1 or q.stride(0) == q.shape[1] * q.stride(1)
    return q if even else q.contiguous()


def _order(places: Any, chunks: int) -> tuple[Any, Any]:
    """The tokens by row and chunk, those that take no part last, and running sums of each chunk's tokens."""
    import torch

    count = places.shape[0] * chunks
    rows = torch.arange(0, count, chunks, device=places.device)[:, None]
    numbers = torch.where(places < chunks, places + rows, count).flatten()
    numbers, order = numbers.to(torch.int8 if count < 128 else torch.int32).sort(stable=True)
    bounds = torch.arange(count + 1, dtype=numbers.dtype, device=places.device)
    return order, torch.searchsorted(numbers, bounds, out_int32=True)
