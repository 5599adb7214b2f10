"""Which native decode kernels fit a problem on a device, and the grids they get: a pure choice from metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ....artifacts.tables.native_kernels import MEASURED, NativeKernel
from ....errors import UsageError
from ....launch.driver import DeviceFacts
from ....values import HashedOnce, dataclass
from ...explanation import Facts
from ..constants import CONSTANTS
from ..cost_model import Costs, Estimate, costs_of, estimate
from ..selection import Candidate, Selection
from .grids import ANY_ROWS, SEGMENTS, Grid, Part, Sizes, extent_of, grids_of, sizes_of, splits_of, trait_of, work_of
from .shape import DecodeShape

OPERATION = "paged_decode"

# The trait ``arithmetic``: kernels of one dtype and head_dim give a row the same bits where it is the same. Under
# batch_invariant all requests get SEGMENTS where there are such kernels, else these two; nothing else takes SEGMENTS.
_WARPS, _WARPGROUPS = "warps", "warpgroups of 64 rows"
# batch_invariant: requests of more rows take warpgroups, where there are any. It is the most that a warp kernel takes
# at once at head_dim 64 and 128, so that none of its requests reads its keys twice.
_MOST_WARP_ROWS = 16


class Fit(NamedTuple):
    """A kernel that could do the problem: how it would cut it, and what that is expected to take."""

    kernel: NativeKernel
    sizes: Sizes
    grid: Grid
    estimate: Estimate

    @property
    def row_tiles(self) -> str:
        """Row tiles of a request and the rows of one."""
        return f"{self.grid.row_tiles} x {self.kernel.traits['rows']}"

    def __str__(self) -> str:
        rows = f"{_count(self.grid.row_tiles, 'row tile')} of {self.kernel.traits['rows']}"
        return f"fits, {rows}, about {self.estimate.microseconds:.1f} us, limited by {self.estimate.limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate(Candidate):
    """A decode kernel of the release: how it fits best and how else, or why it does not."""

    fit: Fit | None = None
    other_fits: tuple[Fit, ...] = ()

    @property
    def estimate(self) -> Estimate | None:
        """The predicted time of the best fit."""
        return self.fit.estimate if self.fit else None

    def cells(self) -> dict[str, object]:
        """Row tiles and CTAs of the best fit."""
        return {} if self.fit is None else {"row tiles": self.fit.row_tiles, "CTAs": self.fit.grid.ctas}

    def record(self) -> dict[str, object]:
        """The grid of the best fit."""
        return {} if self.fit is None else {"grid": self.fit.grid._asdict()}

    def __str__(self) -> str:
        return str(self.fit) if self.fit else self.unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSelection(Selection):
    """The kernel chosen for one launch, and how it is launched.

    ``min_rows`` and ``max_rows`` say which requests it takes. ``cta_group_size`` are the KV heads that neighbouring
    CTAs read side by side, ``cluster_size`` the CTAs of a cluster that has a pair for itself (0: the grid cuts all
    tiles evenly), ``microseconds`` the predicted time at the bounds.
    """

    min_rows: int
    max_rows: int
    cta_group_size: int
    cluster_size: int
    microseconds: float
    candidates: tuple[DecodeCandidate, ...]

    def grid(self, shape: Any) -> tuple[int, int, int]:
        """A cluster for each KV head, request and row tile; or groups of CTAs."""
        if self.cluster_size:
            return self.cluster_size, shape.kv_heads, shape.batch * self.row_tiles
        return self.cta_group_size, self.ctas // self.cta_group_size, 1

    def facts(self, shape: DecodeShape) -> Facts:
        """The rows of a request and how its keys are split."""
        split = "stream-K over all output tiles"
        if self.cluster_size:
            size = self.cluster_size
            split = f"a cluster of {size} CTAs per output tile" if size > 1 else "one CTA per output tile"
        rows = f"{min(shape.rows, self.max_rows)} in {self.row_tiles} x {self.kernel.traits['rows']}"
        return ("rows", rows), ("splits", self.splits or f"0: {split}")


def select_decode(
    kernels: Iterable[NativeKernel], shape: DecodeShape, device: DeviceFacts, costs: Costs | None = None
) -> tuple[DecodeSelection, ...]:
    """The launches of a decode: of each, the kernel and CTAs with the least predicted time.

    Of equals, the kernel with the least padding, then the one with the fewest row tiles, then the one built closest to
    the device; of a kernel's grids the one with the fewest CTAs. There is one launch, but for ``batch_invariant`` where
    requests may have rows for either arithmetic: there each has its own.

    Args:
        kernels: of a release, of any operation.
        shape: the problem's bounds.
        device: where it will run.
        costs: constants of the prediction; None: those known for the device's name.

    Raises:
        UsageError: no kernel fits; the message says what those for this device can do.
    """
    constants = costs or costs_of(device.name)
    form = (shape.dtype, shape.head_dim, shape.q_dtype or shape.dtype)
    table = kernels if isinstance(kernels, HashedOnce) else HashedOnce(kernels)
    shared_bytes = device.shared_bytes_per_block_optin, device.shared_bytes_per_multiprocessor
    looked_at = _look_through(table, _number(device), *form, *shared_bytes)
    return tuple(_select(looked_at, shape, part, device, constants) for part in _parts(looked_at, shape))


class _LookedAt(NamedTuple):
    """The decode kernels of a release as candidates, and the sizes of those that such calls can take, by place."""

    candidates: tuple[DecodeCandidate, ...]
    sizes: Mapping[int, Sizes]


@lru_cache(maxsize=256)  # a release has a hundred kernels, of which a call's form rules out nearly all
def _look_through(
    kernels: tuple[NativeKernel, ...],
    number: int,
    dtype: str,
    head_dim: int,
    q_dtype: str,
    shared_bytes: int,
    shared_bytes_per_multiprocessor: int,
) -> _LookedAt:
    def unfit(kernel: NativeKernel) -> str:
        if not kernel.architecture.runs_on(number):
            return f"built for {kernel.architecture}"
        for name, wanted in (("dtype", dtype), ("head_dim", head_dim)):
            if kernel.traits[name] != wanted:
                return f"{name} is {kernel.traits[name]}"
        taken = str(kernel.traits["q_dtypes"]).split(",")
        if q_dtype not in taken:
            return f"queries are {' or '.join(taken)}"
        needs = kernel.dynamic_shared_bytes + kernel.static_shared_bytes
        if needs > shared_bytes:
            return f"needs {needs} bytes of shared memory a block, the device has {shared_bytes}"
        return ""

    candidates = tuple(DecodeCandidate(kernel=k, unfit=unfit(k)) for k in kernels if k.operation == OPERATION)
    fitting = ((place, candidate.kernel) for place, candidate in enumerate(candidates) if not candidate.unfit)
    return _LookedAt(candidates, {place: sizes_of(k, shared_bytes_per_multiprocessor) for place, k in fitting})


def _parts(looked_at: _LookedAt, shape: DecodeShape) -> tuple[Part, ...]:
    """The launches' requests: under ``batch_invariant`` a request's own rows alone decide its arithmetic."""
    if not shape.batch_invariant:
        return (Part(0, ANY_ROWS, None),)
    kernels = [looked_at.candidates[place].kernel for place in looked_at.sizes]
    if any(kernel.traits["arithmetic"] == SEGMENTS for kernel in kernels):
        return (Part(0, ANY_ROWS, SEGMENTS),)
    if not any(kernel.traits["arithmetic"] == _WARPGROUPS for kernel in kernels):
        return (Part(0, ANY_ROWS, _WARPS),)
    # Ragged requests: who has rows has `group` at least, and no more than all have together.
    fewest = shape.group if shape.ragged else shape.rows
    most = min(shape.q_len, shape.tokens) * shape.group if shape.ragged else shape.rows
    if most <= _MOST_WARP_ROWS:
        return (Part(0, ANY_ROWS, _WARPS),)
    if fewest > _MOST_WARP_ROWS:
        return (Part(0, ANY_ROWS, _WARPGROUPS),)
    return (Part(0, _MOST_WARP_ROWS, _WARPS), Part(_MOST_WARP_ROWS + 1, ANY_ROWS, _WARPGROUPS))


def _select(looked_at: _LookedAt, shape: DecodeShape, part: Part, device: DeviceFacts, costs: Costs) -> DecodeSelection:
    candidates = list(looked_at.candidates)
    fits = []
    for place, sizes in looked_at.sizes.items():
        candidates[place] = _look_at(candidates[place].kernel, sizes, shape, part, device, costs)
        fit = candidates[place].fit
        if fit is not None:
            fits.append(fit)
    if not fits:
        raise UsageError(_refusal(candidates, shape, device))
    times = [fit.estimate.microseconds for fit in fits]
    limit = min(times) * (1 + costs.equal_within)
    fastest = [fit for fit, time in zip(fits, times, strict=True) if time <= limit]
    best = min(fastest, key=lambda fit: _order(fit, shape, part)) if len(fastest) > 1 else fastest[0]
    row_tiles = -(-min(shape.rows, part.max_rows) // best.sizes.rows)
    return DecodeSelection(
        kernel=best.kernel,
        min_rows=part.min_rows,
        max_rows=part.max_rows,
        ctas=best.grid.ctas,
        cta_group_size=best.grid.cta_group_size,
        cluster_size=best.grid.cluster_size,
        # The kernel numbers its pairs by the bound on the rows that it takes.
        row_tiles=row_tiles,
        splits=splits_of(best.sizes, shape, row_tiles, best.grid.ctas),
        microseconds=best.estimate.microseconds,
        reason=_reason(best, shape, part, device),
        candidates=tuple(candidates),
    )


def _order(fit: Fit, shape: DecodeShape, part: Part) -> tuple[int, int, int, bool, float, str]:
    padding = fit.grid.row_tiles * trait_of(fit.kernel, "rows") - min(shape.rows, part.max_rows)
    target = fit.kernel.architecture
    closeness = (-target.number, target.suffix != "a")
    return padding, fit.grid.row_tiles, *closeness, fit.estimate.microseconds, fit.kernel.name


def _look_at(
    kernel: NativeKernel, sizes: Sizes, shape: DecodeShape, part: Part, device: DeviceFacts, costs: Costs
) -> DecodeCandidate:
    if part.arithmetic is None and sizes.segments:
        return DecodeCandidate(kernel=kernel, unfit=f"{SEGMENTS}, which only batch_invariant needs")
    if part.arithmetic not in (None, kernel.traits["arithmetic"]):
        unfit = f"{kernel.traits['arithmetic']}; batch_invariant has {part.arithmetic} for {part}"
        return DecodeCandidate(kernel=kernel, unfit=unfit)
    extent = extent_of(sizes, shape, part)
    grids = grids_of(sizes, extent, shape, device, costs)
    fits = [Fit(kernel, sizes, grid, estimate(work_of(sizes, extent, grid, shape, device), costs)) for grid in grids]
    times = [fit.estimate.microseconds for fit in fits]
    limit = min(times) * (1 + costs.equal_within)
    best = next(fit for fit, time in zip(fits, times, strict=True) if time <= limit)
    return DecodeCandidate(kernel=kernel, fit=best, other_fits=tuple(fit for fit in fits if fit is not best))


def _reason(fit: Fit, shape: DecodeShape, part: Part, device: DeviceFacts) -> str:
    kernel, grid = fit.kernel, fit.grid
    built = f"built for {kernel.architecture}" + ("" if kernel.status == MEASURED else f" ({kernel.status})")
    tokens = f"{'up to ' if shape.ragged else ''}{_count(shape.q_len, 'query token')}"
    tile_tokens = trait_of(kernel, "tile_tokens")
    in_window = shape.kv_tokens(tile_tokens) < shape.max_seq_len
    keys = f"{tile_tokens} keys" + (" in the window" if in_window else "")
    invariant = ""
    if fit.sizes.segments:
        invariant = f"; {SEGMENTS} of {CONSTANTS.segment_tokens} keys, as in prefill"
    elif splits := shape.splits(tile_tokens):
        invariant = f"; {part.arithmetic} for {part}, at most {_count(splits, 'split')} a pair by its own tiles"
    return (
        f"{built}; {tokens} x {_count(shape.group, 'query head')} per KV head in "
        f"{_count(grid.row_tiles, 'row tile')} of {kernel.traits['rows']}; "
        f"at most {_count(grid.tiles, 'tile')} of {keys} over {_count(grid.ctas, 'CTA')} "
        f"({grid.resident} on each of {device.multiprocessors} multiprocessors), "
        f"{_sharing(grid)}{invariant}; "
        f"about {fit.estimate.microseconds:.1f} us, limited by {fit.estimate.limit}"
    )


def _sharing(grid: Grid) -> str:
    if grid.cluster_size > 1:
        return f"a cluster of {grid.cluster_size} for each KV head and row tile of a request"
    if grid.cluster_size:
        return "one for each KV head and row tile of a request"
    return f"{_count(grid.cta_group_size, 'KV head')} side by side"


def _refusal(candidates: list[DecodeCandidate], shape: DecodeShape, device: DeviceFacts) -> str:
    where = f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})"
    asked = f"no decode kernel for {shape.dtype} KV with head_dim {shape.head_dim} on {where}"
    if not candidates:
        return f"{asked}: the release has no decode kernel"
    here = [c for c in candidates if c.kernel.architecture.runs_on(_number(device))]
    if not here:
        targets = sorted({c.kernel.architecture for c in candidates}, key=lambda a: (a.number, a.suffix or ""))
        return f"{asked}: the release has decode kernels for {', '.join(map(str, targets))}"
    sizes: dict[str, set[int]] = {}
    for candidate in here:
        sizes.setdefault(str(candidate.kernel.traits["dtype"]), set()).add(trait_of(candidate.kernel, "head_dim"))
    can = "; ".join(f"{dtype} with head_dim {', '.join(map(str, sorted(dims)))}" for dtype, dims in sizes.items())
    if shape.head_dim not in sizes.get(shape.dtype, ()):
        return f"{asked}: its kernels take {can}"
    asked_for = (shape.dtype, shape.head_dim)
    close = [c for c in here if (c.kernel.traits["dtype"], c.kernel.traits["head_dim"]) == asked_for]
    return f"{asked}: " + "; ".join(f"{c.kernel.name}: {c.unfit}" for c in close)


def _number(device: DeviceFacts) -> int:
    return device.capability[0] * 10 + device.capability[1]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
