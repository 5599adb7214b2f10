"""The launches that may follow the main one, on native kernels: the reduction over KV splits, and the LSE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...artifacts.tables.metadata import KernelMeta
from ..native.reduction.plan import OperationLaunch, kv_reduction, lse_from_statistics
from .errors import PlanRefused
from .grid import Geometry
from .problem import Bindings, Problem
from .traits import MultiCtasMode

# The main kernels scale e4m3 probabilities by the largest e4m3 number and leave that factor in the sums.
FP8_SUM_SCALE = 448.0
# Fields that each call binds -> the value that they take, as ``Bindings`` names it.
_REDUCTION_INPUTS: Mapping[str, str] = {
    "out": "out",
    "partial_out": "partial_out",
    "partial_statistics": "scratch",
    "softmax_statistics": "softmax_stats",
    "seq_lens": "seq_lens",
    "cum_seq_lens_q": "cum_seq_lens_q",
    "top_k_lens": "top_k_lens",
    "sinks": "sinks",
    "device_softmax_scale_log2": "device_softmax_scale_log2",
    "softmax_scale_log2": "softmax_scale_log2",
}
_LSE_INPUTS: Mapping[str, str] = {"statistics": "softmax_stats", "lse": "lse"}


def reduction_after(
    problem: Problem, meta: KernelMeta, geometry: Geometry, tokens_per_cta: int, bindings: Bindings
) -> OperationLaunch | None:
    """The reduction that follows the kernel; None if the kernel merges its splits itself.

    Raises:
        PlanRefused: no reduction kernel exists for the dtypes.
    """
    if meta.multi_ctas_kv_mode != MultiCtasMode.SEPARATE_KERNEL:
        return None
    out = problem.dtype_o
    if problem.dtype_q != out and not (problem.dtype_q == "e4m3" and out in ("e4m3", "fp16", "bf16")):
        raise PlanRefused(f"reduction over KV splits: no kernel from {problem.dtype_q} to {out}")
    head_dim = meta.head_dim_per_cta_v * (2 if meta.two_cta_mma else 1)
    values = {
        **{field: getattr(bindings, name) for field, name in _REDUCTION_INPUTS.items()},
        "max_q": problem.max_q,
        "ctas_q": geometry.ctas_q,
        "ctas_kv": geometry.ctas_kv,
        "value_ctas": problem.head_dim_v // head_dim,
        "heads_q": problem.heads_q,
        "heads_per_cta": geometry.heads_per_cta,
        "tokens_per_cta": tokens_per_cta,
        "tile_q": meta.tile_q,
        "tile_kv": meta.tile_kv,
        "head_dim": head_dim,
        "head_dim_v": problem.head_dim_v,
        "top_k": problem.top_k,
        "sum_scale": FP8_SUM_SCALE if problem.dtype_q == "e4m3" else 1.0,
    }
    traits = {"dtype_partial": "fp16" if out in ("fp16", "e4m3") else "bf16", "dtype_out": out}
    launch = kv_reduction(values, traits, batch=problem.batch, multiprocessors=problem.multiprocessors, pdl=problem.pdl)
    return replace(launch, inputs=_REDUCTION_INPUTS)


def lse_after(problem: Problem, bindings: Bindings) -> OperationLaunch | None:
    """The LSE launch that follows; None if the call wants no LSE."""
    if not problem.has_lse:
        return None
    launch = lse_from_statistics(
        problem.tokens_q,
        problem.heads_q,
        problem.strides.lse,
        bindings.softmax_stats,
        bindings.lse,
        pdl=problem.pdl,
    )
    return replace(launch, inputs=_LSE_INPUTS)
