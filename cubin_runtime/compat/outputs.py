"""Outputs under FlashInfer's arguments: tensors made or checked, FP4 with block scales, the log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ..attention.runtime import Runtime
from ..errors import UsageError
from ..kernels.trtllm_gen.arguments import OUT_SCALE_BLOCK, OutScales
from ..tensor import TensorView, view_of

NVFP4 = "nvfp4"
E4M3 = "float8_e4m3fn"
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
    if is_fp4(out, out_dtype):
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


def is_fp4(out: Any, out_dtype: Any) -> bool:
    """Whether an FP4 output is asked for, by its dtype or by a tensor of ours or of the peer."""
    return _dtype_word(out_dtype) == NVFP4 or (hasattr(out, "data") and hasattr(out, "scale"))


def _dtype_word(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _fp4_output(
    out: Any, query: Any, shape: tuple[int, ...], o_sf_scale: Any, o_sf_vec_size: int | None, runtime: Runtime
) -> Output:
    if view_of(query, "query").dtype != E4M3:
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
        out = FP4Tensor(data, runtime.memory.empty(query, (rows, columns), E4M3), 0, shape)
    if not hasattr(out, "scale"):
        raise UsageError(f"out: got {type(out).__name__}, expected an FP4Tensor for out_dtype nvfp4")
    view, scale, first = view_of(out.data, "out.data"), view_of(out.scale, "out.scale"), int(out.scale_start_index)
    if view.shape != packed or view.dtype != "uint8":
        raise UsageError(f"out.data: {view.dtype} {view.shape}, expected uint8 {packed}")
    if scale.dtype != E4M3 or len(scale.shape) != 2 or scale.shape[1] != columns:
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
