"""What a model's mask says, in the few bytes that the kernels need instead of one byte per query and key.

A model asks for its masks once per forward pass, and hands them to its layers. ``mask`` returns one of these, all of
four dimensions, because transformers passes a mask of four dimensions on as it is:

- None: every request's last query stands at its last key, and nothing is padding.
- int32 ``[batch, 1, 1, 1]``: the keys of each request, the last of which is where its last query stands. Keys behind
  it are room in a cache.
- bool ``[batch, 1, 1, kv_len + q_len]``: which keys are tokens, and then which queries are.
- int32 ``[1, 1, 1, sequences + 1]``: running sums of sequences that are packed into the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...errors import UsageError

_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
# Patterns that the layers say again by ``is_causal`` and ``sliding_window``.
_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    _PACKED,
    _REMAPPED,
}


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    """The mask function that ``register`` gives to transformers' ``AttentionMaskInterface``.

    Args:
        q_length, kv_length: queries and keys that the layers will see; query ``i`` stands at ``q_offset + i``, key
            ``j`` at ``kv_offset + j``. An offset may be a tensor of one element.
        mask_function: which keys a query sees; None: causal.
        attention_mask: bool ``[batch, tokens]``, False where a token is padding, by position; or None.
        use_vmap: whether the model added a pattern of its own to ``mask_function``.

    Returns:
        One of the forms that this module's docstring lists.

    Raises:
        UsageError: the pattern is none that the kernels have; the message names it.
    """
    import torch

    packed = _packed_ids(mask_function, use_vmap)
    if packed is not None:
        return _running_sums(packed.expand(batch_size, -1))
    ends_with_keys = isinstance(q_offset, int) and isinstance(kv_offset, int)
    ends_with_keys = ends_with_keys and q_offset + q_length == kv_offset + kv_length
    bidirectional = _name_of(mask_function) == "bidirectional_mask_function"
    if attention_mask is not None and not _tracing(attention_mask) and bool(attention_mask.all()):
        seen = attention_mask.shape[1]
        attention_mask = None
        if bidirectional and seen != kv_length:
            raise UsageError(f"attention_mask: {seen} tokens for {kv_length} keys, which are not causal")
    if attention_mask is None:
        if ends_with_keys or bidirectional:
            return None
        length = torch.as_tensor(q_offset + q_length - kv_offset, dtype=torch.int32, device=device)
        return length.reshape(1, 1, 1, 1).expand(batch_size, 1, 1, 1).contiguous()
    # By position: what the caller did not mention is a query of this call, or room in a cache.
    positions = torch.arange(kv_length, device=device) + kv_offset
    queries = torch.arange(q_length, device=device) + q_offset
    keys = _at(attention_mask, positions)
    if not bidirectional:
        keys = keys & (positions < q_offset + q_length)
        return torch.cat((keys, _at(attention_mask, queries)), dim=1)[:, None, None, :]
    rows = _at(attention_mask, queries) if kv_length == q_length else torch.ones_like(keys[:, :1]).expand(-1, q_length)
    return torch.cat((keys, rows), dim=1)[:, None, None, :]


def _at(attention_mask: Any, positions: Any) -> Any:
    """Its columns at these positions; a position that it does not reach is a token."""
    last = attention_mask.shape[1] - 1
    return attention_mask[:, positions.clamp(max=last)] | (positions > last)


def _tracing(tensor: Any) -> bool:
    import torch

    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _name_of(function: Callable[..., Any] | None) -> str:
    return "causal_mask_function" if function is None else getattr(function, "__qualname__", repr(function))


def _parts(function: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """The patterns that a mask function is the intersection of, each with its only captured value."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    name = _name_of(function)
    if name == "and_masks.<locals>.and_mask":
        for part in cells[0]:
            yield from _parts(part)
        return
    yield name, next(iter(cells), None)
    if name == _REMAPPED:
        yield from _parts(next(cell for cell in cells if callable(cell)))


def _packed_ids(function: Callable[..., Any] | None, custom: bool) -> Any:
    """The number of the sequence of each token, where sequences are packed.

    Raises:
        UsageError: the pattern is none that the kernels have.
    """
    if custom:
        raise UsageError("mask: the model adds or_mask_function or and_mask_function, which no kernel here honours")
    packed = None
    for name, captured in _parts(function):
        if name not in _KNOWN:
            pattern = name.partition(".<locals>")[0]
            raise UsageError(
                f"mask: the pattern {pattern}; the kernels have causal, sliding windows and packed sequences"
            )
        if name == _PACKED:
            packed = captured
    return packed


def _running_sums(ids: Any) -> Any:
    """Running sums of the sequences' lengths over all rows, from the number of each token's sequence in its row."""
    import torch

    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    sums = starts.flatten().nonzero().flatten()
    end = torch.full_like(sums[:1], ids.numel())
    return torch.cat((sums, end)).to(torch.int32)[None, None, None, :]
