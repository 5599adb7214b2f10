"""Selection of the kernel that decodes MLA over lists of cache rows on a device, and its grid."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.driver import DeviceFacts
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
# Tiles of the fewest rows are faster than wider ones where there is at most one for so many rows of a wider one.
_FEW_TILES_ROWS = 4


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
    """The kernel and its grid; ``cta_group_size`` and ``slack_tiles`` are as in ``MlaSelection``."""

    cta_group_size: int
    slack_tiles: int

    def facts(self, shape: SparseMlaShape) -> Facts:
        """CTA groups, the rows of a token and how its list is split."""
        groups = f"{self.ctas // self.cta_group_size} of {self.cta_group_size} CTAs, one CTA per row tile of a token"
        rows = f"{shape.heads} in {self.row_tiles} x {self.kernel.traits['rows']}"
        return ("groups", groups), ("rows", rows), ("splits", self.splits or "stream-K over all output tiles")


def select_sparse_mla(
    kernels: Iterable[NativeKernel], shape: SparseMlaShape, device: DeviceFacts
) -> SparseMlaSelection:
    """The kernel for the rows of the cache; the ranges of its CTA groups end with output tiles.

    Raises:
        UsageError: no kernel fits; the message says why not.
    """
    kernels = HashedOnce.of(kernels)
    traits = {"cache_rows": shape.cache_rows, "rows": _tile_rows(kernels, shape)}
    kernel, candidates = only_kernel(kernels, OPERATION, traits, device)
    row_tiles = -(-shape.heads // int(kernel.traits["rows"]))
    kv_tiles = max(1, -(-shape.width // int(kernel.traits["tile_tokens"])))
    group_size = cta_group_size(row_tiles)
    output_tiles = shape.batch * (row_tiles // group_size)
    most = min(device.multiprocessors // group_size, CONSTANTS.mla_max_splits)
    groups = cta_groups(most, output_tiles, kv_tiles, wide=False)
    slack = SLACK_TILES if 2 * output_tiles >= groups else FEW_SLACK_TILES
    reason = (
        f"{shape.cache_rows} rows; {shape.heads} heads in {row_tiles} tiles of {kernel.traits['rows']}; "
        f"{output_tiles * kv_tiles} tiles of {kernel.traits['tile_tokens']} entries over {groups} groups of "
        f"{group_size} CTAs on {device.multiprocessors} multiprocessors"
    )
    return SparseMlaSelection(
        kernel=kernel,
        ctas=groups * group_size,
        cta_group_size=group_size,
        row_tiles=row_tiles,
        splits=invariant_splits(kv_tiles, int(kernel.traits["split_tiles"])) if shape.batch_invariant else 0,
        slack_tiles=0 if shape.batch_invariant else slack,
        explain=lambda: (reason, candidates),
    )


@lru_cache(maxsize=16)  # calls of any size have the same
def _row_sizes(kernels: HashedOnce[NativeKernel], cache_rows: str) -> tuple[int, ...]:
    """The rows of the family's tiles, ascending."""
    family = (k for k in kernels if k.operation == OPERATION and k.traits["cache_rows"] == cache_rows)
    return tuple(sorted(int(kernel.traits["rows"]) for kernel in family))


def _tile_rows(kernels: HashedOnce[NativeKernel], shape: SparseMlaShape) -> int:
    """The fewest rows of a tile that hold all heads, else the most: each tile of a token reads its rows again.

    With few query tokens, the fewest of all: more tiles share the rows of a token among more CTAs. The number of query
    tokens decides nothing with ``batch_invariant``.
    """
    sizes = _row_sizes(kernels, shape.cache_rows)
    rows = next((size for size in sizes if shape.heads <= size), max(sizes, default=0))
    few = bool(sizes) and shape.batch * -(-shape.heads // sizes[0]) <= rows // _FEW_TILES_ROWS
    return sizes[0] if few and not shape.batch_invariant else rows
