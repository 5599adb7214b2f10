"""Outputs: allocated or checked tensors, FP4 with block scales, the LSE."""

from __future__ import annotations

import math
from math import prod
from typing import Any

from ...attention.checks import integer, shown
from ...attention.paged_cache import E4M3
from ...attention.trtllm_gen import OutScales
from ...dtypes import ITEM_BYTES, is_dtype
from ...errors import UsageError
from ...tensor import TensorView, dtype_word, view_of
from ...values import dataclass
from .arguments import BatchArguments

NVFP4 = "nvfp4"
_SCALE_BLOCK = 16  # elements that share a block scale
_SCALE_ROWS, _SCALE_COLUMNS = 128, 4


@dataclass(frozen=True, slots=True)
class FP4Tensor:
    """An FP4 output: ``data`` uint8 with two elements per byte, ``scale`` e4m3 with one for 16 elements.

    ``scale_start_index`` is the first token's row in ``scale``; ``original_shape`` is in elements.
    """

    data: Any
    scale: Any
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The tensor that is returned to the caller, its view, and its block scales if it is FP4."""

    tensor: Any
    view: TensorView
    block_scales: OutScales | None = None


def output_of(call: BatchArguments, shape: tuple[int, ...], default_dtype: str) -> Output:
    """The output, allocated if it was not given; ``shape`` is in elements.

    Raises:
        UsageError: the dtype or shape is wrong, or there are FP4 options without an FP4 output.
    """
    if is_fp4(call):
        return _fp4_output(call, shape)
    if call.fp4_scale is not None or call.o_sf_vec_size is not None:
        raise UsageError("o_sf_scale or o_sf_vec_size without an nvfp4 output: expected None")
    out: Any = call.out
    dtype = _dtype_word(call.out_dtype)
    if dtype is not None and not is_dtype(dtype):
        expected = ", ".join((*ITEM_BYTES, NVFP4))
        raise UsageError(f"expected None or one of {expected}", argument="out_dtype", value=shown(call.out_dtype))
    if out is None:
        out = call.runtime.memory.empty(call.query, shape, dtype or default_dtype)
    view = view_of(out, "out", written=True)
    if view.shape != shape:
        raise UsageError(f"shape {view.shape}, expected {shape}", argument="out")
    if dtype is not None and view.dtype != dtype:
        raise UsageError(f"dtype {view.dtype}, out_dtype says {dtype}", argument="out")
    return Output(out, view)


def is_fp4(call: BatchArguments) -> bool:
    """Return whether the output is FP4: by its dtype, or because it is an ``FP4Tensor`` (ours or FlashInfer's)."""
    return _dtype_word(call.out_dtype) == NVFP4 or (hasattr(call.out, "data") and hasattr(call.out, "scale"))


def lse_of(call: BatchArguments, shape: tuple[int, int], *, natural: bool = False) -> Any:
    """The LSE tensor: the caller's, a new one if it is to be returned, else None.

    Raises:
        UsageError: it leaves in base e, ``natural``, and the caller's cannot be scaled.
    """
    if call.lse is None:
        return call.runtime.memory.empty(call.query, shape, "float32") if call.return_lse else None
    if natural:
        call.runtime.memory.check_scalable("lse", call.lse)
    return call.lse


def with_lse(call: BatchArguments, output: Output, lse: Any, *, natural: bool = False) -> Any:
    """Return the result: (output, lse), or output. Kernels fill ``lse`` in base 2; it leaves in base e if natural."""
    if lse is not None and natural:
        call.runtime.memory.scale_in_place(lse, math.log(2))
    return (output.tensor, lse) if call.return_lse else output.tensor


def _dtype_word(dtype: Any) -> str | None:
    """The word of a dtype, of torch's too; of what is none, a word that is none."""
    if dtype is None:
        return None
    try:
        return dtype_word(dtype)
    except Exception:  # whatever an object of another library raises
        return ""


def _fp4_output(call: BatchArguments, shape: tuple[int, ...]) -> Output:
    out: Any = call.out
    query, empty = call.query, call.runtime.memory.empty
    dtype = view_of(query, "query").dtype
    if dtype != E4M3:
        raise UsageError(f"dtype {dtype}, expected float8_e4m3fn for an nvfp4 output", argument="query")
    if call.fp4_scale is None:
        raise UsageError("None, expected a number for an nvfp4 output", argument="o_sf_scale")
    if call.o_sf_vec_size not in (None, _SCALE_BLOCK):
        raise UsageError(f"expected {_SCALE_BLOCK}", argument="o_sf_vec_size", value=call.o_sf_vec_size)
    columns = _round_up(prod(shape[1:]) // _SCALE_BLOCK, _SCALE_COLUMNS)
    packed = (*shape[:-1], -(-shape[-1] // 2))
    if out is None:
        rows = _round_up(shape[0], _SCALE_ROWS)
        out = FP4Tensor(empty(query, packed, "uint8"), empty(query, (rows, columns), E4M3), 0, shape)
    if not hasattr(out, "scale"):
        raise UsageError(f"got {type(out).__name__}, expected an FP4Tensor for out_dtype nvfp4", argument="out")
    view, scale = view_of(out.data, "out.data", written=True), view_of(out.scale, "out.scale", written=True)
    first = integer("out.scale_start_index", out.scale_start_index)
    if view.shape != packed or view.dtype != "uint8":
        raise UsageError(f"out.data: {view.dtype} {view.shape}, expected uint8 {packed}")
    if scale.dtype != E4M3 or len(scale.shape) != 2 or scale.shape[1] != columns:
        raise UsageError(f"out.scale: {scale.dtype} {scale.shape}, expected float8_e4m3fn [rows, {columns}]")
    if not 0 <= first <= scale.shape[0] - shape[0]:
        raise UsageError(f"out.scale_start_index={first}: expected {shape[0]} rows from it within {scale.shape[0]}")
    return Output(out, view, OutScales(scale, float(call.fp4_scale), _SCALE_BLOCK, first))


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
