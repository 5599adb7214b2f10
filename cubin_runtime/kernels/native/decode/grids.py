"""The shape of a decode, the grids with which a kernel can split it, and the work of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, fields
from operator import attrgetter
from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ..constants import CONSTANTS
from ..cost_model import Costs, Estimate, Pace, pace_of

ANY_ROWS = (1 << 31) - 1
# The arithmetic of kernels that give the bits of prefill: they split keys at absolute multiples, and each CTA takes
# those splits that begin in its range together.
SEGMENTS = "segments"
# A CTA may have so many keys beyond an equal share if then no output tile is split: that costs less than a merge. With
# few output tiles there would be CTAs without work. Clusters save the merge through memory altogether.
_SLACK_TOKENS, _FEW_SLACK_TOKENS, _CLUSTER_SLACK_TOKENS = 1024, 256, 2048
# Splits of an output tile where output tiles are so few that all CTAs would make more: to merge those takes longer than
# to read the keys, where the bound is far above the lengths.
_FEW_SPLITS = (16, 32, 48)
# Up to this bound a single request's cluster counts as starting sooner where there is no choice: under a longer one it
# would be chosen for short requests, and lose too much in long ones.
_ALONE_TOKENS = 16384
# A single request's kernel of so many rows may have more clusters than output tiles: to merge more rows takes so long
# that the device's choice would come late.
_CHOICE_ROWS = 8
# Keys of requests below the bound, for which a launch is chosen too.
_SHORTER_TOKENS = (128, 1024)
# One cluster in so many may idle so that, where requests are long, ranges end at boundaries of output tiles.
_CLUSTER_IDLE_SHARE = 32
# Row tiles that read the same keys drift apart over so many of them if some of their CTAs have a multiprocessor for
# themselves: then a part of the keys is read twice.
_DRIFT_TOKENS = 4096
# Then requests of so many keys have whole output tiles in any grid: of more, one among short ones would take too long.
_DRIFT_SLACK_TOKENS = 2048
# So few bytes of keys and values stay in L2 until all row tiles have read them, also where these drift apart.
_BYTES_IN_L2 = 32 << 20
# Shared memory that the driver keeps for itself in each resident block (CUDA programming guide).
_RESERVED_SHARED_BYTES = 1024
# batch_invariant makes at most this many splits of a row tile over all KV heads together: enough for a whole GPU.
_INVARIANT_SPLITS = 128


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The facts that decide the kernel and the grid: bounds, never the lengths themselves.

    ``dtype`` is that of the KV cache and ``q_dtype`` that of the queries (``bf16``, ``fp16``, ``e4m3``; empty: as the
    cache's), ``group`` the query heads per KV head,
    ``q_len`` the query tokens of each request or, where ``ragged``, their bound; then ``tokens`` are those of all
    requests. ``window_left`` is -1 without a window.
    """

    dtype: str
    head_dim: int
    group: int
    kv_heads: int
    batch: int
    _: KW_ONLY
    q_dtype: str = ""
    q_len: int = 1
    tokens: int = 0
    ragged: bool = False
    max_seq_len: int
    window_left: int = -1
    batch_invariant: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """All fields except the number of requests and their total number of tokens."""
        return _FORM(self)

    @classmethod
    def of_form(cls, form: tuple[object, ...]) -> DecodeShape:
        """One request of that form."""
        return cls(batch=1, **dict(zip(_FORM_NAMES, form, strict=True)))  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """Query rows of one request and KV head, or their bound: tokens times group."""
        return self.q_len * self.group

    def kv_tokens(self, tile_tokens: int) -> int:
        """Keys that a request reads at most: a window ends with the last query and may begin and end within tiles."""
        if self.window_left < 0:
            return self.max_seq_len
        return min(self.max_seq_len, self.window_left + self.q_len + tile_tokens)

    def tiles(self, tile_tokens: int) -> int:
        """Tiles of a request and KV head at most; one without keys has an empty one."""
        return max(1, -(-self.kv_tokens(tile_tokens) // tile_tokens))

    @property
    def segments(self) -> int:
        """Segments of a request at most, where prefill and decode give the same bits."""
        segment = CONSTANTS.segment_tokens
        return max(1, -(-min(self.max_seq_len, self.kv_tokens(segment)) // segment))

    def splits(self, tile_tokens: int) -> int:
        """Splits of an output tile under ``batch_invariant``, at most."""
        return min(-(-_INVARIANT_SPLITS // self.kv_heads), split_count(self.tiles(tile_tokens), tile_tokens))


_FORM_NAMES = tuple(field.name for field in fields(DecodeShape) if field.name not in ("batch", "tokens"))
_FORM = attrgetter(*_FORM_NAMES)


def split_count(tiles: int, tile_tokens: int) -> int:
    """Splits of an output tile of ``tiles`` KV tiles under ``batch_invariant``, without their bound, as in the kernels.

    It never decreases with the tiles: a bound on the tiles bounds the splits, and changes those of no request.
    """
    tokens = tiles * tile_tokens
    short = min(CONSTANTS.decode_short_splits, -(-tokens // CONSTANTS.decode_short_split_tokens))
    return max(-(-tokens // CONSTANTS.decode_split_tokens), short)


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
    """The grid of a launch: its CTAs, those resident on one multiprocessor, and the CTA group size.

    ``cluster_size``: the CTAs of a cluster, which split one output tile; 0: the CTAs divide the tile space evenly.
    ``slack_tiles`` is the kernel's field of that name. ``alone``: a single request has a cluster for each output tile
    and no other CTAs, so these have no choice.
    """

    ctas: int
    resident: int
    cta_group_size: int
    row_tiles: int
    tiles: int
    cluster_size: int = 0
    slack_tiles: int = 0
    alone: bool = False


class Tiling(NamedTuple):
    """The tiling of requests of one form by a kernel, whatever their number: bounds, as ragged requests may need fewer.

    ``resident`` is how many of its CTAs fit on a multiprocessor, ``row_tiles`` are those of a request, ``tiles`` the KV
    tiles of one output tile (request, KV head, row tile), ``tile_bytes`` the bytes of a KV tile,
    ``splits`` those of an output tile under ``batch_invariant``, which are ``segments`` if prefill gives the same bits.
    ``lengths`` are the KV tiles of a request for which a launch should be good: those of its bound, and of requests far
    below; under ``batch_invariant`` the bound's alone, as splits follow from the lengths.
    ``group_sizes`` are the numbers of KV heads that CTAs
    can read side by side, largest first; with ``shares_lines``, heads have cache lines of 128 bytes in common.
    ``paces`` are for one CTA on a multiprocessor, then for two, and so on; none starts before ``least_start_us``, but
    for the clusters of a single request.
    """

    rows: int
    tile_tokens: int
    resident: int
    tma: bool
    row_tiles: int
    tiles: int
    lengths: tuple[int, ...]
    tile_bytes: int
    splits: int
    segments: bool
    group_sizes: tuple[int, ...]
    shares_lines: bool
    paces: tuple[Pace, ...]
    least_start_us: float


class Extent(NamedTuple):
    """A launch's part of a batch: requests, and output tiles that have work."""

    requests: int
    output_tiles: int


def tiling_of(kernel: NativeKernel, shape: DecodeShape, part: Part, device: DeviceFacts, costs: Costs) -> Tiling:
    """The tiling of the requests of ``part`` by ``kernel``, whatever their number and their total number of tokens."""
    by_shared = device.shared_bytes_per_multiprocessor // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    traits = kernel.traits
    resident = max(1, min(by_shared, int(traits["ctas_per_multiprocessor"])))
    rows, tile_tokens = int(traits["rows"]), int(traits["tile_tokens"])
    item_bytes, segments = BY_SHORT[shape.dtype].nbytes, traits["arithmetic"] == SEGMENTS
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
    tiles, bound, splits = shape.tiles(tile_tokens), shape.kv_tokens(1), 0
    if shape.batch_invariant:
        splits = shape.segments if segments else shape.splits(tile_tokens)
    shorter = () if shape.batch_invariant else [tokens for tokens in _SHORTER_TOKENS if tokens < bound]
    return Tiling(
        rows=rows,
        tile_tokens=tile_tokens,
        resident=resident,
        tma=bool(traits["tma"]),
        row_tiles=max(1, -(-min(shape.rows, part.max_rows) // rows)),
        tiles=tiles,
        lengths=(tiles, *[-(-tokens // tile_tokens) for tokens in shorter]),
        tile_bytes=2 * tile_tokens * shape.head_dim * item_bytes,
        splits=splits,
        segments=segments,
        group_sizes=tuple(n for n in range(costs.max_cta_group_size, 0, -1) if shape.kv_heads % n == 0),
        # CTAs that read heads of one cache line drift apart if some have a multiprocessor for themselves, which costs
        # segments less than ranges that end within output tiles.
        shares_lines=shape.head_dim * item_bytes < 128,
        paces=tuple(paces),
        least_start_us=min([min(pace.start_us, pace.cluster_start_us) for pace in paces]),
    )


def extent_of(tiling: Tiling, shape: DecodeShape, part: Part) -> Extent:
    """The requests and output tiles of ``part`` of a batch."""
    requests = max(1, shape.batch)
    if not shape.ragged:
        return Extent(requests, tiling.row_tiles * requests * shape.kv_heads)
    # Requests with many rows have many of the tokens, so there are few of them.
    all_rows = shape.tokens * shape.group
    requests = max(1, min(shape.batch, all_rows // max(1, part.min_rows)))
    row_tiles = min(tiling.row_tiles * requests, requests + all_rows // tiling.rows)
    return Extent(requests, row_tiles * shape.kv_heads)


def grids_of(tiling: Tiling, extent: Extent, shape: DecodeShape, device: DeviceFacts, costs: Costs) -> list[Grid]:
    """One cluster per output tile, if that fits; then grids that divide the tile space evenly.

    There is one of the latter, or two, for each number of CTAs per multiprocessor that has enough work; fewer CTAs
    first.
    """
    output_tiles, multiprocessors, idle_share = extent.output_tiles, device.multiprocessors, costs.idle_share
    row_tiles, all_tiles = tiling.row_tiles, output_tiles * tiling.tiles
    # Units of work: a KV tile of the tile space, or a split of an output tile.
    units = output_tiles * (tiling.splits or tiling.tiles)
    on_borders = not shape.ragged and (tiling.segments or not shape.batch_invariant)
    grids: list[Grid] = []
    for resident in range(1, tiling.resident + 1):
        if resident > 1 and units <= (resident - 1) * multiprocessors:
            break
        ctas = min(resident * multiprocessors, units)
        group_size = 1
        for group_size in tiling.group_sizes:
            if ctas % group_size * idle_share <= ctas:
                break
        # If few CTAs idle for it, CTA groups whose ranges all end at boundaries of output tiles: others write partials.
        groups, blocks = ctas // group_size, output_tiles // group_size
        slack_tokens = _FEW_SLACK_TOKENS if 2 * output_tiles < ctas else _SLACK_TOKENS
        # Under batch_invariant, requests are cut by their own lengths alone.
        slack = 0 if shape.batch_invariant else slack_tokens // tiling.tile_tokens
        if on_borders:
            drifts_apart = resident > 1 and tiling.shares_lines and not tiling.segments
            fewest = groups if drifts_apart else groups - groups // idle_share
            even = groups if blocks >= fewest else groups - groups % blocks
            while even >= fewest and blocks % even and even % blocks:
                even -= 1
            if fewest <= even < groups:
                if resident > 1 and blocks % even == 0 and _drifts(tiling, shape, all_tiles, ctas):
                    slack = max(slack, _DRIFT_SLACK_TOKENS // tiling.tile_tokens)
                else:
                    grids.append(Grid(even * group_size, resident, group_size, row_tiles, all_tiles, 0, slack))
        grids.append(Grid(groups * group_size, resident, group_size, row_tiles, all_tiles, 0, slack))
    few: list[Grid] = []
    if shape.batch == 1 and not shape.batch_invariant and output_tiles * _FEW_SPLITS[0] < grids[0].ctas:
        few = _few_splits_grid(tiling, extent, shape, costs, grids[0])
    return _cluster_grids(tiling, shape, device, (few or grids)[0].ctas) + few + grids


def _cluster_grids(tiling: Tiling, shape: DecodeShape, device: DeviceFacts, ctas: int) -> list[Grid]:
    """As many CTAs per output tile as make one wave with one CTA on each multiprocessor; empty if that does not fit.

    The lengths decide on the device whether clusters take the output tiles: where a request is far longer than others,
    the same CTAs divide the tile space. A single request has one cluster for each output tile, which leaves no choice,
    or up to ``ctas`` CTAs.
    """
    row_tiles, tiles, multiprocessors = tiling.row_tiles, tiling.tiles, device.multiprocessors
    needed = shape.batch * row_tiles
    output_tiles = needed * shape.kv_heads
    if not tiling.tma or shape.batch_invariant or not 0 < output_tiles <= multiprocessors:
        return []
    # A cluster runs on multiprocessors of one GPC, and GPCs differ in size: with one CTA on each, some stay idle.
    unshared = multiprocessors * 3 // 4
    places = multiprocessors if tiling.resident > 1 else unshared
    most = max(1, min(places // output_tiles, tiles, CONSTANTS.decode_max_cluster_ctas))
    splits = 1 << most.bit_length() - 1
    if splits == 1 and row_tiles > 1:  # row tiles that read the same keys would drift apart
        return []
    slack = _CLUSTER_SLACK_TOKENS // tiling.tile_tokens
    one = Grid(splits * shape.kv_heads, 1, shape.kv_heads, row_tiles, output_tiles * tiles, splits, slack)
    if shape.batch == 1:
        alone = one._replace(ctas=one.ctas * row_tiles, alone=True)
        return [alone, *_choice_grid(tiling, one, (min(unshared, ctas), min(places, ctas)))]
    # CTAs without a cluster find a place on any multiprocessor.
    most = (multiprocessors if splits == 1 else places) // one.ctas
    whole = most // needed * needed
    clusters = max(needed, whole if (most - whole) * _CLUSTER_IDLE_SHARE <= most else most)
    return [one._replace(ctas=one.ctas * clusters)]


def _choice_grid(tiling: Tiling, one: Grid, limits: Iterable[int]) -> list[Grid]:
    """More clusters than a single request has output tiles, up to the first of ``limits`` on CTAs that allows any.

    An output tile leaves its cluster once all CTAs, which merge in memory, are faster.
    """
    if tiling.rows > _CHOICE_ROWS or one.cluster_size < CONSTANTS.decode_max_cluster_ctas:
        return []
    for ctas in limits:
        clusters = ctas // one.ctas
        if clusters > one.row_tiles:
            slack = tiling.paces[0].even_slack_tiles(one.cluster_size * clusters // one.row_tiles)
            return [one._replace(ctas=one.ctas * clusters, slack_tiles=slack)]
    return []


def _few_splits_grid(tiling: Tiling, extent: Extent, shape: DecodeShape, costs: Costs, whole: Grid) -> list[Grid]:
    """Fewer CTAs that divide the tile space at the bound at least as fast as those of ``whole``; empty if none do.

    Of about equally fast ones the fewest: where requests are shorter there are fewer partials to merge.
    """
    numbers = [extent.output_tiles * splits for splits in _FEW_SPLITS]
    fewer = [whole._replace(ctas=n, cta_group_size=tiling.group_sizes[0]) for n in numbers if n < whole.ctas]
    bound = (tiling.tiles,)
    at_bound = [estimates_of(tiling, extent, grid, shape, bound) for grid in (whole, *fewer)]
    all_us, *times = [estimate.microseconds for (estimate,) in at_bound]
    limit = min(all_us, min(times) * (1 + costs.equal_within))
    return [grid for grid, us in zip(fewer, times, strict=True) if us <= limit][:1]


def estimates_of(
    tiling: Tiling, extent: Extent, grid: Grid, shape: DecodeShape, lengths: Iterable[int]
) -> list[Estimate]:
    """The predicted times on this grid, for each of ``lengths`` that of requests which all have so many KV tiles.

    As in the kernel, the lengths decide whether clusters take the output tiles, and whether these are split at all.
    """
    output_tiles, size, pace = extent.output_tiles, grid.cluster_size, tiling.paces[grid.resident - 1]
    kv_heads_read = extent.requests * shape.kv_heads
    # If requests are as long as their bound, a CTA group may have whole output tiles, or an equal part of one.
    # Otherwise its range begins and ends within output tiles.
    groups, blocks = grid.ctas // grid.cta_group_size, output_tiles // grid.cta_group_size
    uneven = 1 if shape.ragged or (blocks % groups and groups % blocks) else 0
    alone = grid.alone and tiling.tiles * tiling.tile_tokens <= _ALONE_TOKENS
    # A single request's clusters that have a choice, or leave room for others that would.
    has_room = not grid.alone or 2 * grid.ctas <= tiling.paces[0].places
    may_choose = shape.batch == 1 and not alone and tiling.rows <= _CHOICE_ROWS and has_room
    estimates = []
    for tiles in lengths:
        all_tiles, splits = output_tiles * tiles, tiling.splits
        output_tiles_per_cta, active = -(-output_tiles // grid.ctas), min(grid.ctas, all_tiles)
        tiles_per_cta = -(-tiles // size) if size else 0
        in_clusters = size > 0 and (grid.alone or tiles_per_cta <= all_tiles // grid.ctas + grid.slack_tiles)
        if in_clusters:
            splits, active = min(tiles, size), min(all_tiles, output_tiles * size)
        elif splits and not (tiling.segments and output_tiles % grid.ctas == 0):
            tiles_per_cta = -(-output_tiles * splits // grid.ctas) * -(-tiles // splits)
        elif tiles <= grid.slack_tiles:
            splits, tiles_per_cta, active = 1, output_tiles_per_cta * tiles, min(grid.ctas, output_tiles)
        else:
            splits = min(tiles, -(-grid.ctas // output_tiles) + uneven)
            tiles_per_cta = -(-all_tiles // grid.ctas)
            output_tiles_per_cta = min(tiles_per_cta, output_tiles_per_cta + uneven)
        kv_bytes = kv_heads_read * tiles * tiling.tile_bytes
        estimates.append(
            pace.estimate(
                kv_bytes,
                output_tiles / kv_heads_read,
                in_clusters or not uneven or kv_bytes <= _BYTES_IN_L2,
                tiles_per_cta,
                output_tiles_per_cta,
                splits,
                active,
                in_clusters,
                alone,
                may_choose,
            )
        )
    return estimates


def least_us(tiling: Tiling, extent: Extent, shape: DecodeShape) -> float:
    """A time that the problem takes at its bound at least, on any of the kernel's grids."""
    read = extent.requests * shape.kv_heads * tiling.tiles * tiling.tile_bytes
    start = min(tiling.least_start_us, tiling.paces[0].alone_start_us) if shape.batch == 1 else tiling.least_start_us
    return start + read / tiling.paces[0].read_bytes_per_us


def _drifts(tiling: Tiling, shape: DecodeShape, all_tiles: int, ctas: int) -> bool:
    """Return whether row tiles of the same keys would drift apart at the bound, with whole output tiles in each CTA."""
    return not shape.batch_invariant and tiling.row_tiles > 1 and all_tiles * tiling.tile_tokens > ctas * _DRIFT_TOKENS


def splits_of(tiling: Tiling, grid: Grid, shape: DecodeShape) -> int:
    """The kernel's field ``splits``: the most of an output tile, or for segments the partials of a CTA.

    Of the output tile in whose middle its range begins, a CTA writes every segment; of the one that its range ends in,
    what it folded from the first segment on. Requests that overlap in wrong prefix sums count in full.
    """
    if not tiling.segments:
        return tiling.splits
    tiles = shape.batch * grid.row_tiles * shape.kv_heads * tiling.tiles
    segment_tiles = CONSTANTS.segment_tokens // tiling.tile_tokens
    return 1 + min(tiling.splits - 1, -(-tiles // (grid.ctas * segment_tiles)))
