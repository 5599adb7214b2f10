"""How a decode kernel would cut a problem: its grids, and the work that each would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ..constants import CONSTANTS
from ..cost_model import Costs, Work
from .shape import DecodeShape

ANY_ROWS = (1 << 31) - 1
# Keys of a CTA whose time is short beside that of a launch.
_LITTLE_KEYS = 512
# Shared memory that the driver keeps for itself in each resident block (CUDA programming guide).
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Part:
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


def grids_of(kernel: NativeKernel, shape: DecodeShape, part: Part, device: DeviceFacts, costs: Costs) -> list[Grid]:
    """A cluster for each pair, where that fits; then even cuts of all tiles.

    Of those one for each number of CTAs on a multiprocessor that the work is enough for, up to two; fewer CTAs first.
    """
    row_tiles = max(1, -(-min(shape.rows, part.max_rows) // trait_of(kernel, "rows")))
    pairs, tile_tokens = _pairs(kernel, shape, part), trait_of(kernel, "tile_tokens")
    tiles = shape.tiles(tile_tokens)
    # What one CTA takes at a time: a tile of the line, or a part of a pair.
    units = pairs * (shape.splits(tile_tokens) or tiles)
    grids = list(_cluster_grid(kernel, shape, device))
    sizes = [size for size in range(1, costs.max_cta_group_size + 1) if shape.kv_heads % size == 0]
    for resident in range(1, _resident(kernel, device) + 1):
        if resident > 1 and units <= (resident - 1) * device.multiprocessors:
            break
        ctas = min(resident * device.multiprocessors, units)
        together = max([size for size in sizes if ctas % size * costs.idle_share <= ctas])
        # Where few CTAs idle for it, teams that all end on borders of pairs: others stay behind by a partial. But not
        # where heads that share a line of 128 bytes would drift apart, as some have a multiprocessor for themselves.
        teams = ctas // together
        shares_lines = shape.head_dim * BY_SHORT[shape.dtype].nbytes < 128
        fewest = teams if resident > 1 and shares_lines else teams - teams // costs.idle_share
        even = next((n for n in range(teams, fewest - 1, -1) if _ends_on_borders(shape, n, pairs // together)), teams)
        for count in dict.fromkeys((even, teams)):
            grids.append(Grid(count * together, resident, together, row_tiles, pairs * tiles))
    return grids


def _cluster_grid(kernel: NativeKernel, shape: DecodeShape, device: DeviceFacts) -> Iterator[Grid]:
    """As many CTAs to a pair as make one wave with one CTA on a multiprocessor.

    CTAs of a request far below its bound would idle, and could not help the others. So it takes one request alone, or
    so few keys to a CTA that little can be lost.
    """
    rows, tile_tokens = trait_of(kernel, "rows"), trait_of(kernel, "tile_tokens")
    row_tiles, tiles = max(1, -(-shape.rows // rows)), shape.tiles(tile_tokens)
    pairs = shape.batch * row_tiles * shape.kv_heads
    if not kernel.traits["tma"] or shape.batch_invariant or not 0 < pairs <= device.multiprocessors:
        return
    # A cluster runs on multiprocessors of one GPC, whose number differs: with one CTA on each, some stay idle.
    places = device.multiprocessors if _resident(kernel, device) > 1 else device.multiprocessors * 3 // 4
    most = max(1, min(places // pairs, tiles, CONSTANTS.decode_max_cluster_ctas))
    parts = 1 << most.bit_length() - 1
    if shape.batch == 1 or -(-tiles // parts) * tile_tokens <= _LITTLE_KEYS:
        yield Grid(pairs * parts, 1, 1, row_tiles, pairs * tiles, parts)


def _ends_on_borders(shape: DecodeShape, teams: int, blocks: int) -> bool:
    """Whether requests as long as their bound give every team whole blocks of pairs, or an equal part of one."""
    if shape.ragged or shape.batch_invariant:
        return False
    return blocks % teams == 0 or teams % blocks == 0


def _requests(shape: DecodeShape, part: Part) -> int:
    """Requests that a launch can have at most; those of many rows take many of the tokens."""
    if not shape.ragged:
        return max(1, shape.batch)
    return max(1, min(shape.batch, shape.tokens * shape.group // max(1, part.min_rows)))


def _pairs(kernel: NativeKernel, shape: DecodeShape, part: Part) -> int:
    """(request, KV head, row tile) that have work at most; ragged requests fill fewer row tiles than their bound."""
    rows, requests = trait_of(kernel, "rows"), _requests(shape, part)
    row_tiles = max(1, -(-min(shape.rows, part.max_rows) // rows)) * requests
    if shape.ragged:
        row_tiles = min(row_tiles, requests + shape.tokens * shape.group // rows)
    return row_tiles * shape.kv_heads


def work_of(kernel: NativeKernel, grid: Grid, shape: DecodeShape, part: Part, device: DeviceFacts) -> Work:
    """What the cost model has to know of the problem on this grid."""
    item_bytes, tile_tokens = BY_SHORT[shape.dtype].nbytes, trait_of(kernel, "tile_tokens")
    pairs, requests = _pairs(kernel, shape, part), _requests(shape, part)
    tiles, parts = shape.tiles(tile_tokens), shape.splits(tile_tokens)
    if grid.cluster_size:
        parts = grid.cluster_size
        tiles_per_cta = -(-tiles // parts)
    elif parts:
        tiles_per_cta = -(-pairs * parts // grid.ctas) * -(-tiles // parts)
    else:
        # But for grids that end on borders of pairs, the cuts of the line fall in the middle of them.
        even = _ends_on_borders(shape, grid.ctas // grid.cta_group_size, pairs // grid.cta_group_size)
        parts = min(tiles, -(-grid.ctas // pairs) + (0 if even else 1))
        tiles_per_cta = -(-grid.tiles // grid.ctas)
    return Work(
        kv_bytes=2 * requests * shape.kv_heads * shape.kv_tokens(tile_tokens) * shape.head_dim * item_bytes,
        item_bytes=item_bytes,
        q_item_bytes=BY_SHORT[shape.q_dtype or shape.dtype].nbytes,
        rows=trait_of(kernel, "rows"),
        head_dim=shape.head_dim,
        resident=grid.resident,
        row_tiles=pairs / (requests * shape.kv_heads),
        tile_tokens=tile_tokens,
        tiles_per_cta=tiles_per_cta,
        parts=parts,
        multiprocessors=device.multiprocessors,
        cluster_ctas=grid.ctas if grid.cluster_size else 0,
    )


def _resident(kernel: NativeKernel, device: DeviceFacts) -> int:
    by_shared = device.shared_bytes_per_multiprocessor // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    return max(1, min(by_shared, trait_of(kernel, "ctas_per_multiprocessor")))


def trait_of(kernel: NativeKernel, name: str) -> int:
    """A trait that is a number."""
    return int(kernel.traits[name])
