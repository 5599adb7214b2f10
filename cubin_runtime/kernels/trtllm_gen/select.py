"""Kernel selection: derive a key, find its kernel, compute the grid, and repeat with the key that the grid suggests."""

from __future__ import annotations

from collections.abc import Callable

from ...artifacts.tables.metadata import KernelMeta
from ...values import dataclass
from .arithmetic import ceil_div, is_power_of_two
from .errors import KernelMissing, PlanRefused
from .grid import Geometry, lay_out
from .kernel_finder import DYNAMIC_PAGE, KernelSet
from .problem import Problem
from .tile_size import Candidate, TileChoice, choose_tile, kernel_type_of, largest_tile
from .traits import KernelKey, KernelType, MaskType, MultiCtasMode, Policy, QkvLayout

MAX_PASSES = 4
LARGEST_TILE_Q = 128
VALUES_PER_CTA = 256

# (kernel, cluster size x, grid) -> number of such clusters that the GPU holds at once.
Occupancy = Callable[[KernelMeta, int, tuple[int, int, int]], int]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the selection: the kernel found, its key, its number of CTAs, and the tile sizes compared first."""

    kernel: str
    key: KernelKey
    ctas: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class OccupancyAnswer:
    """One call of the occupancy callback and its result."""

    meta: KernelMeta
    cluster_x: int
    grid: tuple[int, int, int]
    active_clusters: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected kernel, its key and grid, and how they were found.

    ``passes`` are in order, the selected kernel's last. ``asked`` is the occupancy query, if there was one, and
    ``left_cluster`` tells that too few clusters fit, so that the selection returned to merging through global memory.
    """

    meta: KernelMeta
    key: KernelKey
    geometry: Geometry
    passes: tuple[Pass, ...]
    asked: OccupancyAnswer | None = None
    left_cluster: bool = False


def select(problem: Problem, kernels: KernelSet, occupancy: Occupancy, policy: Policy) -> Selection:
    """Select the kernel for a problem.

    Raises:
        KernelMissing: the release has no kernel for a key; ``kind`` tells the first lookup from later ones.
        PlanRefused: no kernel takes the sizes.
    """
    selector = _Selector(problem, kernels, policy)
    key = first_key(problem)
    passes: list[Pass] = []
    for _ in range(MAX_PASSES):
        key, meta, geometry = selector.take_pass(key, passes, allows_cga=True)
        if geometry.next_key is None:
            break
        key = geometry.next_key
    else:
        looked_at = ", ".join(done.kernel for done in passes)
        raise PlanRefused(f"selection: no convergence after {MAX_PASSES} passes, {looked_at}")
    if key.multi_ctas != MultiCtasMode.CGA:
        return Selection(meta, key, geometry, tuple(passes))
    active = occupancy(meta, geometry.cluster_x, geometry.grid)
    asked = OccupancyAnswer(meta, geometry.cluster_x, geometry.grid, active)
    if active * geometry.cluster_x >= geometry.ctas:
        return Selection(meta, key, geometry, tuple(passes), asked)
    key = key._replace(multi_ctas=MultiCtasMode.GMEM)
    key, meta, geometry = selector.take_pass(key, passes, allows_cga=False)
    return Selection(meta, key, geometry, tuple(passes), asked, left_cluster=True)


def first_key(problem: Problem) -> KernelKey:
    """The key that the first pass starts from."""
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


class _Selector:
    """The passes of one selection, over the kernels that the problem may use."""

    def __init__(self, problem: Problem, kernels: KernelSet, policy: Policy) -> None:
        self._problem = problem
        self._kernels = kernels
        self._policy = policy

    def take_pass(
        self, key: KernelKey, passes: list[Pass], *, allows_cga: bool
    ) -> tuple[KernelKey, KernelMeta, Geometry]:
        """Derive the key, find its kernel, compute its grid, and append the pass to ``passes``."""
        key, candidates = self.settle(key, allows_cga=allows_cga)
        meta = self.find(key, later=bool(passes))
        geometry = lay_out(self._problem, meta, key, allows_cga=allows_cga)
        passes.append(Pass(meta.symbol, key, geometry.ctas, candidates))
        return key, meta, geometry

    def find(self, key: KernelKey, *, later: bool) -> KernelMeta:
        """The kernel of a key, whose sizes are checked first."""
        check_key(key)
        meta = self._kernels.find(key)
        if meta is None:
            raise KernelMissing(key, self._problem.dtypes, later)
        return meta

    def settle(self, key: KernelKey, *, allows_cga: bool) -> tuple[KernelKey, tuple[Candidate, ...]]:
        """The key of the next pass, and the tile sizes that were compared for it."""
        problem = self._problem
        key = with_page(problem, key)
        candidates: tuple[Candidate, ...] = ()
        if problem.is_generation:
            if problem.is_mla:
                key = sparse_mla_key(problem, key) if problem.sparse else dense_mla_key(problem, key)
            else:
                key, candidates = self._grouped_key(key, allows_cga)
        wide = problem.head_dim_v > VALUES_PER_CTA and not problem.is_mla
        if wide and key.kernel_type != KernelType.SWAPS_AB:
            key = key._replace(head_dim_per_cta_v=VALUES_PER_CTA)
        return with_window(problem, key), candidates

    def _grouped_key(self, key: KernelKey, allows_cga: bool) -> tuple[KernelKey, tuple[Candidate, ...]]:
        """Grouped-query decode: the rows of a tile are the query tokens times the heads of one group."""
        problem = self._problem
        if problem.dtype_q not in (problem.dtype_k, problem.dtype_v) or problem.dtype_k != problem.dtype_v:
            tile_q = 8 if problem.group <= 8 else 16
            return key._replace(kernel_type=KernelType.SWAPS_AB, tile_q=tile_q), ()
        tile_q = largest_tile(problem.group * problem.max_q)
        choice = TileChoice(tile_q, kernel_type_of(tile_q), ())
        if problem.max_q > 1:
            start = key._replace(tile_q=tile_q, kernel_type=choice.kernel_type)
            choice = choose_tile(problem, start, lambda probed: self._probe(probed, allows_cga))
        return key._replace(tile_q=choice.tile_q, kernel_type=choice.kernel_type), choice.candidates

    def _probe(self, key: KernelKey, allows_cga: bool) -> tuple[KernelMeta, Geometry] | None:
        try:
            meta = self.find(key, later=True)
        except KernelMissing:
            if self._policy is Policy.BEST:
                return None
            raise
        return meta, lay_out(self._problem, meta, key, allows_cga=allows_cga)


def check_key(key: KernelKey) -> None:
    """Raise ``PlanRefused`` for tile sizes that no kernel can have."""
    if not is_power_of_two(key.tile_q) or not is_power_of_two(key.tile_kv) or key.tile_q > LARGEST_TILE_Q:
        raise PlanRefused(
            f"tile {key.tile_q} x {key.tile_kv}: expected powers of 2, at most {LARGEST_TILE_Q} for queries"
        )


def _check_page(page: int) -> None:
    # Checked before 128 replaces larger pages, because the parameters hold the logarithm of the real size.
    if not is_power_of_two(page):
        raise PlanRefused(f"page size {page}: expected a power of 2")


def with_page(problem: Problem, key: KernelKey) -> KernelKey:
    """The key with the page size that its kernel is found by."""
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
    return key._replace(tokens_per_page=page, dynamic_page=dynamic)


def with_window(problem: Problem, key: KernelKey) -> KernelKey:
    """The key with a windowed mask, if the window hides keys of a causal or decode problem."""
    masked = key.mask == MaskType.CAUSAL or problem.is_generation
    if masked and not problem.sparse and problem.max_kv > problem.window:
        return key._replace(mask=MaskType.SLIDING_OR_CHUNKED_CAUSAL)
    return key


def dense_mla_key(problem: Problem, key: KernelKey) -> KernelKey:
    """The key of dense MLA decode: low-latency kernels swap A and B, high-throughput kernels keep them.

    Raises:
        PlanRefused: a window hides keys.
    """
    if problem.max_kv > problem.window:
        raise PlanRefused(
            f"window of {problem.window} tokens under max_kv_len={problem.max_kv}: MLA decoding takes no window"
        )
    key = key._replace(mask=MaskType.DENSE)
    if _is_low_latency(problem):
        return key._replace(kernel_type=KernelType.SWAPS_AB, tile_q=8 if problem.group <= 8 else 16)
    key = _high_throughput(key)
    return _on_two_ctas(key) if problem.group == 128 else key


def _is_low_latency(problem: Problem) -> bool:
    if problem.group <= 32:
        return True
    ctas = problem.batch * problem.max_q * ceil_div(problem.group, 16)
    if ctas > problem.multiprocessors:
        return False
    splits = min(ceil_div(problem.max_kv, 256), max(1, problem.multiprocessors // max(1, ctas)))
    return ceil_div(problem.max_kv, max(1, splits)) <= 1024


def sparse_mla_key(problem: Problem, key: KernelKey) -> KernelKey:
    """The key of sparse MLA decode."""
    group = problem.group
    key = key._replace(mask=MaskType.DENSE)
    if group <= 32:
        half = group // 2
        steps = problem.batch * ceil_div(min(problem.max_kv, problem.top_k), 128)
        tile_q = half if half >= 8 and steps <= problem.multiprocessors // 8 else group
        return key._replace(kernel_type=KernelType.SWAPS_AB, tile_q=tile_q, tile_kv=128)
    key = _high_throughput(key)
    fills = problem.max_q > 1 or problem.batch * 2 * 8 > problem.multiprocessors
    return _on_two_ctas(key) if group == 128 and fills else key


def _high_throughput(key: KernelKey) -> KernelKey:
    mode = key.multi_ctas
    if mode != MultiCtasMode.DISABLED:
        mode = MultiCtasMode.SEPARATE_KERNEL
    return key._replace(kernel_type=KernelType.KEEPS_AB, tile_q=64, multi_ctas=mode)


def _on_two_ctas(key: KernelKey) -> KernelKey:
    return key._replace(two_cta=True, head_dim_per_cta_v=VALUES_PER_CTA)
