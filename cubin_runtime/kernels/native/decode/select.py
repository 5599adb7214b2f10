"""Selection of the native decode kernels for a problem on a device, and their grids: a pure choice from metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from operator import truediv
from typing import Any

from ....artifacts.cubins.architecture import declared_architecture
from ....artifacts.tables.native_kernels import MEASURED, NativeKernel
from ....errors import UsageError
from ....launch.driver import DeviceFacts
from ....values import HashedOnce, dataclass, replaced
from ...explanation import Facts
from ..constants import CONSTANTS
from ..cost_model import Costs, costs_of
from ..selection import Selection
from .candidates import DecodeCandidate, Fit, count, refusal
from .grids import (
    ANY_ROWS,
    SEGMENTS,
    DecodeShape,
    Extent,
    Grid,
    Part,
    estimates_of,
    extent_of,
    grids_of,
    least_us,
    splits_of,
    tiling_of,
)

OPERATION = "paged_decode"

# The trait ``arithmetic``: kernels of one dtype and head_dim with the same one give a row the same bits.
# batch_invariant uses SEGMENTS for all requests if there are such kernels, else only these two; nothing else does.
_WARPS, _WARPGROUPS = "warps", "warpgroups of 64 rows"
# A kernel that at the bound takes longer than the best by this factor is left out, however short it makes short
# requests.
_FAR_SLOWER = 1.5
# batch_invariant: requests of more rows take warpgroup kernels, if there are any. A warp kernel takes at most so many
# rows at once at head_dim 64 and 128, so that none of its requests reads its keys twice.
_MOST_WARP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSelection(Selection):
    """The kernel chosen for one launch, and how it is launched.

    ``min_rows`` and ``max_rows`` say which requests it takes. ``cta_group_size`` are the KV heads that neighbouring
    CTAs read side by side, ``cluster_size`` the CTAs of a cluster that has an output tile for itself (0: the CTAs
    divide the tile space evenly), ``alone`` whether these are all CTAs whatever the length, ``microseconds`` the
    predicted time at the bounds.
    """

    min_rows: int
    max_rows: int
    cta_group_size: int
    cluster_size: int
    microseconds: float
    slack_tiles: int = 0
    alone: bool = False

    def grid(self, shape: Any) -> tuple[int, int, int]:
        """Clusters, or CTAs, side by side in groups."""
        cluster_size = self.cluster_size or 1
        return cluster_size, self.cta_group_size, self.ctas // (self.cta_group_size * cluster_size)

    def facts(self, shape: DecodeShape) -> Facts:
        """A sentence on how the keys of a request are split."""
        split = "stream-K over all output tiles"
        if self.cluster_size:
            size = self.cluster_size
            split = f"a cluster of {size} CTAs per output tile" if size > 1 else "one CTA per output tile"
            split += "" if self.alone else ", or stream-K where a request is long"
        return (("splits", self.splits or split),)

    def details(self, shape: DecodeShape) -> Facts:
        """The rows of a request."""
        return (("rows", f"{min(shape.rows, self.max_rows)} in {self.row_tiles} x {self.kernel.traits['rows']}"),)


def select_decode(
    kernels: Iterable[NativeKernel], shape: DecodeShape, device: DeviceFacts, costs: Costs | None = None
) -> tuple[DecodeSelection, ...]:
    """The launches of a decode: of each, the kernel and CTAs that lose least at any length up to the bound.

    A launch loses what its predicted time exceeds that of the best launch for requests of that length. Of equals, the
    kernel with the least padding, then the one with the fewest row tiles, then the one built closest to the device; of
    a kernel's grids the one with the fewest CTAs. There is one launch, except under ``batch_invariant`` where requests
    may need either arithmetic: then each arithmetic has a launch.

    Args:
        kernels: of a release, of any operation.
        shape: the problem's bounds.
        device: where it will run.
        costs: constants of the prediction; None: those known for the device's name.

    Raises:
        UsageError: no kernel fits; the message says what those for this device can do.
    """
    shared_bytes = device.shared_bytes_per_block_optin
    candidates = _look_through(
        HashedOnce.of(kernels), device.sm_number, shape.dtype, shape.head_dim, shape.q_dtype, shared_bytes
    )
    constants = costs or costs_of(device.name)
    forms = [_form_of(candidates, part, device, constants, shape.form) for part in _parts(candidates, shape)]
    extents = [tuple([extent_of(tiling, shape, form.part) for _, tiling in form.tilings]) for form in forms]
    return tuple([_selection(form, shape.batch, of_form) for form, of_form in zip(forms, extents, strict=True)])


@lru_cache(maxsize=256)  # a release has a hundred kernels, of which a call's form rules out nearly all
def _look_through(
    kernels: tuple[NativeKernel, ...], number: int, dtype: str, head_dim: int, q_dtype: str, shared_bytes: int
) -> HashedOnce[DecodeCandidate]:
    """The decode kernels of a release, each with why such calls cannot take it."""

    def unfit(kernel: NativeKernel) -> str:
        if not kernel.architecture.runs_on(number):
            return f"built for {kernel.architecture}"
        for name, value in (("dtype", dtype), ("head_dim", head_dim)):
            if kernel.traits[name] != value:
                return f"{name} is {kernel.traits[name]}"
        q_dtypes = str(kernel.traits["q_dtypes"]).split(",")
        if (q_dtype or dtype) not in q_dtypes:
            return f"queries are {' or '.join(q_dtypes)}"
        needs = kernel.dynamic_shared_bytes + kernel.static_shared_bytes
        if needs > shared_bytes:
            return f"needs {needs} bytes of shared memory per block, the device has {shared_bytes}"
        return ""

    return HashedOnce(DecodeCandidate(kernel=k, unfit=unfit(k)) for k in kernels if k.operation == OPERATION)


def _parts(candidates: Sequence[DecodeCandidate], shape: DecodeShape) -> tuple[Part, ...]:
    """The launches' requests: under ``batch_invariant`` a request's own rows alone decide its arithmetic."""
    if not shape.batch_invariant:
        return (Part(0, ANY_ROWS, None),)
    arithmetics = {candidate.kernel.traits["arithmetic"] for candidate in candidates if not candidate.unfit}
    if SEGMENTS in arithmetics:
        return (Part(0, ANY_ROWS, SEGMENTS),)
    if _WARPGROUPS not in arithmetics:
        return (Part(0, ANY_ROWS, _WARPS),)
    # A ragged request with rows has at least `group` of them, and at most those of all tokens.
    fewest = shape.group if shape.ragged else shape.rows
    most = min(shape.q_len, shape.tokens) * shape.group if shape.ragged else shape.rows
    if most <= _MOST_WARP_ROWS:
        return (Part(0, ANY_ROWS, _WARPS),)
    if fewest > _MOST_WARP_ROWS:
        return (Part(0, ANY_ROWS, _WARPGROUPS),)
    return (Part(0, _MOST_WARP_ROWS, _WARPS), Part(_MOST_WARP_ROWS + 1, ANY_ROWS, _WARPGROUPS))


class _Form:
    """The kernels that fit requests of one form on a device, the soonest to start first, and how each tiles them: what
    is the same for batches of any size. Caches tell forms apart by their identity."""

    __slots__ = ("candidates", "costs", "device", "part", "shape", "tilings")

    def __init__(
        self,
        candidates: HashedOnce[DecodeCandidate],
        part: Part,
        device: DeviceFacts,
        costs: Costs,
        form: tuple[object, ...],
    ) -> None:
        self.candidates, self.part, self.device, self.costs = candidates, part, device, costs
        self.shape = DecodeShape.of_form(form)
        kernels = [c.kernel for c in candidates if not c.unfit]
        usable = [kernel for kernel in kernels if not _other_arithmetic(kernel, part)]
        tilings = [(kernel, tiling_of(kernel, self.shape, part, device, costs)) for kernel in usable]
        self.tilings = sorted(tilings, key=lambda each: each[1].least_start_us)


_form_of = lru_cache(maxsize=1024)(_Form)


@lru_cache(maxsize=256)
def _shape_of(form: _Form, batch: int) -> DecodeShape:
    """The shape of so many requests; their number of tokens is in extents."""
    return replaced(form.shape, batch=batch)


@lru_cache(maxsize=1024)  # nearly every step of a server has another number of tokens, which rarely decides
def _selection(form: _Form, batch: int, extents: tuple[Extent, ...]) -> DecodeSelection:
    """The selection for so many requests; ``extents`` are those of the form's kernels."""
    shape = _shape_of(form, batch)
    every, limit = list[tuple[Fit, ...]](), math.inf
    for number, extent in enumerate(extents):
        if least_us(form.tilings[number][1], extent, shape) <= limit:
            fits = _fits(form, number, extent, batch)
            every.append(fits)
            limit = min(limit, min([fit.microseconds for fit in fits]) * _FAR_SLOWER)
    if not every:
        raise UsageError(refusal(_explained(form, shape, extents), shape, form.device))
    best = _best(every, form, shape)
    return DecodeSelection(
        kernel=best.kernel,
        min_rows=form.part.min_rows,
        max_rows=form.part.max_rows,
        ctas=best.grid.ctas,
        cta_group_size=best.grid.cta_group_size,
        cluster_size=best.grid.cluster_size,
        # The kernel numbers its output tiles by the bound on the rows that it takes.
        row_tiles=best.grid.row_tiles,
        splits=splits_of(best.tiling, best.grid, shape),
        slack_tiles=best.grid.slack_tiles,
        alone=best.grid.alone,
        microseconds=best.microseconds,
        explain=partial(_explain, form, best, shape, extents),
    )


def _other_arithmetic(kernel: NativeKernel, part: Part) -> str:
    """Return the reason why ``part`` does not take the arithmetic of a kernel, or ""."""
    arithmetic = kernel.traits["arithmetic"]
    if part.arithmetic is None:
        return f"{SEGMENTS}, which only batch_invariant needs" if arithmetic == SEGMENTS else ""
    return "" if arithmetic == part.arithmetic else f"{arithmetic}; batch_invariant has {part.arithmetic} for {part}"


@lru_cache(maxsize=2048)  # some of a form's kernels have tiles so large that the number of tokens does not decide
def _fits(form: _Form, number: int, extent: Extent, batch: int) -> tuple[Fit, ...]:
    """The grids of one of the form's kernels for so many requests."""
    (kernel, tiling), shape = form.tilings[number], _shape_of(form, batch)
    fits = []
    for grid in grids_of(tiling, extent, shape, form.device, form.costs):
        estimates = estimates_of(tiling, extent, grid, shape, tiling.lengths)
        times = tuple([estimate.microseconds for estimate in estimates])
        fits.append(Fit(kernel, tiling, grid, estimates[0], times[0], times))
    return tuple(fits)


def _best(every: Sequence[Sequence[Fit]], form: _Form, shape: DecodeShape) -> Fit:
    """Of each kernel the first of the grids that lose as little as any; of those that lose as little as the best, the
    first in order."""
    least = list(map(min, zip(*[fit.times for fits in every for fit in fits], strict=True)))
    within, firsts = 1 + form.costs.equal_within, list[tuple[float, Fit]]()
    for fits in every:
        losses = [max(map(truediv, fit.times, least)) for fit in fits]
        limit = min(losses) * within
        firsts.append(next((loss, fit) for loss, fit in zip(losses, fits, strict=True) if loss <= limit))
    limit = min([loss for loss, _ in firsts]) * within
    equals = [fit for loss, fit in firsts if loss <= limit]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda fit: _order(fit, shape, form.part))


def _order(fit: Fit, shape: DecodeShape, part: Part) -> tuple[int, int, int, bool, float, str]:
    padding = fit.grid.row_tiles * fit.tiling.rows - min(shape.rows, part.max_rows)
    target = declared_architecture(fit.kernel.sm)
    closeness = (-target.number, target.suffix != "a")
    return padding, fit.grid.row_tiles, *closeness, fit.microseconds, fit.kernel.name


def _explain(
    form: _Form, best: Fit, shape: DecodeShape, extents: Sequence[Extent]
) -> tuple[str, tuple[DecodeCandidate, ...]]:
    return _reason(best, form, shape), tuple(_explained(form, shape, extents))


def _explained(form: _Form, shape: DecodeShape, extents: Sequence[Extent]) -> list[DecodeCandidate]:
    """The candidates, with the grids and predicted times of those that fit."""
    fits = {
        kernel.name: _fits(form, number, extents[number], shape.batch)
        for number, (kernel, _) in enumerate(form.tilings)
    }

    def explained(candidate: DecodeCandidate) -> DecodeCandidate:
        kernel = candidate.kernel
        if candidate.unfit:
            return candidate
        if kernel.name not in fits:
            return DecodeCandidate(kernel=kernel, unfit=_other_arithmetic(kernel, form.part))
        best = _best([fits[kernel.name]], form, shape)
        others = tuple(fit for fit in fits[kernel.name] if fit is not best)
        return DecodeCandidate(kernel=kernel, fit=best, other_fits=others)

    return [explained(candidate) for candidate in form.candidates]


def _reason(fit: Fit, form: _Form, shape: DecodeShape) -> str:
    kernel, grid = fit.kernel, fit.grid
    built = f"built for {kernel.architecture}" + ("" if kernel.status == MEASURED else f" ({kernel.status})")
    tokens = f"{'up to ' if shape.ragged else ''}{count(shape.q_len, 'query token')}"
    tile_tokens = fit.tiling.tile_tokens
    in_window = shape.kv_tokens(tile_tokens) < shape.max_seq_len
    keys = f"{tile_tokens} keys" + (" in the window" if in_window else "")
    invariant = ""
    if fit.tiling.segments:
        invariant = f"; {SEGMENTS} of {CONSTANTS.segment_tokens} keys, as in prefill"
    elif splits := fit.tiling.splits:
        invariant = f"; {form.part.arithmetic} for {form.part}, at most {count(splits, 'split')} per output tile"
    return (
        f"{built}; {tokens} x {count(shape.group, 'query head')} per KV head in "
        f"{count(grid.row_tiles, 'row tile')} of {kernel.traits['rows']}; "
        f"at most {count(grid.tiles, 'tile')} of {keys} over {count(grid.ctas, 'CTA')} "
        f"(up to {grid.resident} on each of {form.device.multiprocessors} multiprocessors), "
        f"{_sharing(grid)}{invariant}"
    )


def _sharing(grid: Grid) -> str:
    if grid.cluster_size:
        several = f"a cluster of {grid.cluster_size}" if grid.cluster_size > 1 else "one"
        otherwise = "" if grid.alone else ", or all together where one is long"
        return f"{several} for each KV head and row tile of a request{otherwise}"
    return f"{count(grid.cta_group_size, 'KV head')} side by side"
