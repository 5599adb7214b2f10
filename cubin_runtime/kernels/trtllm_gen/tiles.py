"""The tile of grouped query tokens and heads: a model of the time that each size takes.

All arithmetic is float32, each operation rounded, in the order written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...artifacts.tables.metadata import KernelMeta
from .grid import Geometry
from .problem import Problem
from .traits import (
    KernelKey,
    KernelType,
    ceil_div,
    float32,
)

SIZES = (128, 64, 32, 16, 8)
SMALLEST_KEEPING = 64
# Cost of one KV token in the main loop, and of one merge, relative to the smallest tile.
MAIN_COST: Mapping[int, float] = {t: float32(c) for t, c in zip(SIZES, (2.2, 1.68, 1.48, 1.2, 1.0), strict=True)}
MERGE_COST: Mapping[int, float] = {t: float32(c) for t, c in zip(SIZES, (1.32, 1.2, 1.08, 1.03, 1.0), strict=True)}
MERGED_TOKENS = 128

# Finds the kernel of a state and lays it out; None where the policy passes over a state without a kernel.
Probe = Callable[[KernelKey], tuple[KernelMeta, Geometry] | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile size that was looked at; ``cost`` is None where there is no kernel for it."""

    tile_q: int
    kernel: str | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The tile size taken, and what it was compared with (nothing where the first estimate stands)."""

    tile_q: int
    kernel_type: KernelType
    candidates: tuple[Candidate, ...]


def kernel_type_of(tile_q: int) -> KernelType:
    """Tiles of 64 and more keep the order of the operands, smaller ones swap it."""
    return KernelType.KEEPS_AB if tile_q >= SMALLEST_KEEPING else KernelType.SWAPS_AB


def largest_tile(grouped: int) -> int:
    """The smallest tile that holds ``grouped`` rows of query tokens and heads, 128 if none does."""
    return next((size for size in reversed(SIZES) if grouped <= size), SIZES[0])


def modelled_cost(tile_q: int, meta: KernelMeta, geometry: Geometry, problem: Problem) -> float:
    """Relative time of a launch: main loop and merge of one CTA, times the waves of CTAs."""
    steps = ceil_div(ceil_div(problem.max_kv, meta.step_kv), geometry.ctas_kv)
    tokens = float32(steps * meta.step_kv)
    main = float32(MAIN_COST[tile_q] * tokens)
    merge = float32(float32(MERGE_COST[tile_q] * MERGED_TOKENS) * geometry.ctas_kv)
    waves = ceil_div(geometry.ctas, problem.multiprocessors)
    return float32(float32(main + merge) * float32(waves))


def choose_tile(problem: Problem, state: KernelKey, probe: Probe) -> TileChoice:
    """The cheapest tile up to that of ``state``; of equal ones the largest.

    What laying a candidate out changes in the multi-CTA mode and the scheduler carries over to the next one:
    the reference compares them so.
    """
    default = TileChoice(state.tile_q, KernelType(state.kernel_type), ())
    first = probe(state)
    if first is not None:
        _, geometry = first
        state = geometry.asks_for or state
        if geometry.ctas * 2 > problem.multiprocessors:
            return default
    if default.tile_q <= SIZES[-1]:
        return default
    best, lowest = default, float("inf")
    candidates = []
    for tile_q in SIZES:
        if tile_q > default.tile_q or tile_q < problem.group:
            continue
        state = state._replace(tile_q=tile_q, kernel_type=kernel_type_of(tile_q))
        found = probe(state)
        if found is None:
            candidates.append(Candidate(tile_q, None, None))
            continue
        meta, geometry = found
        state = geometry.asks_for or state
        cost = modelled_cost(tile_q, meta, geometry, problem)
        candidates.append(Candidate(tile_q, meta.symbol, cost))
        if cost < lowest:
            best, lowest = TileChoice(tile_q, kernel_type_of(tile_q), ()), cost
    return TileChoice(best.tile_q, best.kernel_type, tuple(candidates))
