"""The workspace of a launch: counters, softmax statistics and scratch, and their sizes."""

from __future__ import annotations

from ...artifacts.tables.metadata import KernelMeta
from ...values import dataclass
from .errors import WorkspaceRefused
from .grid import Geometry
from .problem import Problem
from .traits import MultiCtasMode

ALIGNMENT = 16
COUNTER_BYTES = 8192 * 256 * 4
STATS_BYTES_PER_ROW = 8
STATS_GUARD_BYTES = 1 << 20
STATS_ROUND_UP = 256
PARTIAL_BYTES = 2
_COUNTER_ITEM_BYTES = 4
_COUNTER_MULTIPLE = 8
_MERGING = (MultiCtasMode.GMEM, MultiCtasMode.SEPARATE_KERNEL)


@dataclass(frozen=True, slots=True)
class Regions:
    """Device addresses of the parts of a workspace; 0 for a part that the call does not need."""

    counters: int
    softmax_stats: int
    scratch: int


def place_regions(
    address: int, nbytes: int, *, counters: bool, stats_rows: tuple[int, int, int] | None, scratch: bool
) -> Regions:
    """Place counters, statistics and scratch in a workspace, in this order; the scratch takes the rest.

    All sizes are multiples of the alignment, so that each part is aligned like the first.

    Args:
        address: begin of the workspace; the first part begins at the next multiple of 16.
        nbytes: size of the workspace.
        counters: whether to place counters of finished CTAs. They must be zero before first use.
        stats_rows: (query heads, batch, max_q) if the call wants an LSE.
        scratch: whether the launch may write partial results.

    Raises:
        WorkspaceRefused: the workspace is too small for counters and statistics.
    """
    begin = address + -address % ALIGNMENT
    place, end = begin, address + nbytes
    counters_at = stats_at = 0
    if counters:
        counters_at, place = place, _take(place, COUNTER_BYTES, begin, end, "counters")
    if stats_rows is not None:
        stats_at, place = place, _take(place, stats_bytes(*stats_rows), begin, end, "softmax statistics")
    return Regions(counters_at, stats_at, place if scratch else 0)


def stats_bytes(heads_q: int, batch: int, max_q: int) -> int:
    """Bytes of the softmax statistics, a float32 maximum and sum per row, with their guard."""
    rows = heads_q * batch * _round_up(max_q, STATS_ROUND_UP)
    return STATS_BYTES_PER_ROW * rows + STATS_GUARD_BYTES


def partial_offset(problem: Problem, meta: KernelMeta) -> int:
    """Byte offset of the partial outputs in the scratch: behind one row of statistics per multiprocessor and step."""
    return STATS_BYTES_PER_ROW * problem.multiprocessors * meta.step_q


def scratch_bytes(problem: Problem, meta: KernelMeta, geometry: Geometry, mode: MultiCtasMode) -> int:
    """Bytes of scratch that a launch writes: statistics and 2-byte partial outputs of every CTA.

    Only kernels that merge through global memory write scratch. The reference launcher never checks its size.
    """
    if mode not in _MERGING:
        return 0
    rows = geometry.ctas * meta.tile_q
    return partial_offset(problem, meta) + rows * meta.head_dim_per_cta_v * PARTIAL_BYTES


def workspace_bytes(problem: Problem, scratch: int) -> int:
    """Bytes that a workspace at a multiple of 16 needs for statistics and ``scratch`` bytes; counters lie apart."""
    return scratch + (stats_bytes(problem.heads_q, problem.batch, problem.max_q) if problem.has_lse else 0)


def counter_bytes(problem: Problem, geometry: Geometry, mode: MultiCtasMode) -> int:
    """Bytes of zeroed counters of finished CTAs that a launch needs; 0 for kernels that do not merge through memory."""
    if mode not in _MERGING:
        return 0
    counted = max(problem.batch * problem.heads_q * geometry.ctas_q, problem.multiprocessors)
    return _round_up(counted, _COUNTER_MULTIPLE) * _COUNTER_ITEM_BYTES


def _take(place: int, size: int, begin: int, end: int, what: str) -> int:
    if place + size > end:
        raise WorkspaceRefused(
            f"workspace: {what} take {size} bytes, {max(0, end - place)} of {max(0, end - begin)} are left; "
            f"the fixed parts need {place + size - begin} bytes",
            place + size - begin,
        )
    return place + size


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
