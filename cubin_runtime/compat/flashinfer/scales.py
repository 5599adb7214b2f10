"""Scales, numbers or scalars on the device, as the native and the trtllm-gen kernels take them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from ...attention.checks import ScaleProduct, float32_number
from ...attention.paged_cache import E4M3
from ...attention.runtime import Runtime
from ...attention.trtllm_gen import Scale
from ...attention.trtllm_gen.checks import scale_of
from ...errors import UsageError
from ...provenance import ArgumentNumber
from ...tensor import TensorView, view_of
from .arguments import BatchArguments, XqaArguments

LOG2_E = math.log2(math.e)


def factor_of(name: str, value: Any, device: int) -> ScaleProduct:
    """A finite number or a float32 scalar on the device, for native kernels.

    Raises:
        UsageError: anything else, or a tensor on another device; the message begins with ``name``.
    """
    if isinstance(value, Real):
        return ScaleProduct(float32_number(name, value))
    scale_of(name, view_of(value, name), device)
    return ScaleProduct(1.0, value)


def scores_factor(call: BatchArguments, device: int) -> ScaleProduct:
    """The scale of the scores, natural or in base 2, for native kernels; errors as ``scores_scale``."""
    if call.bmm1_scale_log2 is None:
        return factor_of("bmm1_scale", call.bmm1_scale, device)
    scale_of("bmm1_scale_log2", view_of(call.bmm1_scale_log2, "bmm1_scale_log2"), device)
    return ScaleProduct(1 / LOG2_E, call.bmm1_scale_log2)  # 1 in float32, times the launch's log2(e)


def times(first: ScaleProduct, second: ScaleProduct, runtime: Runtime) -> ScaleProduct:
    """The product; two tensors are multiplied on the device, in stream order."""
    tensor = first.tensor if second.tensor is None else second.tensor
    if first.tensor is not None and second.tensor is not None:
        tensor = runtime.memory.product(first.tensor, second.tensor)
    return ScaleProduct(first.number * second.number, tensor)


def head_scales(
    call: XqaArguments, q: TensorView, out: TensorView, of_scores: float = 1.0
) -> tuple[ScaleProduct, ScaleProduct]:
    """Scales of scores and output: q_scale * kv_scale * ``of_scores``, and kv_scale * rcp_out_scale.

    Raises:
        UsageError: as ``factor_of``; or ``rcp_out_scale`` is not 1 although the output is not e4m3.
    """
    rt, factor = call.runtime, call.rcp_out_scale
    if factor != 1.0 and out.dtype != E4M3:
        raise UsageError(
            f"output is {out.dtype}, expected 1.0 unless it is {E4M3}", argument="rcp_out_scale", value=factor
        )
    of_q, of_kv = factor_of("q_scale", call.q_scale, q.device), factor_of("kv_scale", call.kv_scale, q.device)
    scores = times(times(of_q, of_kv, rt), ScaleProduct(of_scores), rt)
    return scores, times(of_kv, factor_of("rcp_out_scale", factor, q.device), rt)


def scores_scale(call: BatchArguments, device: int) -> tuple[Scale, Any]:
    """The scale of the scores for trtllm-gen kernels, which expect a scale on the device to include log2(e).

    Returns:
        the scale, and the tensor that was made for it, if any: it must live until the launch is enqueued.

    Raises:
        UsageError: the scale is neither a number nor a float32 scalar on ``device``, ``bmm1_scale_log2`` no scalar.
    """
    bmm1, in_base_2 = call.bmm1_scale, call.bmm1_scale_log2
    if in_base_2 is not None:
        return scale_of("bmm1_scale_log2", view_of(in_base_2, "bmm1_scale_log2"), device), None
    scale = scale_from("bmm1_scale", bmm1, device)
    if isinstance(bmm1, Real):
        return scale, None
    scaled = call.runtime.memory.scaled(bmm1, LOG2_E)
    return scale_of("bmm1_scale", view_of(scaled, "bmm1_scale"), device), scaled


def scale_from(name: str, value: Any, device: int) -> Scale:
    """A number or a float32 scalar on the device, for trtllm-gen kernels; raises ``UsageError`` for anything else."""
    if not isinstance(value, Real):
        return scale_of(name, view_of(value, name), device)
    try:
        return Scale(value if isinstance(value, ArgumentNumber) else float(value))
    except OverflowError:
        return Scale(math.inf)  # for the checks of the call to refuse
