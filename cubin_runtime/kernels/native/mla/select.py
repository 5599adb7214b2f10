"""Selection of the native MLA decode kernel for a problem on a device, and its grid: a pure choice from metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, fields
from functools import lru_cache
from operator import attrgetter

from ....artifacts.tables.native_kernels import MEASURED, NativeKernel
from ....errors import UsageError
from ....launch.driver import DeviceFacts
from ....values import HashedOnce, dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..selection import Candidate, Selection

OPERATION = "paged_mla_decode"
# Latent columns of a key, which are the value, and rope columns behind them. No two make rows of one width.
COLUMNS = ((512, 64), (256, 64), (512, 0), (256, 32), (128, 32))
# Those of keys whose values may lie in memory of their own.
SEPARATE_COLUMNS = (512, 64)
MAX_HEADS = 128
MAX_QUERIES = 16
# One CTA group in this many may idle so that the others' ranges end at boundaries of output tiles: fewer partials.
_IDLE_SHARE = 12
# FEW_ROWS: row tiles below WIDE_ROWS, of which so many CTAs as _MOST_FEW_ROWS_SPLITS read nearly as fast as all; from
# _LONG_TILES on, there are at least _LONG_SPLITS.
_MOST_FEW_ROWS_SPLITS = 48
_LONG_TILES, _LONG_SPLITS = 1024, 64
# Kernels with row tiles below WIDE_ROWS take requests of at most this many rows, by the dtype of the cache.
WIDE_ROWS = 64
_FEW_ROWS = {"bf16": 16, "e4m3": 32}
# No output tile of so many KV tiles is split if then all have some; where output tiles are few, of FEW_SLACK_TILES.
SLACK_TILES = 16
FEW_SLACK_TILES = 4
# KV tiles that take as long as to load the queries of an output tile and to store its rows, of WIDE_ROWS and of fewer.
# They matter where there are as many requests as CTA groups; with fewer, all groups start alike.
_WIDE_START_TILES, _FEW_ROWS_START_TILES = 4, 2


@dataclass(frozen=True, slots=True)
class MlaShape:
    """The facts that decide the kernel and the grid: bounds, never the lengths themselves.

    ``dtype`` is that of the KV cache, ``q_dtype`` that of the queries, ``latent`` and ``rope`` one of ``COLUMNS``,
    ``q_len`` the query tokens of each request or, where ``ragged``, their bound. ``separate_values``: values do not lie
    in their keys.
    """

    dtype: str
    latent: int
    heads: int
    batch: int
    _: KW_ONLY
    rope: int = 64
    q_dtype: str = "bf16"
    q_len: int = 1
    ragged: bool = False
    max_seq_len: int
    batch_invariant: bool = False
    separate_values: bool = False

    @property
    def rows(self) -> int:
        """Query rows of one request: tokens times heads."""
        return self.q_len * self.heads


# The fields that decide which kernels fit.
_FORM_NAMES = tuple(field.name for field in fields(MlaShape) if field.name not in ("batch", "max_seq_len"))
_FORM = attrgetter(*_FORM_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCandidate(Candidate):
    """An MLA decode kernel of the release: the row tiles of a request on it, or why it does not fit."""

    row_tiles: int = 0

    def cells(self) -> dict[str, object]:
        """The row tiles of a request."""
        return {"row tiles": f"{self.row_tiles} x {self.kernel.traits['rows']}"}

    def record(self) -> dict[str, object]:
        """The row tiles of a request."""
        return {"row_tiles": self.row_tiles}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSelection(Selection):
    """The kernel chosen and how it is launched.

    ``cta_group_size`` are the row tiles of a request that neighbouring CTAs compute side by side. ``splits`` are
    the most of an output tile under ``batch_invariant``; 0: they follow from the grid. No output tile of at most
    ``slack_tiles`` is split, and none if the longest exceeds an equal share by at most ``spread_tiles``, counted in KV
    tiles with ``start_tiles`` for the start of each output tile. Without ``spread_tiles`` none is cut into pieces.
    """

    cta_group_size: int
    slack_tiles: int = 0
    spread_tiles: int = 0
    start_tiles: int = 0

    def facts(self, shape: MlaShape) -> Facts:
        """CTA groups, the rows of a request and how its keys are split."""
        groups = f"{self.ctas // self.cta_group_size} of {self.cta_group_size} CTAs, one CTA per row tile of a request"
        rows = f"{shape.rows} in {self.row_tiles} x {self.kernel.traits['rows']}"
        return ("groups", groups), ("rows", rows), ("splits", self.splits or "stream-K over all output tiles")


def select_mla_decode(kernels: Iterable[NativeKernel], shape: MlaShape, device: DeviceFacts) -> MlaSelection:
    """A kernel for this device alone before a portable one; for few rows if there are few, otherwise one of 64.

    The ranges of its CTA groups end with output tiles.

    Raises:
        UsageError: no kernel fits; the message has the reason for each that runs on this device, for all if none does.
    """
    candidates = _candidates(HashedOnce.of(kernels), device.sm_number, _FORM(shape))
    fitting = [candidate.kernel for candidate in candidates if not candidate.unfit]
    if not fitting:
        here = [c for c in candidates if c.kernel.architecture.runs_on(device.sm_number)] or candidates
        raise UsageError(
            f"no MLA decode kernel for {shape.q_dtype} queries, a {shape.dtype} cache, "
            f"{shape.latent} + {shape.rope} columns, {shape.heads} heads "
            f"on compute capability {device.capability[0]}.{device.capability[1]}: "
            + ("; ".join(f"{c.kernel.name}: {c.unfit}" for c in here) or "the release has no MLA decode kernel")
        )
    best = max(fitting, key=lambda x: (x.architecture.suffix != "", -_trait(x, "rows"), x.name))
    row_tiles = _row_tiles(best, shape)
    group_size = cta_group_size(row_tiles)
    kv_tiles = max(1, -(-shape.max_seq_len // _trait(best, "tile_tokens")))
    output_tiles = shape.batch * -(-row_tiles // group_size)
    splits = invariant_splits(kv_tiles) if shape.batch_invariant else 0
    most_groups = min(device.multiprocessors // group_size, CONSTANTS.mla_max_splits)
    if _trait(best, "rows") < WIDE_ROWS:
        least = _LONG_SPLITS if kv_tiles >= _LONG_TILES else 0
        most_groups = min(most_groups, max(least, output_tiles * _MOST_FEW_ROWS_SPLITS))
    groups = cta_groups(most_groups, output_tiles, kv_tiles)

    def explain() -> tuple[str, tuple[MlaCandidate, ...]]:
        status = "" if best.status == MEASURED else f", {best.status}"
        reason = (
            f"built for {best.architecture}{status}; {shape.rows} rows per request in {row_tiles} tiles of "
            f"{best.traits['rows']}; at most {output_tiles * kv_tiles} tiles of {best.traits['tile_tokens']} keys over "
            f"{groups} groups of {group_size} CTAs on {device.multiprocessors} multiprocessors"
        )
        return reason, candidates

    return MlaSelection(
        kernel=best,
        ctas=groups * group_size,
        cta_group_size=group_size,
        row_tiles=row_tiles,
        splits=splits,
        **({} if shape.batch_invariant else _by_length(shape.batch, output_tiles, groups, _trait(best, "rows"))),
        explain=explain,
    )


def _by_length(batch: int, output_tiles: int, groups: int, rows: int) -> dict[str, int]:
    """The fields of a selection by which the lengths divide the tile space."""
    start = 0
    if batch >= groups:
        start = _WIDE_START_TILES if rows >= WIDE_ROWS else _FEW_ROWS_START_TILES
    slack = 2 * start + (SLACK_TILES if 2 * output_tiles >= groups else FEW_SLACK_TILES)
    spread = slack // 2 if output_tiles <= groups else 0
    return {"slack_tiles": slack, "spread_tiles": spread, "start_tiles": start}


def invariant_splits(tiles: int, split_tiles: int = CONSTANTS.mla_split_tiles) -> int:
    """Splits of an output tile of ``tiles`` KV tiles under ``batch_invariant``, as in the kernel.

    It never decreases with the tiles: a bound on the tiles bounds the splits, and changes those of no request.
    """
    return min(CONSTANTS.mla_invariant_splits, -(-tiles // split_tiles))


@lru_cache(maxsize=256)  # batches of any size have the same
def _candidates(kernels: HashedOnce[NativeKernel], number: int, form: tuple[object, ...]) -> tuple[MlaCandidate, ...]:
    shape = MlaShape(batch=1, max_seq_len=0, **dict(zip(_FORM_NAMES, form, strict=True)))  # type: ignore[arg-type]
    return tuple(
        MlaCandidate(kernel=kernel, unfit=_unfit(kernel, shape, number), row_tiles=_row_tiles(kernel, shape))
        for kernel in kernels
        if kernel.operation == OPERATION
    )


def _unfit(kernel: NativeKernel, shape: MlaShape, number: int) -> str:
    if not kernel.architecture.runs_on(number):
        return f"built for {kernel.architecture}"
    for name, value in (("dtype", shape.dtype), ("latent", shape.latent), ("rope", shape.rope)):
        if kernel.traits[name] != value:
            return f"{name} is {kernel.traits[name]}"
    q_dtypes = str(kernel.traits.get("q_dtypes", "bf16")).split(",")
    if shape.q_dtype not in q_dtypes:
        return f"queries are {' or '.join(q_dtypes)}"
    if bool(kernel.traits.get("separate_values")) != shape.separate_values:
        return "values are the first columns of their keys" if shape.separate_values else "values are not in their keys"
    if _trait(kernel, "rows") < WIDE_ROWS and not _few_rows(shape):
        return f"for at most {_FEW_ROWS[shape.dtype]} rows per request, and not for batch_invariant"
    return ""


def _few_rows(shape: MlaShape) -> bool:
    """Return whether kernels for few rows take it; with ``batch_invariant`` a bound on query tokens must not decide."""
    return not shape.batch_invariant and shape.rows <= _FEW_ROWS[shape.dtype]


def _row_tiles(kernel: NativeKernel, shape: MlaShape) -> int:
    return max(1, -(-shape.rows // _trait(kernel, "rows")))


def cta_group_size(row_tiles: int) -> int:
    """The most that divide a request's row tiles, so that no CTA of a group idles."""
    return max(d for d in range(1, CONSTANTS.mla_max_cta_group + 1) if row_tiles % d == 0)


def cta_groups(most: int, output_tiles: int, kv_tiles: int) -> int:
    """CTA groups whose ranges begin and end at boundaries of equally long output tiles, if few enough have to idle.

    The kernel applies the first rule to the lengths, too.
    """
    splits = max(min(kv_tiles, CONSTANTS.mla_many_splits), kv_tiles // CONSTANTS.mla_merged_tiles)
    groups = min(most, output_tiles * splits)
    if output_tiles >= groups:
        rounds = -(-output_tiles // groups)
        aligned = -(-output_tiles // rounds)
    else:
        aligned = groups // output_tiles * output_tiles
    return aligned if (groups - aligned) * _IDLE_SHARE <= groups else groups


def _trait(kernel: NativeKernel, name: str) -> int:
    return int(kernel.traits[name])
