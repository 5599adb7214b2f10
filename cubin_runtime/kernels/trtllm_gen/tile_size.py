"""The tile size of grouped query tokens and heads, chosen by a cost model.

The model computes in float32 and rounds after each operation, in the order written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...artifacts.tables.metadata import KernelMeta
from ...values import dataclass
from .arithmetic import ceil_div, float32
from .grid import Geometry
from .problem import Problem
from .traits import KernelKey, KernelType

SIZES = (128, 64, 32, 16, 8)
SMALLEST_KEEPING = 64
# Cost of one KV token in the main loop, and of one merge, relative to the smallest tile size; a merge costs as much as
# MERGED_TOKENS tokens. NVIDIA's figures, from FlashInfer 0.6.13's launcher (fmhaKernels.cuh,
# selectTileSizeQForGqaGeneration): other ones would select other kernels than the reference.
MAIN_COST: Mapping[int, float] = {t: float32(c) for t, c in zip(SIZES, (2.2, 1.68, 1.48, 1.2, 1.0), strict=True)}
MERGE_COST: Mapping[int, float] = {t: float32(c) for t, c in zip(SIZES, (1.32, 1.2, 1.08, 1.03, 1.0), strict=True)}
MERGED_TOKENS = 128

# key -> its kernel and grid, or None if the policy skips a key without a kernel.
Probe = Callable[[KernelKey], tuple[KernelMeta, Geometry] | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile size that was compared; ``kernel`` and ``cost`` are None if no kernel has it."""

    tile_q: int
    kernel: str | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The chosen tile size and the candidates compared; there are none if the first estimate stands."""

    tile_q: int
    kernel_type: KernelType
    candidates: tuple[Candidate, ...]


def kernel_type_of(tile_q: int) -> KernelType:
    """Tiles of 64 rows and more keep the MMA's A and B, smaller ones swap them."""
    return KernelType.KEEPS_AB if tile_q >= SMALLEST_KEEPING else KernelType.SWAPS_AB


def largest_tile(grouped: int) -> int:
    """The smallest tile that holds ``grouped`` rows of query tokens and heads, 128 if none does."""
    return next((size for size in reversed(SIZES) if grouped <= size), SIZES[0])


def modelled_cost(tile_q: int, meta: KernelMeta, geometry: Geometry, problem: Problem) -> float:
    """Relative time of a launch: main loop and merge of one CTA, times the number of waves."""
    steps = ceil_div(ceil_div(problem.max_kv, meta.step_kv), geometry.ctas_kv)
    tokens = float32(steps * meta.step_kv)
    main = float32(MAIN_COST[tile_q] * tokens)
    merge = float32(float32(MERGE_COST[tile_q] * MERGED_TOKENS) * geometry.ctas_kv)
    waves = ceil_div(geometry.ctas, problem.multiprocessors)
    return float32(float32(main + merge) * float32(waves))


def choose_tile(problem: Problem, key: KernelKey, probe: Probe) -> TileChoice:
    """The cheapest tile size up to that of ``key``; the largest of equally cheap ones.

    The multi-CTA mode and scheduler that the grid of one candidate suggests carry over to the next candidate, as in
    the reference launcher.
    """
    default = TileChoice(key.tile_q, KernelType(key.kernel_type), ())
    first = probe(key)
    if first is not None:
        _, geometry = first
        key = geometry.next_key or key
        if geometry.ctas * 2 > problem.multiprocessors:
            return default
    if default.tile_q <= SIZES[-1]:
        return default
    best, lowest = default, float("inf")
    candidates = []
    for tile_q in SIZES:
        if tile_q > default.tile_q or tile_q < problem.group:
            continue
        key = key._replace(tile_q=tile_q, kernel_type=kernel_type_of(tile_q))
        kernel = probe(key)
        if kernel is None:
            candidates.append(Candidate(tile_q, None, None))
            continue
        meta, geometry = kernel
        key = geometry.next_key or key
        cost = modelled_cost(tile_q, meta, geometry, problem)
        candidates.append(Candidate(tile_q, meta.symbol, cost))
        if cost < lowest:
            best, lowest = TileChoice(tile_q, kernel_type_of(tile_q), ()), cost
    return TileChoice(best.tile_q, best.kernel_type, tuple(candidates))
