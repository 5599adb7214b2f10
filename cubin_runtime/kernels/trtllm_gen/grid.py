"""From a kernel to its grid: CTAs along queries, heads and batch, CTAs that share KV, and clusters.

Laying a kernel out may show that another kernel suits better; then ``Geometry.asks_for`` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...artifacts.tables.metadata import KernelMeta
from .problem import Problem
from .refusals import PlanRefused
from .traits import (
    KernelKey,
    KernelType,
    MaskType,
    MultiCtasMode,
    TileScheduler,
    ceil_div,
)

LARGEST_CGA = 16
LARGEST_PORTABLE_CLUSTER = 8
# Above this V head dimension a cluster's shared memory cannot hold the parts that it merges.
CGA_HEAD_DIM_LIMIT = 512
SPLIT_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one kernel covers a problem.

    ``grid`` counts CTAs; ``ctas_q`` those along one sequence's queries, ``ctas_kv`` those that share its KV.
    ``heads_per_cta`` are query heads of one CTA. ``asks_for`` is the state to select again with, None if the
    kernel stands.
    """

    grid: tuple[int, int, int]
    cluster_x: int
    ctas_q: int
    ctas_kv: int
    heads_per_cta: int
    asks_for: KernelKey | None

    @property
    def ctas(self) -> int:
        """CTAs in all."""
        x, y, z = self.grid
        return x * y * z


def lay_out(problem: Problem, meta: KernelMeta, state: KernelKey, *, allows_cga: bool) -> Geometry:
    """The geometry of ``meta`` in the selection state that it was found by.

    Raises:
        PlanRefused: the heads do not divide into CTAs of this kernel.
    """
    ctas_q = _ctas_along_queries(problem, meta)
    heads_per_cta = min(problem.group, meta.step_q) if meta.groups_heads_q else 1
    if heads_per_cta < 1 or problem.heads_q % heads_per_cta:
        raise PlanRefused(
            f"heads: {problem.heads_q} query heads over {problem.heads_kv} KV heads do not divide "
            f"into CTAs of {heads_per_cta} heads ({meta.symbol})"
        )
    head_ctas, value_ctas = problem.heads_q // heads_per_cta, problem.head_dim_v // meta.head_dim_per_cta_v
    x, y, z = ctas_q, head_ctas * value_ctas, problem.batch
    if state.two_cta and problem.is_mla:
        if (head_ctas, value_ctas) != (2, 2):
            raise PlanRefused(
                f"heads: kernels of two CTAs take 2 x 2 CTAs of heads and values, got {head_ctas} x {value_ctas}"
            )
        x, y = x * 2, y // 4
    ctas_kv, following = 1, state
    if state.multi_ctas != MultiCtasMode.DISABLED:
        ctas_kv = _ctas_along_kv(problem, meta, state, x * y * z)
        x *= ctas_kv
        following = _after_splitting(problem, state, ctas_kv, x * y * z, allows_cga)
    cluster = (2 if state.two_cta else 1) * (ctas_kv if following.multi_ctas == MultiCtasMode.CGA else 1)
    if following == state:
        following = _with_split_values(problem, state, x * y * z)
    return Geometry((x, y, z), cluster, ctas_q, ctas_kv, heads_per_cta, None if following == state else following)


def _ctas_along_queries(problem: Problem, meta: KernelMeta) -> int:
    if problem.is_generation and problem.max_q > 1:
        if not meta.groups_tokens_heads_q:
            return problem.max_q
        return ceil_div(problem.max_q, max(1, meta.step_q // problem.group))
    return ceil_div(problem.max_q, meta.step_q)


def _ctas_along_kv(problem: Problem, meta: KernelMeta, state: KernelKey, ctas: int) -> int:
    """As many as fill the GPU once, each with at least two steps of work."""
    visible = min(problem.max_kv, problem.top_k) if problem.sparse else problem.max_kv
    if state.mask == MaskType.SLIDING_OR_CHUNKED_CAUSAL:
        visible = min(visible, problem.window + meta.step_kv - 1)
    return min(ceil_div(visible, 2 * meta.step_kv), max(1, problem.multiprocessors // max(1, ctas)))


def _after_splitting(problem: Problem, state: KernelKey, ctas_kv: int, ctas: int, allows_cga: bool) -> KernelKey:
    if ctas_kv <= 1:
        return state._replace(multi_ctas=MultiCtasMode.DISABLED, scheduler=TileScheduler.PERSISTENT)
    dense_mla = problem.is_mla and not problem.sparse
    if problem.allows_tile_kv_64 and dense_mla and state.tile_kv == 128 and ctas < problem.multiprocessors:
        state = state._replace(tile_kv=64)
    if (
        allows_cga
        and ctas_kv <= LARGEST_CGA
        and state.kernel_type == KernelType.SWAPS_AB
        and state.multi_ctas == MultiCtasMode.GMEM
        and problem.head_dim_v < CGA_HEAD_DIM_LIMIT
    ):
        state = state._replace(multi_ctas=MultiCtasMode.CGA)
    return state


def _with_split_values(problem: Problem, state: KernelKey, ctas: int) -> KernelKey:
    """MLA on a GPU that is far from full: share the value dimension among CTAs."""
    if not problem.is_mla or state.two_cta or state.head_dim_per_cta_v != SPLIT_HEAD_DIM:
        return state
    short = problem.batch == 1 and problem.max_q <= 16 and problem.head_dim_qk == 576
    needed = ctas * (1 if short else 2)
    if needed > problem.multiprocessors:
        return state
    return state._replace(head_dim_per_cta_v=128 if needed * 2 <= problem.multiprocessors else 256)
