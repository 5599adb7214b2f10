"""The two launches that may follow the main one: the reduction over KV splits and the LSE."""

from __future__ import annotations

from dataclasses import dataclass

from ...artifacts.tables.metadata import KernelMeta
from ..native.constants import CONSTANTS
from .grid import Geometry
from .problem import Problem
from .refusals import PlanRefused
from .traits import MultiCtasMode, SparseType, ceil_div

# Bytes of partial output that one CTA of the reduction merges.
REDUCTION_SLICE_BYTES = CONSTANTS.reduction_threads * CONSTANTS.reduction_values * 2


@dataclass(frozen=True, slots=True)
class ReductionLaunch:
    """Merges the partial results of CTAs that shared KV; it takes the main kernel's parameters.

    ``dtype_partial`` is the partial outputs' type: fp16 for an fp16 or e4m3 output, else bf16.
    ``head_dim`` counts the values of one partial row, ``value_ctas`` how many of them make a head.
    ``ctas_per_tile`` CTAs share one tile of queries.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tile_q: int
    head_dim: int
    fp8_query: bool
    dtype_partial: str
    dtype_out: str
    sparse: bool
    groups_tokens_heads: bool
    variable_top_k: bool
    ctas_per_tile: int
    head_ctas: int
    value_ctas: int
    head_dim_v: int
    pdl: bool


@dataclass(frozen=True, slots=True)
class LseLaunch:
    """Turns maximum and sum of each row into its LSE, base 2; ``rows`` is tokens times heads."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    stats: int
    lse: int
    heads_q: int
    strides: tuple[int, int]
    rows: int
    pdl: bool


def reduction_after(problem: Problem, meta: KernelMeta, geometry: Geometry) -> ReductionLaunch | None:
    """The reduction that follows, None where the kernel merges by itself.

    Raises:
        PlanRefused: no reduction exists for these dtypes.
    """
    if meta.multi_ctas_kv_mode != MultiCtasMode.SEPARATE_KERNEL:
        return None
    out = problem.dtype_o
    if problem.dtype_q != out and not (problem.dtype_q == "e4m3" and out in ("e4m3", "fp16", "bf16")):
        raise PlanRefused(f"reduction over KV splits: no kernel from {problem.dtype_q} to {out}")
    head_dim = meta.head_dim_per_cta_v * (2 if meta.two_cta_mma else 1)
    head_ctas, value_ctas = problem.heads_q // geometry.heads_per_cta, problem.head_dim_v // head_dim
    tiles = geometry.ctas_q * head_ctas * value_ctas * problem.batch
    slices = head_dim * 2 * meta.tile_q // REDUCTION_SLICE_BYTES
    ctas = max(1, min(2 * problem.multiprocessors // tiles, slices))
    return ReductionLaunch(
        grid=(geometry.ctas_q * ctas, head_ctas * value_ctas, problem.batch),
        block=(CONSTANTS.reduction_threads, 1, 1),
        tile_q=meta.tile_q,
        head_dim=head_dim,
        fp8_query=problem.dtype_q == "e4m3",
        dtype_partial="fp16" if out in ("fp16", "e4m3") else "bf16",
        dtype_out=out,
        sparse=problem.sparse != SparseType.NONE,
        groups_tokens_heads=meta.groups_tokens_heads_q,
        variable_top_k=problem.sparse == SparseType.DYNAMIC,
        ctas_per_tile=ctas,
        head_ctas=head_ctas,
        value_ctas=value_ctas,
        head_dim_v=problem.head_dim_v,
        pdl=problem.pdl,
    )


def lse_after(problem: Problem) -> LseLaunch | None:
    """The LSE launch that follows, None where no LSE is wanted."""
    if not problem.pointers.lse:
        return None
    rows = problem.tokens_q * problem.heads_q
    threads = min(CONSTANTS.lse_threads, 1 << max(0, rows - 1).bit_length())
    return LseLaunch(
        grid=(max(1, ceil_div(rows, threads)), 1, 1),
        block=(threads, 1, 1),
        stats=problem.pointers.softmax_stats,
        lse=problem.pointers.lse,
        heads_q=problem.heads_q,
        strides=problem.strides.lse,
        rows=rows,
        pdl=problem.pdl,
    )
