"""Which kernel: a state is set, a kernel found and laid out, and the state set again until nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...artifacts.tables.metadata import KernelMeta
from .grid import Geometry, lay_out
from .kernels import DYNAMIC_PAGE, KernelSet
from .problem import Problem
from .refusals import KernelMissing, PlanRefused
from .tiles import (
    Candidate,
    TileChoice,
    choose_tile,
    kernel_type_of,
    largest_tile,
)
from .traits import (
    KernelKey,
    KernelType,
    MaskType,
    MultiCtasMode,
    Policy,
    QkvLayout,
    ceil_div,
    is_power_of_two,
)

MAX_PASSES = 4
LARGEST_TILE_Q = 128
VALUES_PER_CTA = 256

# (kernel, cluster size x, grid) -> how many such clusters the GPU holds at once.
Occupancy = Callable[[KernelMeta, int, tuple[int, int, int]], int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One kernel that the selection looked at: what it was found by, its CTAs, the tiles compared before it."""

    kernel: str
    state: KernelKey
    ctas: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class OccupancyAnswer:
    """One question to the occupancy callback and its answer."""

    meta: KernelMeta
    cluster_x: int
    grid: tuple[int, int, int]
    active_clusters: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel that was chosen and how.

    ``state`` is what it was found by; ``passes`` the kernels in the order in which they were considered, the
    chosen one last; ``asked`` the question about clusters, if there was one; ``left_cluster`` that its answer
    sent the selection back to merging through global memory.
    """

    meta: KernelMeta
    state: KernelKey
    geometry: Geometry
    passes: tuple[Pass, ...]
    asked: OccupancyAnswer | None = None
    left_cluster: bool = False


def select(problem: Problem, kernels: KernelSet, occupancy: Occupancy, policy: Policy) -> Selection:
    """Choose the kernel of a problem.

    Raises:
        KernelMissing: the release has none; ``kind`` says whether at the first lookup or later.
        PlanRefused: sizes that no kernel takes.
    """
    choosing = _Choosing(problem, kernels, policy)
    state = first_state(problem)
    passes: list[Pass] = []
    for _ in range(MAX_PASSES):
        state, meta, geometry = choosing.take_pass(state, passes, allows_cga=True)
        if geometry.asks_for is None:
            break
        state = geometry.asks_for
    else:
        looked_at = ", ".join(done.kernel for done in passes)
        raise PlanRefused(f"selection: not settled after {MAX_PASSES} passes, {looked_at}")
    if state.multi_ctas != MultiCtasMode.CGA:
        return Selection(meta, state, geometry, tuple(passes))
    active = occupancy(meta, geometry.cluster_x, geometry.grid)
    asked = OccupancyAnswer(meta, geometry.cluster_x, geometry.grid, active)
    if active * geometry.cluster_x >= geometry.ctas:
        return Selection(meta, state, geometry, tuple(passes), asked)
    state = state._replace(multi_ctas=MultiCtasMode.GMEM)
    state, meta, geometry = choosing.take_pass(state, passes, allows_cga=False)
    return Selection(meta, state, geometry, tuple(passes), asked, left_cluster=True)


def first_state(problem: Problem) -> KernelKey:
    """Where the selection starts."""
    return KernelKey(
        layout=problem.layout,
        mask=problem.mask,
        kernel_type=problem.kernel_type,
        scheduler=problem.scheduler,
        multi_ctas=MultiCtasMode.GMEM if problem.multi_ctas else MultiCtasMode.DISABLED,
        head_dim_per_cta_v=problem.head_dim_v,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        tile_q=128,
        tile_kv=128,
        tokens_per_page=0,
        dynamic_page=False,
        reuses_smem_k_for_v=False,
        two_cta=False,
        sparse=problem.sparse,
        skips_softmax=problem.skips_softmax,
    )


class _Choosing:
    """One selection: the problem, the kernels it may use and the policy."""

    def __init__(self, problem: Problem, kernels: KernelSet, policy: Policy) -> None:
        self._problem = problem
        self._kernels = kernels
        self._policy = policy

    def take_pass(
        self, state: KernelKey, passes: list[Pass], *, allows_cga: bool
    ) -> tuple[KernelKey, KernelMeta, Geometry]:
        """Settle the state, find its kernel, lay it out, and note all that in ``passes``."""
        state, candidates = self.settle(state, allows_cga=allows_cga)
        meta = self.find(state, later=bool(passes))
        geometry = lay_out(self._problem, meta, state, allows_cga=allows_cga)
        passes.append(Pass(meta.symbol, state, geometry.ctas, candidates))
        return state, meta, geometry

    def find(self, state: KernelKey, *, later: bool) -> KernelMeta:
        """The kernel of a state; checked before anything of it is used."""
        check_key(state)
        meta = self._kernels.find(state)
        if meta is None:
            raise KernelMissing(state, self._problem.dtypes, later)
        return meta

    def settle(self, state: KernelKey, *, allows_cga: bool) -> tuple[KernelKey, tuple[Candidate, ...]]:
        """One pass over the state; may be repeated on what it gives."""
        problem = self._problem
        state = with_page(problem, state)
        candidates: tuple[Candidate, ...] = ()
        if problem.is_generation:
            if problem.is_mla:
                state = sparse_mla_state(problem, state) if problem.sparse else dense_mla_state(problem, state)
            else:
                state, candidates = self._grouped_state(state, allows_cga)
        wide = problem.head_dim_v > VALUES_PER_CTA and not problem.is_mla
        if wide and state.kernel_type != KernelType.SWAPS_AB:
            state = state._replace(head_dim_per_cta_v=VALUES_PER_CTA)
        return with_window(problem, state), candidates

    def _grouped_state(self, state: KernelKey, allows_cga: bool) -> tuple[KernelKey, tuple[Candidate, ...]]:
        """Grouped-query decoding: the tile holds tokens times heads of one group."""
        problem = self._problem
        if problem.dtype_q not in (problem.dtype_k, problem.dtype_v) or problem.dtype_k != problem.dtype_v:
            tile_q = 8 if problem.group <= 8 else 16
            return state._replace(kernel_type=KernelType.SWAPS_AB, tile_q=tile_q), ()
        tile_q = largest_tile(problem.group * problem.max_q)
        choice = TileChoice(tile_q, kernel_type_of(tile_q), ())
        if problem.max_q > 1:
            start = state._replace(tile_q=tile_q, kernel_type=choice.kernel_type)
            choice = choose_tile(problem, start, lambda probed: self._probe(probed, allows_cga))
        return state._replace(tile_q=choice.tile_q, kernel_type=choice.kernel_type), choice.candidates

    def _probe(self, state: KernelKey, allows_cga: bool) -> tuple[KernelMeta, Geometry] | None:
        try:
            meta = self.find(state, later=True)
        except KernelMissing:
            if self._policy is Policy.BEST:
                return None
            raise
        return meta, lay_out(self._problem, meta, state, allows_cga=allows_cga)


def check_key(key: KernelKey) -> None:
    """Raise ``PlanRefused`` for sizes that no table is ever asked for."""
    if not is_power_of_two(key.tile_q) or not is_power_of_two(key.tile_kv) or key.tile_q > LARGEST_TILE_Q:
        raise PlanRefused(
            f"tile {key.tile_q} x {key.tile_kv}: expected powers of 2, at most {LARGEST_TILE_Q} for queries"
        )


def _check_page(page: int) -> None:
    # Checked before 128 stands for any larger page, which would hide a size that has no logarithm.
    if not is_power_of_two(page):
        raise PlanRefused(f"page size {page}: expected a power of 2")


def with_page(problem: Problem, state: KernelKey) -> KernelKey:
    """The page size that kernels are found by."""
    dynamic = False
    if problem.sparse:
        page = 1
    elif problem.layout != QkvLayout.PAGED:
        page = 0
    else:
        page = problem.page
        _check_page(page)
        dynamic = page >= DYNAMIC_PAGE and problem.group > 1 and problem.head_dim_qk == problem.head_dim_v
        page = DYNAMIC_PAGE if dynamic else page
    return state._replace(tokens_per_page=page, dynamic_page=dynamic)


def with_window(problem: Problem, state: KernelKey) -> KernelKey:
    """A causal or generation kernel that need not look at all KV masks a window."""
    masked = state.mask == MaskType.CAUSAL or problem.is_generation
    if masked and not problem.sparse and problem.max_kv > problem.window:
        return state._replace(mask=MaskType.SLIDING_OR_CHUNKED_CAUSAL)
    return state


def dense_mla_state(problem: Problem, state: KernelKey) -> KernelKey:
    """Low-latency kernels that swap the operands, or high-throughput ones that keep them.

    Raises:
        PlanRefused: a window that hides KV.
    """
    if problem.max_kv > problem.window:
        raise PlanRefused(
            f"window of {problem.window} tokens under max_kv_len={problem.max_kv}: MLA decoding takes no window"
        )
    state = state._replace(mask=MaskType.DENSE)
    if _is_low_latency(problem):
        return state._replace(kernel_type=KernelType.SWAPS_AB, tile_q=8 if problem.group <= 8 else 16)
    state = _high_throughput(state)
    return _on_two_ctas(state) if problem.group == 128 else state


def _is_low_latency(problem: Problem) -> bool:
    if problem.group <= 32:
        return True
    ctas = problem.batch * problem.max_q * ceil_div(problem.group, 16)
    if ctas > problem.multiprocessors:
        return False
    splits = min(ceil_div(problem.max_kv, 256), max(1, problem.multiprocessors // max(1, ctas)))
    return ceil_div(problem.max_kv, max(1, splits)) <= 1024


def sparse_mla_state(problem: Problem, state: KernelKey) -> KernelKey:
    """MLA over chosen KV tokens."""
    group = problem.group
    state = state._replace(mask=MaskType.DENSE)
    if group <= 32:
        half = group // 2
        steps = problem.batch * ceil_div(min(problem.max_kv, problem.top_k), 128)
        tile_q = half if half >= 8 and steps <= problem.multiprocessors // 8 else group
        return state._replace(kernel_type=KernelType.SWAPS_AB, tile_q=tile_q, tile_kv=128)
    state = _high_throughput(state)
    fills = problem.max_q > 1 or problem.batch * 2 * 8 > problem.multiprocessors
    return _on_two_ctas(state) if group == 128 and fills else state


def _high_throughput(state: KernelKey) -> KernelKey:
    mode = state.multi_ctas
    if mode != MultiCtasMode.DISABLED:
        mode = MultiCtasMode.SEPARATE_KERNEL
    return state._replace(kernel_type=KernelType.KEEPS_AB, tile_q=64, multi_ctas=mode)


def _on_two_ctas(state: KernelKey) -> KernelKey:
    return state._replace(two_cta=True, head_dim_per_cta_v=VALUES_PER_CTA)
