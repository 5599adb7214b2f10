"""How a decode kernel would cut a problem: its grids, and the work that each would be."""

from __future__ import annotations

from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.driver import DeviceFacts
from ..constants import CONSTANTS
from ..cost_model import Costs, Estimate, Pace, pace_of
from .shape import DecodeShape

ANY_ROWS = (1 << 31) - 1
# The arithmetic of kernels that give the bits of prefill: they split keys at absolute multiples, and each CTA takes
# those splits that begin in its range together.
SEGMENTS = "segments"
# Keys of a CTA whose time is short beside that of a launch.
_LITTLE_KEYS = 512
# Shared memory that the driver keeps for itself in each resident block (CUDA programming guide).
_RESERVED_SHARED_BYTES = 1024


class Part(NamedTuple):
    """The requests that one launch takes, by their own rows (both bounds inclusive), and the arithmetic they get."""

    min_rows: int
    max_rows: int
    arithmetic: str | None

    def __str__(self) -> str:
        if (self.min_rows, self.max_rows) == (0, ANY_ROWS):
            return "all requests"
        return f"requests of {f'up to {self.max_rows}' if not self.min_rows else f'at least {self.min_rows}'} rows"


class Grid(NamedTuple):
    """How a kernel would cut a problem: CTAs, those on one multiprocessor, and what they share.

    ``cluster_size``: each pair is cut in so many parts, for the CTAs of a cluster; 0: the grid cuts all tiles evenly.
    """

    ctas: int
    resident: int
    cta_group_size: int
    row_tiles: int
    tiles: int
    cluster_size: int = 0


class Cut(NamedTuple):
    """A kernel as it would cut requests of one form, whatever their number; bounds, as ragged requests fill fewer.

    ``resident`` is how many of its CTAs fit on a multiprocessor, ``row_tiles`` are those of a request, ``tiles`` the
    tiles of one pair (request, KV head, row tile) with the ``kv_bytes`` that are read of a request's KV head,
    ``splits`` a pair's parts under ``batch_invariant``, which are ``segments`` where prefill gives the same bits.
    ``group_sizes`` are the KV heads that CTAs could read side by side, most first; heads that ``shares_lines`` have
    lines of 128 bytes in common. ``paces`` are by the CTAs on a multiprocessor, from 1.
    """

    rows: int
    tile_tokens: int
    resident: int
    tma: bool
    row_tiles: int
    tiles: int
    kv_bytes: int
    splits: int
    segments: bool
    group_sizes: tuple[int, ...]
    shares_lines: bool
    paces: tuple[Pace, ...]


class Extent(NamedTuple):
    """A launch's part of a batch: requests, and pairs that have work."""

    requests: int
    pairs: int


def cut_of(kernel: NativeKernel, shape: DecodeShape, part: Part, device: DeviceFacts, costs: Costs) -> Cut:
    """How ``kernel`` would cut the requests of ``part``, whatever their number and that of their tokens together."""
    by_shared = device.shared_bytes_per_multiprocessor // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    resident = max(1, min(by_shared, trait_of(kernel, "ctas_per_multiprocessor")))
    rows, tile_tokens = trait_of(kernel, "rows"), trait_of(kernel, "tile_tokens")
    item_bytes, segments = BY_SHORT[shape.dtype].nbytes, kernel.traits["arithmetic"] == SEGMENTS
    paces = [
        pace_of(
            costs,
            item_bytes=item_bytes,
            q_item_bytes=BY_SHORT[shape.q_dtype or shape.dtype].nbytes,
            head_dim=shape.head_dim,
            rows=rows,
            tile_tokens=tile_tokens,
            resident=number,
            multiprocessors=device.multiprocessors,
            segments=segments,
        )
        for number in range(1, resident + 1)
    ]
    return Cut(
        rows=rows,
        tile_tokens=tile_tokens,
        resident=resident,
        tma=bool(kernel.traits["tma"]),
        row_tiles=max(1, -(-min(shape.rows, part.max_rows) // rows)),
        tiles=shape.tiles(tile_tokens),
        kv_bytes=2 * shape.kv_tokens(tile_tokens) * shape.head_dim * item_bytes,
        splits=shape.segments if segments else shape.splits(tile_tokens),
        segments=segments,
        group_sizes=tuple(n for n in range(costs.max_cta_group_size, 0, -1) if shape.kv_heads % n == 0),
        # Heads that share a line would drift apart where some have a multiprocessor for themselves.
        shares_lines=shape.head_dim * item_bytes < 128,
        paces=tuple(paces),
    )


def extent_of(cut: Cut, shape: DecodeShape, part: Part) -> Extent:
    """What ``part`` of a batch is to a kernel."""
    requests = max(1, shape.batch)
    if not shape.ragged:
        return Extent(requests, cut.row_tiles * requests * shape.kv_heads)
    # Those of many rows take many of the tokens.
    all_rows = shape.tokens * shape.group
    requests = max(1, min(shape.batch, all_rows // max(1, part.min_rows)))
    row_tiles = min(cut.row_tiles * requests, requests + all_rows // cut.rows)
    return Extent(requests, row_tiles * shape.kv_heads)


def grids_of(cut: Cut, extent: Extent, shape: DecodeShape, device: DeviceFacts, costs: Costs) -> list[Grid]:
    """A cluster for each pair, where that fits; then even cuts of all tiles.

    Of those one for each number of CTAs on a multiprocessor that the work is enough for, up to two; fewer CTAs first.
    """
    pairs, multiprocessors, idle_share = extent.pairs, device.multiprocessors, costs.idle_share
    row_tiles, all_tiles = cut.row_tiles, pairs * cut.tiles
    # What one CTA takes at a time: a tile of the line, or a part of a pair.
    units = pairs * (cut.splits or cut.tiles)
    on_borders = not shape.ragged and (cut.segments or not shape.batch_invariant)
    grids = _cluster_grid(cut, shape, device)
    for resident in range(1, cut.resident + 1):
        if resident > 1 and units <= (resident - 1) * multiprocessors:
            break
        ctas = min(resident * multiprocessors, units)
        together = 1
        for together in cut.group_sizes:
            if ctas % together * idle_share <= ctas:
                break
        # Where few CTAs idle for it, teams that all end on borders of pairs: others stay behind by a partial.
        teams, blocks = ctas // together, pairs // together
        if on_borders:
            fewest = teams if resident > 1 and cut.shares_lines else teams - teams // idle_share
            even = teams
            while even >= fewest and blocks % even and even % blocks:
                even -= 1
            if fewest <= even < teams:
                grids.append(Grid(even * together, resident, together, row_tiles, all_tiles))
        grids.append(Grid(teams * together, resident, together, row_tiles, all_tiles))
    return grids


def _cluster_grid(cut: Cut, shape: DecodeShape, device: DeviceFacts) -> list[Grid]:
    """As many CTAs to a pair as make one wave with one CTA on a multiprocessor; none where that does not fit.

    CTAs of a request far below its bound would idle, and could not help the others. So it takes one request alone, or
    so few keys to a CTA that little can be lost.
    """
    row_tiles, tiles, multiprocessors = cut.row_tiles, cut.tiles, device.multiprocessors
    pairs = shape.batch * row_tiles * shape.kv_heads
    if not cut.tma or shape.batch_invariant or not 0 < pairs <= multiprocessors:
        return []
    # A cluster runs on multiprocessors of one GPC, whose number differs: with one CTA on each, some stay idle.
    places = multiprocessors if cut.resident > 1 else multiprocessors * 3 // 4
    most = max(1, min(places // pairs, tiles, CONSTANTS.decode_max_cluster_ctas))
    parts = 1 << most.bit_length() - 1
    if shape.batch == 1 or -(-tiles // parts) * cut.tile_tokens <= _LITTLE_KEYS:
        return [Grid(pairs * parts, 1, 1, row_tiles, pairs * tiles, parts)]
    return []


def estimate_of(cut: Cut, extent: Extent, grid: Grid, shape: DecodeShape) -> Estimate:
    """What the problem is expected to take on this grid."""
    pairs, tiles, parts = extent.pairs, cut.tiles, cut.splits
    if grid.cluster_size:
        parts = grid.cluster_size
        tiles_per_cta = -(-tiles // parts)
    elif parts and not (cut.segments and pairs % grid.ctas == 0):
        tiles_per_cta = -(-pairs * parts // grid.ctas) * -(-tiles // parts)
    else:
        # Where requests are as long as their bound, a team may have whole blocks of pairs, or an equal part of one.
        # The other cuts of the line fall in the middle of them.
        teams, blocks = grid.ctas // grid.cta_group_size, pairs // grid.cta_group_size
        even = not shape.ragged and not (blocks % teams and teams % blocks)
        parts = min(tiles, -(-grid.ctas // pairs) + (0 if even else 1))
        tiles_per_cta = -(-grid.tiles // grid.ctas)
    kv_pairs = extent.requests * shape.kv_heads
    return cut.paces[grid.resident - 1].estimate(
        kv_pairs * cut.kv_bytes, pairs / kv_pairs, tiles_per_cta, parts, grid.ctas if grid.cluster_size else 0
    )


def splits_of(cut: Cut, grid: Grid, shape: DecodeShape) -> int:
    """The kernel's field ``splits``: the most of a pair, or for segments the partials of a CTA.

    Of the output tile in whose middle its range begins, a CTA writes every segment; of the one that its range ends in,
    what it folded from the first segment on. Requests that overlap in wrong prefix sums count in full.
    """
    if not cut.segments:
        return cut.splits
    tiles = shape.batch * grid.row_tiles * shape.kv_heads * cut.tiles
    segment_tiles = CONSTANTS.segment_tokens // cut.tile_tokens
    return 1 + min(cut.splits - 1, -(-tiles // (grid.ctas * segment_tiles)))


def trait_of(kernel: NativeKernel, name: str) -> int:
    """A trait that is a number."""
    return int(kernel.traits[name])
