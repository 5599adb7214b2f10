"""The content of a model's mask, in the few bytes that the kernels need instead of one byte per query and key.

A model asks for its masks once per forward pass, and hands them to its layers. ``mask`` returns one of these, all of
four dimensions, because transformers passes a mask of four dimensions on as it is. A model that computes with its mask
itself gets a UsageError (``opaque``). Where the forward pass is compiled, there is torch's error alone: the second
dimension is a number of heads that no model has, and so of no size that could be added to scores. The third is the
pattern (``EVERY_KEY``, ``CAUSAL``, ``WINDOW``): layers do not always say that of the mask they are given.

- int16 ``[batch, heads, pattern, kv_len]``, all 0: every request's last query stands at its last key, and nothing is
  padding. For ``EVERY_KEY`` it has one head, and can be added to scores.
- int32 ``[batch, heads, pattern, 1]``: the keys of each request, the last of which is where its last query stands. Keys
  behind it are room in a cache.
- bool ``[batch, heads, pattern, kv_len + q_len]``: which keys are tokens, and then which queries are.
- int32 ``[1, heads, pattern, sequences + 1]``: running sums of sequences that are packed into the rows of the batch.
- int32 ``[batch, heads, WINDOW + chunks, kv_len + q_len]``: in which of so many chunks of its request each key is, and
  then each query; ``chunks`` for a token that takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import local
from typing import Any, NamedTuple
from weakref import ref

from ...errors import UsageError
from ...tensor import dtype_word

EVERY_KEY, CAUSAL, WINDOW = 1, 2, 3
_PATTERNS = (EVERY_KEY, CAUSAL, WINDOW)
_HEADS = 61
_CAUSAL = "causal_mask_function"
_OVERLAY = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_CHUNKED = "chunked_overlay.<locals>.inner_mask"
_KNOWN = {_CAUSAL, "bidirectional_mask_function", _OVERLAY, _PACKED, _REMAPPED, _CHUNKED}


class Mask(NamedTuple):
    """A mask as a layer reads it: its pattern, None without a mask, and the one of the other values that its form has.

    ``lengths`` are int32 ``[batch]``, ``sums`` int32 ``[sequences + 1]``, ``places`` ``[batch, kv_len + q_len]`` the
    chunk of each token, ``chunks`` for one that takes no part (padding, with one chunk).
    """

    pattern: int | None = None
    lengths: Any = None
    places: Any = None
    chunks: int = 1
    sums: Any = None


class _Reads(local):
    """The plain masks that a thread read last, as weak references, with what ``read`` gave."""

    masks: tuple[tuple[Any, tuple[int, int], Mask], ...] = ()


_reads = _Reads()
_MOST_READS = 2  # a model has masks of two kinds


def read_before(attention_mask: Any, q_len: int, kv_len: int) -> Mask | None:
    """Return what ``read`` gave a layer before; None: nothing, or one with other numbers of queries or keys."""
    reading = getattr(attention_mask, "last_read", None)
    if reading is not None:
        return reading[1] if reading[0] == (q_len, kv_len) else None
    if _is_compiling():
        return None
    for mask, lengths, result in _reads.masks:
        if mask() is attention_mask and lengths == (q_len, kv_len):
            return result
    return None


def read(attention_mask: Any, q_len: int, kv_len: int) -> Mask:
    """Return what ``mask`` returned, for a layer with ``q_len`` queries and ``kv_len`` keys.

    Raises:
        UsageError: it has another layout, or was made for another number of keys.
    """
    plain = getattr(attention_mask, "plain", None)
    mask = _read(attention_mask if plain is None else plain, q_len, kv_len)
    if mask.places is not None or _is_compiling():
        return mask
    # Views alone, which follow the mask. A plain one would keep itself alive by a view in its attribute.
    if plain is not None:
        attention_mask.last_read = (q_len, kv_len), mask
    else:
        _reads.masks = ((ref(attention_mask), (q_len, kv_len), mask), *_reads.masks[: _MOST_READS - 1])
    return mask


def _is_compiling() -> bool:
    import torch

    return bool(torch.compiler.is_compiling())


def _read(attention_mask: Any, q_len: int, kv_len: int) -> Mask:
    shape, dtype = tuple(attention_mask.shape), dtype_word(attention_mask.dtype)
    if dtype == "int16" and shape[1:] in [(1, EVERY_KEY, kv_len), (_HEADS, CAUSAL, kv_len), (_HEADS, WINDOW, kv_len)]:
        return Mask(shape[2])
    if len(shape) == 4 and shape[1] == _HEADS and shape[2] in _PATTERNS:
        pattern, last = shape[2], shape[3]
        if dtype == "int32" and last == 1:
            return Mask(pattern, lengths=attention_mask[:, 0, 0, 0])
        if dtype == "bool" and last == kv_len + q_len:
            return Mask(pattern, places=~attention_mask[:, 0, 0])
        if dtype == "int32" and shape[0] == 1:
            return Mask(pattern, sums=attention_mask[0, 0, 0])
    if len(shape) == 4 and dtype == "int32" and shape[1] == _HEADS and shape[2] > WINDOW and shape[3] == kv_len + q_len:
        return Mask(CAUSAL, places=attention_mask[:, 0, 0], chunks=shape[2] - WINDOW)
    raise UsageError(
        f"attention_mask: {dtype} of shape {shape} for {q_len} queries and {kv_len} keys; a dense mask has a kernel "
        "only for at most 64 queries. Give the model a mask of [batch, tokens] or none, so that it asks for this "
        "implementation's own"
    )


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
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Any:
    """The mask function that ``register`` gives to transformers' ``AttentionMaskInterface``.

    Args:
        q_length, kv_length: queries and keys that the layers will see; query ``i`` stands at ``q_offset + i``, key
            ``j`` at ``kv_offset + j``. An offset may be a tensor of one element.
        mask_function: which keys a query sees; None: causal.
        attention_mask: bool ``[batch, tokens]``, False where a token is padding, by position; or None.
        use_vmap: whether the model added a pattern of its own to ``mask_function``.
        allow_is_causal_skip: False with one query: transformers may hand the mask to a compiled forward pass.

    Returns:
        One of the forms that this module's docstring lists.

    Raises:
        UsageError: the pattern is none that the kernels have; the message names it.
    """
    import torch

    pattern = _pattern(mask_function, use_vmap)
    plain = _form(batch_size, (q_length, q_offset), (kv_length, kv_offset), pattern, attention_mask, device)
    # torch traces no tensor of another class; and what lets every query see every key is right in every sum.
    traced = torch.compiler.is_compiling() or (q_length == 1 and not allow_is_causal_skip)
    if traced or (pattern.kind == EVERY_KEY and plain.dtype == torch.int16):
        return plain
    from .opaque import opaque

    return opaque(plain)


def _form(
    batch_size: int,
    queries_at: tuple[int, Any],
    keys_at: tuple[int, Any],
    said: _Pattern,
    attention_mask: Any,
    device: Any,
) -> Any:
    """The form of a mask; ``queries_at`` and ``keys_at`` are their numbers and the positions of the first."""
    import torch

    (q_length, q_offset), (kv_length, kv_offset) = queries_at, keys_at
    pattern, window, packed, chunked = said
    if packed is not None:
        return _running_sums(packed.expand(batch_size, -1)).expand(1, _HEADS, pattern, -1)
    ends_with_keys = isinstance(q_offset, int) and isinstance(kv_offset, int)
    ends_with_keys = ends_with_keys and q_offset + q_length == kv_offset + kv_length
    bidirectional = pattern == EVERY_KEY
    if attention_mask is not None and not _tracing(attention_mask) and bool(attention_mask.all()):
        seen = attention_mask.shape[1]
        attention_mask = None
        if bidirectional and seen != kv_length:
            raise UsageError(f"attention_mask: {seen} tokens for {kv_length} keys, which are not causal")
    if chunked is not None:
        return _chunks(*chunked, q_length, kv_length, q_offset, kv_offset, attention_mask)
    if attention_mask is None:
        if ends_with_keys or bidirectional:
            nothing = torch.zeros(1, 1, 1, 1, dtype=torch.int16, device=device)
            return nothing.expand(batch_size, 1 if bidirectional else _HEADS, pattern, kv_length)
        length = torch.as_tensor(q_offset + q_length - kv_offset, dtype=torch.int32, device=device)
        return length.expand(batch_size).contiguous()[:, None, None, None].expand(-1, _HEADS, pattern, 1)
    # By position: what the caller did not mention is a query of this call, or room in a cache.
    positions = torch.arange(kv_length, device=device) + kv_offset
    queries = torch.arange(q_length, device=device) + q_offset
    keys = _at(attention_mask, positions)
    if bidirectional:  # the queries may be a decoder's, of which the mask of an encoder's keys says nothing
        rows = torch.ones_like(keys[:, :1]).expand(-1, q_length)
    else:
        keys, rows = keys & (positions < q_offset + q_length), _at(attention_mask, queries)
    if window is not None and not _tracing(keys):
        _check_window(window, keys, rows, queries - kv_offset)
    return torch.cat((keys, rows), dim=1)[:, None, None, :].expand(-1, _HEADS, pattern, -1)


def _check_window(window: int, keys: Any, rows: Any, last: Any) -> None:
    """Check that a window of tokens, as the kernels count it, is one of positions; ``last`` is each query's own key.

    Raises:
        UsageError: padding behind a request's first token moves keys into a query's window.
    """
    import torch

    counts = torch.nn.functional.pad(keys.cumsum(1), (1, 0))
    before = counts[:, (last + 1 - window).clamp(min=0)]
    if bool((rows & (before > 0) & (counts[:, last + 1] - before < window)).any()):
        raise UsageError(
            f"attention_mask: padding among the last {window} positions, behind other tokens; a window of the kernels "
            "counts tokens, so expected padding before or behind all tokens of a request"
        )


def _chunks(
    size: int, padding: Any, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any, attention_mask: Any
) -> Any:
    """The chunk of each key and query, from that of a request's first query on.

    ``padding`` ``[batch]`` tokens are on the left of each.
    """
    import torch

    keys = torch.arange(kv_length, device=padding.device) + kv_offset
    queries = torch.arange(q_length, device=padding.device) + q_offset
    first = torch.div(queries[:1] - padding[:, None], size, rounding_mode="floor")
    chunks = (q_length - 1) // size + 2
    parts = []
    for positions in (keys, queries):
        place = torch.div(positions - padding[:, None], size, rounding_mode="floor") - first
        used = (place >= 0) & (positions <= queries[-1]) & (positions >= padding[:, None])
        if attention_mask is not None:
            used &= _at(attention_mask, positions)
        parts.append(torch.where(used, place, chunks))
    return torch.cat(parts, dim=1).to(torch.int32)[:, None, None, :].expand(-1, _HEADS, WINDOW + chunks, -1)


def _at(attention_mask: Any, positions: Any) -> Any:
    """Return the columns of a mask at these positions; a position that it does not reach is a token."""
    last = attention_mask.shape[1] - 1
    return attention_mask[:, positions.clamp(max=last)] | (positions > last)


def _tracing(tensor: Any) -> bool:
    import torch

    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _name_of(function: Callable[..., Any] | None) -> str:
    return _CAUSAL if function is None else getattr(function, "__qualname__", repr(function))


def _parts(function: Callable[..., Any] | None) -> Iterator[tuple[str, list[Any]]]:
    """The patterns that a mask function is the intersection of, each with its captured values, by their names.

    Raises:
        UsageError: dynamo traces a function that captures values, which nobody sees then.
    """
    import torch

    if function is not None and torch.compiler.is_dynamo_compiling():
        # Of a function's attributes torch traces this one, and no qualified name.
        name = function.__code__.co_name
        if name not in _KNOWN:
            raise UsageError(
                f"mask: a pattern that captures values ({name}), which a compiled forward pass does not show; make the "
                "masks before it, as generate does"
            )
        yield name, []
        return
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    name = _name_of(function)
    if name == "and_masks.<locals>.and_mask":
        for part in cells[0]:
            yield from _parts(part)
        return
    yield name, cells
    if name == _REMAPPED:
        yield from _parts(next(cell for cell in cells if callable(cell)))


class _Pattern(NamedTuple):
    """A pattern, the size of its window, the sequence of each token where sequences are packed, and size and padding of
    chunks."""

    kind: int
    window: int | None
    packed: Any
    chunked: tuple[int, Any] | None


def _pattern(function: Callable[..., Any] | None, custom: bool) -> _Pattern:
    """The content of a mask function.

    Raises:
        UsageError: the pattern is none that the kernels have.
    """
    if custom:
        raise UsageError("mask: the model adds or_mask_function or and_mask_function, which no kernel here honours")
    parts = dict(_parts(function))
    unknown = parts.keys() - _KNOWN
    if not unknown:
        unknown = {name for name in (_OVERLAY, _CHUNKED) if name in parts and _CAUSAL not in parts}
    if not unknown and _CHUNKED in parts:
        unknown = parts.keys() & {_OVERLAY, _PACKED}
    if unknown:
        name = min(unknown).partition(".<locals>")[0]
        raise UsageError(
            f"mask: the pattern {name}; the kernels have causal, causal sliding windows, chunks and packed sequences"
        )
    kind = EVERY_KEY if _CAUSAL not in parts else WINDOW if _OVERLAY in parts else CAUSAL
    window, packed, chunked = (parts.get(name) for name in (_OVERLAY, _PACKED, _CHUNKED))
    of_chunks = (chunked[0], chunked[1]) if chunked else None
    return _Pattern(kind, window[0] if window else None, packed[0] if packed else None, of_chunks)


def _running_sums(ids: Any) -> Any:
    """Running sums of the sequences' lengths over all rows, from the number of each token's sequence in its row."""
    import torch

    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    sums = starts.flatten().nonzero().flatten()
    end = torch.full_like(sums[:1], ids.numel())
    return torch.cat((sums, end)).to(torch.int32)[None, None, None, :]
