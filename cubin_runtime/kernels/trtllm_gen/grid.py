"""The grid of a kernel: CTAs along queries, heads and batch, CTAs that share a sequence's KV, and clusters.

The grid may show that another kernel suits the problem better; ``Geometry.next_key`` then says which.
"""

from __future__ import annotations

from ...artifacts.tables.metadata import KernelMeta
from ...values import dataclass
from .arithmetic import ceil_div
from .errors import PlanRefused
from .problem import Problem
from .traits import KernelKey, KernelType, MaskType, MultiCtasMode, TileScheduler

LARGEST_CGA = 16
# From this V head dimension on, a cluster's shared memory cannot hold the partial results that it merges.
CGA_HEAD_DIM_LIMIT = 512
SPLIT_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class Geometry:
    """The grid of one kernel for one problem.

    ``grid`` is in CTAs; ``ctas_q`` of them lie along one sequence's queries, ``ctas_kv`` share its KV.
    ``heads_per_cta`` is the number of query heads per CTA. ``next_key`` is the key of a kernel that suits better, or
    None.
    """

    grid: tuple[int, int, int]
    cluster_x: int
    ctas_q: int
    ctas_kv: int
    heads_per_cta: int
    next_key: KernelKey | None

    @property
    def ctas(self) -> int:
        """Number of CTAs."""
        x, y, z = self.grid
        return x * y * z


def lay_out(problem: Problem, meta: KernelMeta, key: KernelKey, *, allows_cga: bool) -> Geometry:
    """The grid of ``meta``, which was found by ``key``.

    Raises:
        PlanRefused: the heads do not divide evenly among CTAs of this kernel.
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
    if key.two_cta and problem.is_mla:
        if (head_ctas, value_ctas) != (2, 2):
            raise PlanRefused(
                f"heads: kernels of two CTAs take 2 x 2 CTAs of heads and values, got {head_ctas} x {value_ctas}"
            )
        x, y = x * 2, y // 4
    ctas_kv, following = 1, key
    if key.multi_ctas != MultiCtasMode.DISABLED:
        ctas_kv = _ctas_along_kv(problem, meta, key, x * y * z)
        x *= ctas_kv
        following = _after_splitting(problem, key, ctas_kv, x * y * z, allows_cga)
    cluster = (2 if key.two_cta else 1) * (ctas_kv if following.multi_ctas == MultiCtasMode.CGA else 1)
    if following == key:
        following = _with_split_values(problem, key, x * y * z)
    return Geometry((x, y, z), cluster, ctas_q, ctas_kv, heads_per_cta, None if following == key else following)


def _ctas_along_queries(problem: Problem, meta: KernelMeta) -> int:
    if problem.is_generation and problem.max_q > 1:
        if not meta.groups_tokens_heads_q:
            return problem.max_q
        return ceil_div(problem.max_q, max(1, meta.step_q // problem.group))
    return ceil_div(problem.max_q, meta.step_q)


def _ctas_along_kv(problem: Problem, meta: KernelMeta, key: KernelKey, ctas: int) -> int:
    """The KV splits: one wave of CTAs at most, at least two steps of KV per CTA."""
    visible = min(problem.max_kv, problem.top_k) if problem.sparse else problem.max_kv
    if key.mask == MaskType.SLIDING_OR_CHUNKED_CAUSAL:
        visible = min(visible, problem.window + meta.step_kv - 1)
    return min(ceil_div(visible, 2 * meta.step_kv), max(1, problem.multiprocessors // max(1, ctas)))


def _after_splitting(problem: Problem, key: KernelKey, ctas_kv: int, ctas: int, allows_cga: bool) -> KernelKey:
    if ctas_kv <= 1:
        return key._replace(multi_ctas=MultiCtasMode.DISABLED, scheduler=TileScheduler.PERSISTENT)
    dense_mla = problem.is_mla and not problem.sparse
    if problem.allows_tile_kv_64 and dense_mla and key.tile_kv == 128 and ctas < problem.multiprocessors:
        key = key._replace(tile_kv=64)
    if (
        allows_cga
        and ctas_kv <= LARGEST_CGA
        and key.kernel_type == KernelType.SWAPS_AB
        and key.multi_ctas == MultiCtasMode.GMEM
        and problem.head_dim_v < CGA_HEAD_DIM_LIMIT
    ):
        key = key._replace(multi_ctas=MultiCtasMode.CGA)
    return key


def _with_split_values(problem: Problem, key: KernelKey, ctas: int) -> KernelKey:
    """Divide the value dimension of MLA among more CTAs on a partly filled GPU."""
    if not problem.is_mla or key.two_cta or key.head_dim_per_cta_v != SPLIT_HEAD_DIM:
        return key
    short = problem.batch == 1 and problem.max_q <= 16 and problem.head_dim_qk == 576
    needed = ctas * (1 if short else 2)
    if needed > problem.multiprocessors:
        return key
    return key._replace(head_dim_per_cta_v=128 if needed * 2 <= problem.multiprocessors else 256)
