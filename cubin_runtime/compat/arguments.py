"""From FlashInfer's arguments to our calls: caches, outputs, scales, query lengths; refusals name the argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from numbers import Real
from typing import Any

from ..attention.runtime import Runtime, default_runtime
from ..attention.trtllm_gen.checks import check_device, check_running_sum, check_vector, scale_of
from ..attention.views import ITEM_BYTES, TensorView, view_of
from ..errors import UsageError
from ..launch.trtllm_gen.arguments import OUT_SCALE_BLOCK, OutScales, Scale

LOG2_E = 1.4426950408889634
NVFP4 = "nvfp4"
LAYOUTS = ("NHD", "HND")
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4


@dataclass(frozen=True, slots=True)
class FP4Tensor:
    """An FP4 output: ``data`` uint8 with two numbers a byte, ``scale`` e4m3 with one for 16 numbers.

    ``scale_start_index`` is the first token's row in ``scale``; ``original_shape`` the shape in numbers.
    """

    data: Any
    scale: Any
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None


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
    """K and V as ``[pages, kv_heads, page_size, head_dim]``: of a pair, or of one tensor that holds both.

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
    if kv_layout == "NHD":
        parts = [_permuted(part, (0, 2, 1, 3)) for part in parts]
    return parts[0], parts[1]


def _halves(view: TensorView, name: str) -> list[TensorView]:
    if len(view.shape) == 4 and view.shape[1] == 1:
        return [view, view]
    if len(view.shape) != 5 or view.shape[1] not in (1, 2):
        raise UsageError(f"{name}: shape {view.shape}, expected [pages, 2, ...], [pages, 1, ...] or a pair")
    return [_item(view, 1, 0), _item(view, 1, view.shape[1] - 1)]


def _item(view: TensorView, axis: int, index: int) -> TensorView:
    pointer = view.pointer + index * view.strides[axis] * ITEM_BYTES[view.dtype]
    keep = [place for place in range(len(view.shape)) if place != axis]
    shape, strides = tuple(view.shape[i] for i in keep), tuple(view.strides[i] for i in keep)
    return TensorView(pointer, view.dtype, shape, strides, view.device)


def _permuted(view: TensorView, order: tuple[int, ...]) -> TensorView:
    shape, strides = tuple(view.shape[i] for i in order), tuple(view.strides[i] for i in order)
    return replace(view, shape=shape, strides=strides)


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


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of scores and output; ``keep`` holds what was made for them until the launch is under way."""

    bmm1: Scale
    bmm2: Scale
    keep: Any = None


def scales_of(bmm1: Any, bmm2: Any, bmm1_log2: Any, device: int, runtime: Runtime) -> Scales:
    """The two factors, each a number or one float32 on the device; kernels want device factors of scores in base 2.

    Raises:
        UsageError: another form; or the factor of the scores given twice.
    """
    made = None
    if bmm1_log2 is not None:
        if not isinstance(bmm1, Real) or bmm1 != 1.0:
            raise UsageError("bmm1_scale_log2 with bmm1_scale: expected one of them")
        first = scale_of("bmm1_scale_log2", view_of(bmm1_log2, "bmm1_scale_log2"), device)
    elif isinstance(bmm1, Real):
        first = scale_of("bmm1_scale", float(bmm1), device)
    else:
        scale_of("bmm1_scale", view_of(bmm1, "bmm1_scale"), device)
        made = runtime.memory.scaled(bmm1, LOG2_E)
        first = scale_of("bmm1_scale", view_of(made, "bmm1_scale"), device)
    second = float(bmm2) if isinstance(bmm2, Real) else view_of(bmm2, "bmm2_scale")
    return Scales(first, scale_of("bmm2_scale", second, device), made)


@dataclass(frozen=True, slots=True)
class Output:
    """The tensor that a caller gets back, its view, and its block scales where it is FP4."""

    tensor: Any
    view: TensorView
    scales: OutScales


def output_of(
    out: Any,
    out_dtype: Any,
    query: Any,
    shape: tuple[int, ...],
    default_dtype: str,
    o_sf_scale: Any,
    o_sf_vec_size: int | None,
    runtime: Runtime,
) -> Output:
    """The output, made if it was not given; ``shape`` counts numbers.

    Raises:
        UsageError: dtype or shape are not what was asked for, or options of FP4 stand without it.
    """
    wanted = _dtype_word(out_dtype)
    if wanted == NVFP4 or isinstance(out, FP4Tensor) or (hasattr(out, "data") and hasattr(out, "scale")):
        return _fp4_output(out, query, shape, o_sf_scale, o_sf_vec_size, runtime)
    if o_sf_scale is not None or o_sf_vec_size is not None:
        raise UsageError("o_sf_scale or o_sf_vec_size without an nvfp4 output: nothing takes them")
    if out is None:
        out = runtime.memory.empty(query, shape, wanted or default_dtype)
    view = view_of(out, "out")
    if view.shape != shape:
        raise UsageError(f"out: shape {view.shape}, expected {shape}")
    if wanted is not None and view.dtype != wanted:
        raise UsageError(f"out: dtype {view.dtype}, out_dtype says {wanted}")
    return Output(out, view, OutScales())


def _dtype_word(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _fp4_output(
    out: Any, query: Any, shape: tuple[int, ...], o_sf_scale: Any, o_sf_vec_size: int | None, runtime: Runtime
) -> Output:
    if view_of(query, "query").dtype != "float8_e4m3fn":
        raise UsageError(f"query: dtype {view_of(query, 'query').dtype}, expected float8_e4m3fn for an nvfp4 output")
    if o_sf_scale is None:
        raise UsageError("o_sf_scale: None, expected a number for an nvfp4 output")
    if o_sf_vec_size not in (None, OUT_SCALE_BLOCK):
        raise UsageError(f"o_sf_vec_size={o_sf_vec_size}: expected {OUT_SCALE_BLOCK}")
    columns = _round_up(prod(shape[1:]) // OUT_SCALE_BLOCK, _SCALE_COLUMNS)
    packed = (*shape[:-1], -(-shape[-1] // 2))
    if out is None:
        rows = _round_up(shape[0], _SCALE_ROWS)
        data = runtime.memory.empty(query, packed, "uint8")
        out = FP4Tensor(data, runtime.memory.empty(query, (rows, columns), "float8_e4m3fn"), 0, shape)
    if not hasattr(out, "scale"):
        raise UsageError(f"out: got {type(out).__name__}, expected an FP4Tensor for out_dtype nvfp4")
    view, scale, first = view_of(out.data, "out.data"), view_of(out.scale, "out.scale"), int(out.scale_start_index)
    if view.shape != packed or view.dtype != "uint8":
        raise UsageError(f"out.data: {view.dtype} {view.shape}, expected uint8 {packed}")
    if scale.dtype != "float8_e4m3fn" or len(scale.shape) != 2 or scale.shape[1] != columns:
        raise UsageError(f"out.scale: {scale.dtype} {scale.shape}, expected float8_e4m3fn [rows, {columns}]")
    if not 0 <= first <= scale.shape[0] - shape[0]:
        raise UsageError(f"out.scale_start_index={first}: expected {shape[0]} rows from it within {scale.shape[0]}")
    return Output(out, view, OutScales(scale, float(o_sf_scale), OUT_SCALE_BLOCK, first))


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def lse_of(lse: Any, return_lse: bool, query: Any, shape: tuple[int, int], runtime: Runtime) -> Any:
    """The LSE tensor: the caller's, a new one where it is to be returned, else None."""
    if lse is None and return_lse:
        return runtime.memory.empty(query, shape, "float32")
    return lse


def longest_query(
    max_q_len: int | None, cum_seq_lens_q: Any, view: TensorView, batch: int, tokens: int, runtime: Runtime
) -> int:
    """``max_q_len``; where it is None, from ``cum_seq_lens_q``, which is then read back: a wait for the device.

    Raises:
        UsageError: the running sum is of another form or falls; or it would be read while a stream captures.
    """
    check_vector("cum_seq_lens_q", view, batch + 1, "int32", view.device)
    if max_q_len is not None:
        return int(max_q_len)
    stream = runtime.memory.current_stream(cum_seq_lens_q)
    runtime.driver.ensure_context(view.device)
    if runtime.driver.is_capturing(stream):
        raise UsageError("max_q_len: None while a stream captures; expected the bound on every query length")
    return max(1, check_running_sum("cum_seq_lens_q", runtime.memory.to_host(cum_seq_lens_q), tokens))


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


def pdl_of(enable_pdl: bool | None) -> bool:
    """Dependent launch is on unless it is switched off."""
    return True if enable_pdl is None else bool(enable_pdl)


def batch_of(seq_lens: TensorView) -> int:
    """Requests, by their lengths; raises ``UsageError`` unless these are a vector."""
    if len(seq_lens.shape) != 1:
        raise UsageError(f"seq_lens: shape {seq_lens.shape}, expected one dimension, a length for each request")
    return seq_lens.shape[0]


def check_batch(batch_size: int, seq_lens: TensorView) -> None:
    """Raise ``UsageError`` unless ``batch_size`` is what ``seq_lens`` has."""
    if batch_size != batch_of(seq_lens):
        raise UsageError(f"batch_size={batch_size}: seq_lens has {batch_of(seq_lens)} requests")
