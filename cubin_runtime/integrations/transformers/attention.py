"""The attention function of a model's layers: which operator serves which call."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from .arguments import Options, Packed, check_rest, options_of, packed_of
from .continuous import attend_paged
from .operators import Operators


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
    **given: Any,
) -> tuple[Any, None]:
    """The function that ``register`` gives to transformers' ``AttentionInterface``, its operators bound.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, bf16 or fp16.
        key, value: ``[batch, kv_heads, kv_len, head_dim]``.
        attention_mask: what ``masks.mask`` returned.
        sliding_window: keys that a token sees, its own included.
        s_aux: ``[heads]``, a logit of each head in the softmax's denominator.
        given: ``cache`` with what continuous batching says about it, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of
            sequences that the caller packed into one row; the rest is refused unless it has no consequence.

    Returns:
        ``[batch, q_len, heads, head_dim]``, and None for the probabilities. Rows of padding are 0.

    Raises:
        UsageError: an argument is not honoured; the message names it.
    """
    options = options_of(module, scaling, dropout, sliding_window, softcap, is_causal, s_aux)
    cache = given.pop("cache", None)
    if cache is not None:
        return attend_paged(operators, module.layer_idx, query, key, value, attention_mask, cache, options, given), None
    packed = packed_of(given, query.shape[2])
    check_rest(given)
    if packed is not None:
        return _attend_packed(operators, query, key, value, packed, options), None
    return _attend_rows(operators, query, key, value, attention_mask, options), None


def _attend_rows(operators: Operators, query: Any, key: Any, value: Any, attention_mask: Any, options: Options) -> Any:
    """Attention of the rows of a batch, with a mask of one of the forms that ``masks`` lists."""
    kept, tokens = tuple(key.shape[2:3]), query.shape[2]
    if attention_mask is None:
        return operators.even(_by_token(query), key.transpose(1, 2), value.transpose(1, 2), **options.words())
    shape = tuple(attention_mask.shape)
    form = (str(attention_mask.dtype).removeprefix("torch."), shape[1:] if len(shape) == 4 else None)
    if form == ("int32", (1, 1, 1)):
        return _attend_prefix(operators, query, key, value, attention_mask.flatten(), options)
    if form == ("bool", (1, 1, kept[0] + tokens)):
        return _attend_padded(operators, query, key, value, attention_mask[:, 0, 0], options)
    if form[0] == "int32" and form[1] is not None and form[1][:2] == (1, 1) and shape[0] == 1:
        sums = attention_mask.flatten()
        return _attend_packed(operators, query, key, value, Packed(sums, sums, tokens, tokens), options)
    raise UsageError(
        f"attention_mask: {form[0]} of shape {shape}; a dense mask has no kernel here. Give the model a mask of "
        "[batch, tokens] or none, so that it asks for this implementation's own"
    )


def _attend_prefix(operators: Operators, query: Any, key: Any, value: Any, lengths: Any, options: Options) -> Any:
    """Attention over the first keys of a cache with room."""
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    return operators.cached(_by_token(query), k, v, cache_seqlens=lengths, **options.words())


def _attend_padded(operators: Operators, query: Any, key: Any, value: Any, valid: Any, options: Options) -> Any:
    """Attention without the tokens that are padding, which are sorted behind the others; nothing waits for a length."""
    import torch

    batch, heads, q_len, _ = query.shape
    kept = key.shape[2]
    (k_order, k_sums), (q_order, q_sums) = (_order(part) for part in (valid[:, :kept], valid[:, kept:]))
    q, k, v = (
        states.transpose(1, 2).flatten(0, 1).index_select(0, order)
        for states, order in ((query, q_order), (key, k_order), (value, k_order))
    )
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    operators.ragged(q, k, v, q_sums, k_sums, q_len, kept, out=out, **options.words())
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


def _order(valid: Any) -> tuple[Any, Any]:
    """Where the tokens of all rows are, padding last, and running sums of the rows' tokens."""
    import torch

    order = torch.argsort((~valid).flatten().to(torch.int8), stable=True)
    sums = torch.zeros(valid.shape[0] + 1, dtype=torch.int32, device=valid.device)
    sums[1:] = valid.sum(1).cumsum(0)
    return order, sums
