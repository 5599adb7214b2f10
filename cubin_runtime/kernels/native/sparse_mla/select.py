"""Selection of the kernel that decodes MLA over lists of cache rows on a device, and its grid."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....errors import UsageError
from ....launch.driver import DeviceFacts
from ....launch.plan import LARGEST_PORTABLE_CLUSTER
from ....values import HashedOnce, dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..mla.select import FEW_SLACK_TILES, SLACK_TILES, cta_group_size, cta_groups, invariant_splits
from ..selection import Selection, only_kernel

OPERATION = "sparse_mla_decode"
# How a row of the cache lies in memory -> its columns, and its bytes. Scaled: 512 e4m3, a float32 scale for each 128 of
# them, 64 bf16.
ROW_FORMS = {"scaled_e4m3": (576, 656), "bf16": (576, 1152), "bf16_nope": (512, 1024)}
MAX_WIDTH = 1 << 15
# Tiles of the fewest rows are faster than wider ones, by their rows, if clusters of so many CTAs all find places.
_FEW_TILES_CLUSTER = {32: 2, 64: 4}
# The cost of a launch in clusters, in the time of one of its tiles: of an output tile's start and of its merge. From so
# many CTAs on, memory is slower than they are.
_START_TILES, _MERGE_TILES, _BUSY_CTAS = 2.0, 2.0, 96
# A cluster of more than two CTAs runs on multiprocessors of one GPC, and GPCs differ in size: of so many
# multiprocessors, one is left over.
_GPC_SHARE = 11
# Of 8 GPCs of at most 18 multiprocessors, some have 16 where all have so many together: room for a cluster of 16 CTAs.
_NONPORTABLE_MULTIPROCESSORS = 132
# With batch_invariant the parts of a list, so that neither the tokens nor its width decide.
_INVARIANT_PARTS = 4
# Kernels find the query token of an output tile in fp32, exactly below so many output tiles (cluster_tiles.cuh), and
# CTA groups number the tiles of all lists in 32 bits.
_MOST_CLUSTER_TILES, _MOST_GROUP_TILES = 1 << 20, 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaShape:
    """The facts that decide the kernel and the grid.

    ``cache_rows`` is one of ``ROW_FORMS``, ``batch`` the query tokens, ``width`` the entries of a list.
    """

    cache_rows: str
    heads: int
    batch: int
    width: int
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaSelection(Selection):
    """The kernel and its grid; ``cta_group_size`` and ``slack_tiles`` are as in ``MlaSelection``.

    ``cluster_size`` are the CTAs of a cluster, which share the list of an output tile, with ``splits`` in as many
    parts; 0: the CTAs divide all tiles evenly.
    """

    cta_group_size: int
    slack_tiles: int
    cluster_size: int

    def grid(self, shape: object) -> tuple[int, int, int]:
        """CTAs of a cluster and clusters, or CTAs."""
        return (self.cluster_size, self.ctas // self.cluster_size, 1) if self.cluster_size else (self.ctas, 1, 1)

    def facts(self, shape: SparseMlaShape) -> Facts:
        """CTA groups or clusters, the rows of a token and how its list is split."""
        rows = ("rows", f"{shape.heads} in {self.row_tiles} x {self.kernel.traits['rows']}")
        if self.cluster_size:
            clusters = (
                f"{self.ctas // self.cluster_size} of {self.cluster_size} CTAs, each with output tiles of its own"
            )
            return ("clusters", clusters), rows, ("splits", self.splits or self.cluster_size)
        groups = f"{self.ctas // self.cta_group_size} of {self.cta_group_size} CTAs, one CTA per row tile of a token"
        return ("groups", groups), rows, ("splits", self.splits or "stream-K over all output tiles")


def select_sparse_mla(
    kernels: Iterable[NativeKernel], shape: SparseMlaShape, device: DeviceFacts
) -> SparseMlaSelection:
    """The kernel for the rows of the cache, and clusters or CTA groups, whose ranges end with output tiles.

    Raises:
        UsageError: no kernel fits, or its launch would have too many tiles; the message says why not.
    """
    kernels = HashedOnce.of(kernels)
    traits = {"cache_rows": shape.cache_rows, "rows": _tile_rows(kernels, shape, device)}
    kernel, candidates = only_kernel(kernels, OPERATION, traits, device)
    row_tiles = -(-shape.heads // int(kernel.traits["rows"]))
    kv_tiles = max(1, -(-shape.width // int(kernel.traits["tile_tokens"])))
    grid = (_cluster_grid if kernel.traits["max_cluster"] else _group_grid)(kernel, shape, device, row_tiles, kv_tiles)
    reason = (
        f"{shape.cache_rows} rows; {shape.heads} heads in {row_tiles} tiles of {kernel.traits['rows']}; {grid.words} "
        f"on {device.multiprocessors} multiprocessors"
    )
    return SparseMlaSelection(
        kernel=kernel,
        ctas=grid.ctas,
        cta_group_size=cta_group_size(row_tiles),
        row_tiles=row_tiles,
        splits=grid.splits,
        slack_tiles=grid.slack_tiles,
        cluster_size=grid.cluster_size,
        explain=lambda: (reason, candidates),
    )


class _Grid(NamedTuple):
    """The grid of a launch, also in words, and the fields that go with it."""

    ctas: int
    words: str
    splits: int = 0
    slack_tiles: int = 0
    cluster_size: int = 0


def _group_grid(
    kernel: NativeKernel, shape: SparseMlaShape, device: DeviceFacts, row_tiles: int, kv_tiles: int
) -> _Grid:
    """CTA groups that divide the tiles of all lists evenly."""
    size = cta_group_size(row_tiles)
    output_tiles = shape.batch * (row_tiles // size)
    _check_tiles(shape, output_tiles * kv_tiles, _MOST_GROUP_TILES)
    most = min(device.multiprocessors // size, CONSTANTS.mla_max_splits)
    groups = cta_groups(most, output_tiles, kv_tiles)
    tiles = f"{output_tiles * kv_tiles} tiles of {kernel.traits['tile_tokens']} entries"
    words = f"{tiles} over {groups} groups of {size} CTAs"
    if shape.batch_invariant:
        splits = invariant_splits(kv_tiles, int(kernel.traits["split_tiles"]))
        return _Grid(groups * size, words, splits=splits)
    slack = SLACK_TILES if 2 * output_tiles >= groups else FEW_SLACK_TILES
    return _Grid(groups * size, words, slack_tiles=slack)


def _cluster_grid(
    kernel: NativeKernel, shape: SparseMlaShape, device: DeviceFacts, row_tiles: int, kv_tiles: int
) -> _Grid:
    """Clusters of the size that is fastest by ``_cluster_tiles``, which compute as many output tiles each."""
    output_tiles = shape.batch * row_tiles
    _check_tiles(shape, output_tiles, _MOST_CLUSTER_TILES)
    most = int(kernel.traits["max_cluster"])
    if device.multiprocessors < _NONPORTABLE_MULTIPROCESSORS:
        most = min(most, LARGEST_PORTABLE_CLUSTER)
    sizes = [1 << log2 for log2 in range(most.bit_length())]
    splits = 0
    if shape.batch_invariant:
        splits = _INVARIANT_PARTS
        sizes = [size for size in sizes if splits // int(kernel.traits["max_cta_parts"]) <= size <= splits]
    size = min(sizes, key=lambda size: _cluster_tiles(size, output_tiles, kv_tiles, device))
    passes = _passes(size, output_tiles, device)
    clusters = -(-output_tiles // passes)
    tiles = f"{output_tiles} output tiles of {kv_tiles} tiles of {kernel.traits['tile_tokens']} entries"
    words = f"{tiles} over {clusters} clusters of {size} CTAs"
    return _Grid(clusters * size, words, splits=splits, cluster_size=size)


def _check_tiles(shape: SparseMlaShape, tiles: int, most: int) -> None:
    """Refuse a launch of more tiles than the kernel can number.

    Raises:
        UsageError: there are ``most`` or more.
    """
    if tiles >= most:
        raise UsageError(
            f"{shape.batch} query tokens of {shape.heads} heads with lists of {shape.width} entries: {tiles} tiles, "
            f"expected fewer than {most}",
            argument="q",
        )


def _passes(size: int, output_tiles: int, device: DeviceFacts) -> int:
    """The output tiles that each cluster computes, of which as many run as find a place."""
    multiprocessors = device.multiprocessors
    places = multiprocessors if size <= 2 else multiprocessors - multiprocessors // _GPC_SHARE
    return -(-output_tiles // max(1, places // size))


def _cluster_tiles(size: int, output_tiles: int, kv_tiles: int, device: DeviceFacts) -> float:
    """The time of a launch in clusters of ``size``, in that of a tile."""
    passes = _passes(size, output_tiles, device)
    ctas = size * -(-output_tiles // passes)
    share = -(-kv_tiles // size) * max(1.0, ctas / _BUSY_CTAS) + _START_TILES
    return passes * (share + (_MERGE_TILES if size > 1 else 0))


@lru_cache(maxsize=16)  # calls of any size have the same
def _row_sizes(kernels: HashedOnce[NativeKernel], cache_rows: str) -> tuple[int, ...]:
    """The rows of the family's tiles, ascending."""
    family = (k for k in kernels if k.operation == OPERATION and k.traits["cache_rows"] == cache_rows)
    return tuple(sorted(int(kernel.traits["rows"]) for kernel in family))


def _tile_rows(kernels: HashedOnce[NativeKernel], shape: SparseMlaShape, device: DeviceFacts) -> int:
    """The fewest rows of a tile that hold all heads, else the most: each tile of a token reads its rows again.

    With few query tokens, the fewest of all: more tiles share the rows of a token among more CTAs. The number of query
    tokens decides nothing with ``batch_invariant``.
    """
    sizes = _row_sizes(kernels, shape.cache_rows)
    rows = next((size for size in sizes if shape.heads <= size), max(sizes, default=0))
    cluster = _FEW_TILES_CLUSTER.get(rows)
    few = cluster is not None and _passes(cluster, shape.batch * -(-shape.heads // sizes[0]), device) == 1
    return sizes[0] if few and not shape.batch_invariant else rows
