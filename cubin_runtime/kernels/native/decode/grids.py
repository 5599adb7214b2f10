"""How a decode kernel would cut a problem: its grids, and the work that each would be."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.driver import DeviceFacts
from ..constants import CONSTANTS
from ..cost_model import Costs, Work
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


class Sizes(NamedTuple):
    """What the cutting of a problem takes from a kernel, and how many of its CTAs fit on a multiprocessor."""

    rows: int
    tile_tokens: int
    resident: int
    tma: bool
    segments: bool


class Extent(NamedTuple):
    """A launch's part of a problem in the tiles of a kernel: bounds, as ragged requests fill fewer.

    ``row_tiles`` are those of a request, ``pairs`` the (request, KV head, row tile) that have work, ``tiles`` the tiles
    of one pair with the keys that are read of it, ``splits`` its parts under ``batch_invariant``.
    """

    row_tiles: int
    requests: int
    pairs: int
    kv_tokens: int
    tiles: int
    splits: int


def sizes_of(kernel: NativeKernel, shared_bytes: int) -> Sizes:
    """The sizes of a decode kernel on a device with ``shared_bytes`` of shared memory a multiprocessor."""
    by_shared = shared_bytes // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    resident = max(1, min(by_shared, trait_of(kernel, "ctas_per_multiprocessor")))
    return Sizes(
        rows=trait_of(kernel, "rows"),
        tile_tokens=trait_of(kernel, "tile_tokens"),
        resident=resident,
        tma=bool(kernel.traits["tma"]),
        segments=kernel.traits["arithmetic"] == SEGMENTS,
    )


def extent_of(sizes: Sizes, shape: DecodeShape, part: Part) -> Extent:
    """What ``part`` of a problem is to a kernel of ``sizes``."""
    rows, tile_tokens = sizes.rows, sizes.tile_tokens
    row_tiles = max(1, -(-min(shape.rows, part.max_rows) // rows))
    requests = max(1, shape.batch)
    all_row_tiles = row_tiles * requests
    if shape.ragged:
        # Those of many rows take many of the tokens.
        all_rows = shape.tokens * shape.group
        requests = max(1, min(shape.batch, all_rows // max(1, part.min_rows)))
        all_row_tiles = min(row_tiles * requests, requests + all_rows // rows)
    return Extent(
        row_tiles=row_tiles,
        requests=requests,
        pairs=all_row_tiles * shape.kv_heads,
        kv_tokens=shape.kv_tokens(tile_tokens),
        tiles=shape.tiles(tile_tokens),
        splits=shape.segments if sizes.segments else shape.splits(tile_tokens),
    )


def splits_of(sizes: Sizes, shape: DecodeShape, row_tiles: int, ctas: int) -> int:
    """The kernel's field ``splits``; for segments the partials of a CTA.

    Of the output tile in whose middle its range begins, a CTA writes every segment; of the one that its range ends in,
    what it folded from the first segment on. Requests that overlap in wrong prefix sums count in full.
    """
    if not sizes.segments:
        return shape.splits(sizes.tile_tokens)
    tiles = shape.batch * row_tiles * shape.kv_heads * shape.tiles(sizes.tile_tokens)
    segment_tiles = CONSTANTS.segment_tokens // sizes.tile_tokens
    return 1 + min(shape.segments - 1, -(-tiles // (ctas * segment_tiles)))


def grids_of(sizes: Sizes, extent: Extent, shape: DecodeShape, device: DeviceFacts, costs: Costs) -> list[Grid]:
    """A cluster for each pair, where that fits; then even cuts of all tiles.

    Of those one for each number of CTAs on a multiprocessor that the work is enough for, up to two; fewer CTAs first.
    """
    row_tiles, pairs, tiles, multiprocessors = extent.row_tiles, extent.pairs, extent.tiles, device.multiprocessors
    # What one CTA takes at a time: a tile of the line, or a part of a pair.
    units = pairs * (extent.splits or tiles)
    grids = _cluster_grid(sizes, extent, shape, device)
    group_sizes = _divisors(shape.kv_heads, costs.max_cta_group_size)
    # Heads that share a line of 128 bytes would drift apart where some have a multiprocessor for themselves.
    shares_lines = shape.head_dim * BY_SHORT[shape.dtype].nbytes < 128
    for resident in range(1, sizes.resident + 1):
        if resident > 1 and units <= (resident - 1) * multiprocessors:
            break
        ctas = min(resident * multiprocessors, units)
        together = max([size for size in group_sizes if ctas % size * costs.idle_share <= ctas])
        # Where few CTAs idle for it, teams that all end on borders of pairs: others stay behind by a partial.
        teams = ctas // together
        fewest = teams if resident > 1 and shares_lines else teams - teams // costs.idle_share
        borders = (n for n in range(teams, fewest - 1, -1) if _ends_on_borders(sizes, shape, n, pairs // together))
        even = next(borders, teams)
        if even != teams:
            grids.append(Grid(even * together, resident, together, row_tiles, pairs * tiles))
        grids.append(Grid(teams * together, resident, together, row_tiles, pairs * tiles))
    return grids


@lru_cache(maxsize=256)
def _divisors(number: int, most: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, most + 1) if number % size == 0)


def _cluster_grid(sizes: Sizes, extent: Extent, shape: DecodeShape, device: DeviceFacts) -> list[Grid]:
    """As many CTAs to a pair as make one wave with one CTA on a multiprocessor; none where that does not fit.

    CTAs of a request far below its bound would idle, and could not help the others. So it takes one request alone, or
    so few keys to a CTA that little can be lost.
    """
    row_tiles, tiles, multiprocessors = extent.row_tiles, extent.tiles, device.multiprocessors
    pairs = shape.batch * row_tiles * shape.kv_heads
    if not sizes.tma or shape.batch_invariant or not 0 < pairs <= multiprocessors:
        return []
    # A cluster runs on multiprocessors of one GPC, whose number differs: with one CTA on each, some stay idle.
    places = multiprocessors if sizes.resident > 1 else multiprocessors * 3 // 4
    most = max(1, min(places // pairs, tiles, CONSTANTS.decode_max_cluster_ctas))
    parts = 1 << most.bit_length() - 1
    if shape.batch == 1 or -(-tiles // parts) * sizes.tile_tokens <= _LITTLE_KEYS:
        return [Grid(pairs * parts, 1, 1, row_tiles, pairs * tiles, parts)]
    return []


def _ends_on_borders(sizes: Sizes, shape: DecodeShape, teams: int, blocks: int) -> bool:
    """Whether requests as long as their bound give every team whole blocks of pairs, or an equal part of one."""
    if shape.ragged or (shape.batch_invariant and not sizes.segments):
        return False
    return blocks % teams == 0 or teams % blocks == 0


def work_of(sizes: Sizes, extent: Extent, grid: Grid, shape: DecodeShape, device: DeviceFacts) -> Work:
    """What the cost model has to know of the problem on this grid."""
    item_bytes, pairs, tiles, parts = BY_SHORT[shape.dtype].nbytes, extent.pairs, extent.tiles, extent.splits
    if grid.cluster_size:
        parts = grid.cluster_size
        tiles_per_cta = -(-tiles // parts)
    elif parts and not (sizes.segments and pairs % grid.ctas == 0):
        tiles_per_cta = -(-pairs * parts // grid.ctas) * -(-tiles // parts)
    else:
        # But for grids that end on borders of pairs, the cuts of the line fall in the middle of them.
        even = _ends_on_borders(sizes, shape, grid.ctas // grid.cta_group_size, pairs // grid.cta_group_size)
        parts = min(tiles, -(-grid.ctas // pairs) + (0 if even else 1))
        tiles_per_cta = -(-grid.tiles // grid.ctas)
    kv_pairs = extent.requests * shape.kv_heads
    return Work(
        kv_bytes=2 * kv_pairs * extent.kv_tokens * shape.head_dim * item_bytes,
        item_bytes=item_bytes,
        q_item_bytes=BY_SHORT[shape.q_dtype or shape.dtype].nbytes,
        rows=sizes.rows,
        head_dim=shape.head_dim,
        resident=grid.resident,
        row_tiles=pairs / kv_pairs,
        tile_tokens=sizes.tile_tokens,
        tiles_per_cta=tiles_per_cta,
        parts=parts,
        multiprocessors=device.multiprocessors,
        cluster_ctas=grid.ctas if grid.cluster_size else 0,
        segments=sizes.segments,
    )


def trait_of(kernel: NativeKernel, name: str) -> int:
    """A trait that is a number."""
    return int(kernel.traits[name])
