"""Views of FlashInfer's tensor layouts as our operators take them: same memory, other shapes and strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...attention.checks import word
from ...attention.paged_cache import LAYOUTS
from ...dtypes import ITEM_BYTES
from ...errors import UsageError
from ...tensor import TensorView, view_of


def check_layout(kv_layout: str) -> None:
    """Raise ``UsageError`` for an unknown layout of a cache."""
    if word("kv_layout", kv_layout) not in LAYOUTS:
        raise UsageError("expected NHD or HND", argument="kv_layout", value=repr(kv_layout))


def cache_pair(kv_cache: Any, kv_layout: str, name: str = "kv_cache") -> tuple[TensorView, TensorView]:
    """K and V, 4 dimensions each in ``kv_layout``, from a pair or from one tensor that holds both.

    One tensor is ``[pages, 2, ...]``, or ``[pages, 1, ...]`` where V is K.

    Raises:
        UsageError: another shape, or an unknown layout.
    """
    check_layout(kv_layout)
    if isinstance(kv_cache, (tuple, list)):
        if len(kv_cache) != 2:
            raise UsageError(f"{len(kv_cache)} tensors, expected K and V", argument=name)
        parts = [view_of(part, f"{name}[{place}]") for place, part in enumerate(kv_cache)]
    else:
        parts = _halves(view_of(kv_cache, name), name)
    for part in parts:
        if len(part.shape) != 4:
            raise UsageError(
                f"K or V of shape {part.shape}, expected 4 dimensions in layout {kv_layout}", argument=name
            )
    return parts[0], parts[1]


def cache_pair_by_head(kv_cache: Any, kv_layout: str, name: str = "kv_cache") -> tuple[TensorView, TensorView]:
    """K and V as ``[pages, kv_heads, page_size, head_dim]``; arguments and errors as ``cache_pair``."""
    key, value = cache_pair(kv_cache, kv_layout, name)
    return (_swapped(key), _swapped(value)) if kv_layout == "NHD" else (key, value)


def latent_cache(kv_cache: Any, name: str = "kv_cache") -> TensorView:
    """A latent cache as ``[pages, 1, page_size, width]``, which may lack the 1.

    Raises:
        UsageError: it has another rank, or more than one head.
    """
    view = view_of(kv_cache, name)
    if len(view.shape) == 3:
        pages, tokens, width = view.shape
        strides = (view.strides[0], view.strides[0], *view.strides[1:])
        return replace(view, shape=(pages, 1, tokens, width), strides=strides)
    if len(view.shape) != 4 or view.shape[1] != 1:
        raise UsageError(
            f"shape {view.shape}, expected [pages, page_size, width] or [pages, 1, page_size, width]", argument=name
        )
    return view


def without(view: TensorView, axis: int) -> TensorView:
    """The first item of ``view`` along ``axis``."""
    return _item(view, axis, 0)


def nested_tokens(view: TensorView, batch: int, q_len: int) -> TensorView:
    """``[batch * q_len, ...]`` as ``[batch, q_len, ...]``."""
    return replace(view, shape=(batch, q_len, *view.shape[1:]), strides=(q_len * view.strides[0], *view.strides))


def flat_tokens(view: TensorView, name: str) -> TensorView:
    """``[batch, q_len, ...]`` as ``[tokens, ...]``.

    Raises:
        UsageError: the stride between requests is not ``q_len`` times the one between tokens.
    """
    batch, q_len = view.shape[:2]
    if batch > 1 and q_len > 1 and view.strides[0] != q_len * view.strides[1]:
        raise UsageError(
            f"strides {view.strides}, expected requests at {q_len} times the tokens' distance", argument=name
        )
    step = view.strides[1] if q_len > 1 else view.strides[0]
    return replace(view, shape=(batch * q_len, *view.shape[2:]), strides=(step, *view.strides[2:]))


def like_query(q: TensorView, view: TensorView, name: str, trailing: int) -> TensorView:
    """``view`` with the leading dimensions of ``q``, up to the heads; ``trailing`` dimensions follow them.

    Where ``q`` has ``[batch, q_len, heads, head_dim]``, ``view`` may have ``[batch * q_len, heads, ...]``; where it has
    ``[batch, heads, head_dim]``, ``[batch, 1, heads, ...]``.

    Raises:
        UsageError: ``view`` has another shape.
    """
    leading, end = q.shape[:-1], len(view.shape) - trailing
    shape, row = view.shape[:end], view.shape[end:]
    if shape == leading:
        return view
    if len(leading) == 3 and shape == (leading[0] * leading[1], leading[2]):
        return nested_tokens(view, leading[0], leading[1])
    if len(shape) == 3 and shape[1] == 1 and (shape[0], shape[2]) == leading:
        return without(view, 1)
    raise UsageError(f"shape {view.shape}, expected {(*leading, *row)}", argument=name)


def _halves(view: TensorView, name: str) -> list[TensorView]:
    if len(view.shape) == 4 and view.shape[1] == 1:
        return [view, view]
    if len(view.shape) != 5 or view.shape[1] not in (1, 2):
        raise UsageError(f"shape {view.shape}, expected [pages, 2, ...], [pages, 1, ...] or a pair", argument=name)
    return [_item(view, 1, 0), _item(view, 1, view.shape[1] - 1)]


def _item(view: TensorView, axis: int, index: int) -> TensorView:
    pointer = view.pointer + index * view.strides[axis] * ITEM_BYTES[view.dtype]
    shape, strides = ((*of[:axis], *of[axis + 1 :]) for of in (view.shape, view.strides))
    return replace(view, pointer=pointer, shape=shape, strides=strides)


def _swapped(view: TensorView) -> TensorView:
    """``view`` with its second and third dimensions swapped."""
    shape, strides = ((of[0], of[2], of[1], of[3]) for of in (view.shape, view.strides))
    return replace(view, shape=shape, strides=strides)
