"""From FlashInfer's arguments to our calls: caches, outputs, scales, query lengths; refusals name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..attention.checks import integer
from ..attention.paged_cache import LAYOUTS
from ..attention.runtime import Runtime, default_runtime
from ..attention.trtllm_gen.checks import check_device, check_running_sum, check_vector
from ..dtypes import ITEM_BYTES
from ..errors import UsageError
from ..tensor import TensorView, view_of


def process_runtime() -> Runtime:
    """The runtime that these operators use."""
    return default_runtime()


def refuse(operator: str, given: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> None:
    """Raise ``UsageError`` for options of the peer that no kernel here honours, unless None or at their defaults."""
    for name, value in given.items():
        default = (defaults or {}).get(name, False)
        is_plain = isinstance(value, (bool, int, float, str))
        if value is None or (is_plain and value == default):
            continue
        came = repr(value) if is_plain else f"a {type(value).__name__}"  # printing a tensor would wait for the device
        raise UsageError(f"{name}={came}: {operator} has no kernel that honours it; expected {default or None!r}")


def split_cache(kv_cache: Any, kv_layout: str, name: str = "kv_cache") -> tuple[TensorView, TensorView]:
    """K and V as ``[pages, kv_heads, page_size, head_dim]``; forms and errors as ``cache_pair``."""
    key, value = cache_pair(kv_cache, kv_layout, name)
    if kv_layout == "NHD":
        return _permuted(key, (0, 2, 1, 3)), _permuted(value, (0, 2, 1, 3))
    return key, value


def cache_pair(kv_cache: Any, kv_layout: str, name: str = "kv_cache") -> tuple[TensorView, TensorView]:
    """K and V in their layout, 4 dimensions each: of a pair, or of one tensor that holds both.

    One tensor is ``[pages, 2, ...]``, or ``[pages, 1, ...]`` where K and V are the same memory.

    Raises:
        UsageError: another form, or an unknown layout.
    """
    if kv_layout not in LAYOUTS:
        raise UsageError(f"kv_layout={kv_layout!r}: expected NHD or HND")
    if isinstance(kv_cache, (tuple, list)):
        if len(kv_cache) != 2:
            raise UsageError(f"{name}: {len(kv_cache)} tensors, expected K and V")
        parts = [view_of(part, f"{name}[{place}]") for place, part in enumerate(kv_cache)]
    else:
        parts = _halves(view_of(kv_cache, name), name)
    for part in parts:
        if len(part.shape) != 4:
            raise UsageError(f"{name}: K or V of shape {part.shape}, expected 4 dimensions in layout {kv_layout}")
    return parts[0], parts[1]


def _halves(view: TensorView, name: str) -> list[TensorView]:
    if len(view.shape) == 4 and view.shape[1] == 1:
        return [view, view]
    if len(view.shape) != 5 or view.shape[1] not in (1, 2):
        raise UsageError(f"{name}: shape {view.shape}, expected [pages, 2, ...], [pages, 1, ...] or a pair")
    return [_item(view, 1, 0), _item(view, 1, view.shape[1] - 1)]


def _item(view: TensorView, axis: int, index: int) -> TensorView:
    shape, strides, after = view.shape, view.strides, axis + 1
    pointer = view.pointer + index * strides[axis] * ITEM_BYTES[view.dtype]
    kept = (*shape[:axis], *shape[after:]), (*strides[:axis], *strides[after:])
    return TensorView(pointer, view.dtype, *kept, view.device)


def _permuted(view: TensorView, order: tuple[int, ...]) -> TensorView:
    shape, strides = tuple(view.shape[i] for i in order), tuple(view.strides[i] for i in order)
    return TensorView(view.pointer, view.dtype, shape, strides, view.device)


def without(view: TensorView, axis: int) -> TensorView:
    """``view`` at 0 of ``axis``, a dimension of size 1."""
    return _item(view, axis, 0)


def nested_tokens(view: TensorView, q_len: int) -> TensorView:
    """``[batch * q_len, ...]`` as ``[batch, q_len, ...]``: the same memory."""
    shape = (view.shape[0] // q_len, q_len, *view.shape[1:])
    strides = (q_len * view.strides[0], *view.strides)
    return TensorView(view.pointer, view.dtype, shape, strides, view.device)


def flat_tokens(view: TensorView, name: str) -> TensorView:
    """``[batch, q_len, ...]`` as ``[tokens, ...]``: the same memory.

    Raises:
        UsageError: the requests do not lie behind each other at the tokens' distance.
    """
    batch, q_len = view.shape[:2]
    if batch > 1 and q_len > 1 and view.strides[0] != q_len * view.strides[1]:
        raise UsageError(f"{name}: strides {view.strides}, expected requests at {q_len} times the tokens' distance")
    step = view.strides[1] if q_len > 1 else view.strides[0]
    return replace(view, shape=(batch * q_len, *view.shape[2:]), strides=(step, *view.strides[2:]))


def longest_query(
    max_q_len: int | None, cum_seq_lens_q: Any, batch: int, tokens: int, runtime: Runtime
) -> tuple[int, TensorView]:
    """``max_q_len`` and the view of ``cum_seq_lens_q``, which is read back (a wait for the device) where it is None.

    Raises:
        UsageError: the running sum is of another form or falls; or it would be read while a stream captures.
    """
    view = view_of(cum_seq_lens_q, "cum_seq_lens_q")
    check_vector("cum_seq_lens_q", view, batch + 1, "int32", view.device)
    if max_q_len is not None:
        return integer("max_q_len", max_q_len), view
    stream = runtime.memory.current_stream(cum_seq_lens_q)
    driver = runtime.driver
    with driver.using(driver.context_on(view.device)):
        if driver.is_capturing(stream):
            raise UsageError("max_q_len: None while a stream captures; expected the bound on every query length")
    return max(1, check_running_sum("cum_seq_lens_q", runtime.memory.to_host(cum_seq_lens_q), tokens)), view


def tensor_or_none(tensor: Any, name: str, device: int) -> TensorView | None:
    """The view of an optional tensor."""
    if tensor is None:
        return None
    view = view_of(tensor, name)
    check_device(name, view, device)
    return view


def sinks_of(sinks: Any, name: str, device: int) -> TensorView | None:
    """The sinks, also as the list of one tensor that the peer takes.

    Raises:
        UsageError: more tensors than one.
    """
    if isinstance(sinks, (tuple, list)):
        if len(sinks) != 1:
            raise UsageError(f"{name}: {len(sinks)} tensors, expected one, or a list of one")
        sinks = sinks[0]
    return tensor_or_none(sinks, name, device)


def check_no_empty(name: str, lengths: Any) -> None:
    """Raise ``UsageError`` if one of the lengths that a caller knows on the host is 0 or less."""
    for request, length in enumerate([] if lengths is None else [int(length) for length in lengths]):
        if length < 1:
            raise UsageError(f"{name}: request {request} has {length} tokens; ragged kernels take none without any")


def query_of(query: Any, rank: int) -> TensorView:
    """The view of a query; raises ``UsageError`` unless it has this rank."""
    view = view_of(query, "query")
    if len(view.shape) != rank:
        raise UsageError(f"query: shape {view.shape}, expected {rank} dimensions")
    return view


def pdl_of(enable_pdl: bool | None, default: bool = True) -> bool:
    """Dependent launch is on, where the device has it, unless it is switched off."""
    return default if enable_pdl is None else bool(enable_pdl)


def batch_of(seq_lens: TensorView) -> int:
    """Requests, by their lengths; raises ``UsageError`` unless these are a vector."""
    if len(seq_lens.shape) != 1:
        raise UsageError(f"seq_lens: shape {seq_lens.shape}, expected one dimension, a length for each request")
    return seq_lens.shape[0]


def check_batch(batch_size: int, seq_lens: TensorView) -> None:
    """Raise ``UsageError`` unless ``batch_size`` is what ``seq_lens`` has."""
    if batch_size != batch_of(seq_lens):
        raise UsageError(f"batch_size={batch_size}: seq_lens has {batch_of(seq_lens)} requests")
