"""Which of our decode kernels fits a problem on a device, and the grid it gets: a pure choice from metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from ...artifacts.own_kernels import MEASURED, OwnKernel
from ...errors import UsageError
from ..driver import DeviceFacts
from .costs import ITEM_BYTES, Costs, Estimate, Work, costs_of, estimate

OPERATION = "paged_decode"
# Shared memory that the driver keeps for itself in each resident block (CUDA programming guide).
_RESERVED_SHARED_BYTES = 1024
# batch_invariant cuts every pair into this many parts over all KV heads together: enough for a whole GPU.
_INVARIANT_PARTS = 128


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What decides the kernel and the grid: bounds, never the lengths themselves.

    ``dtype`` is that of the KV cache (``bf16``, ``fp16``, ``e4m3``), ``group`` the query heads a KV head,
    ``q_len`` the query tokens of each request or, where ``ragged``, their bound; then ``tokens`` are those of all
    requests. ``window_left`` is -1 without a window.
    """

    dtype: str
    head_dim: int
    group: int
    kv_heads: int
    batch: int
    _: KW_ONLY
    q_len: int = 1
    tokens: int = 0
    ragged: bool = False
    max_seq_len: int
    window_left: int = -1
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        """Query rows of one request and KV head: tokens times group."""
        return self.q_len * self.group

    @property
    def kv_tokens(self) -> int:
        """Keys that a request reads at most: a window ends with the last query and may cut two tiles."""
        if self.window_left < 0:
            return self.max_seq_len
        return min(self.max_seq_len, self.window_left + self.q_len + 64)

    @property
    def splits(self) -> int:
        """0: the grid cuts the pairs; ``batch_invariant``: parts of every pair, from the KV heads alone."""
        return -(-_INVARIANT_PARTS // self.kv_heads) if self.batch_invariant else 0


@dataclass(frozen=True, slots=True)
class Grid:
    """How a kernel would cut a problem: CTAs, those on one multiprocessor, and what they share."""

    ctas: int
    resident: int
    heads_together: int
    row_tiles: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A kernel that could do the problem: how it would cut it, and what that is expected to take."""

    kernel: OwnKernel
    grid: Grid
    estimate: Estimate

    def __str__(self) -> str:
        rows = f"{_count(self.grid.row_tiles, 'row tile')} of {self.kernel.traits['rows']}"
        return f"fits, {rows}, about {self.estimate.microseconds:.1f} us, limited by {self.estimate.limit}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decode kernel of the release: how it fits, or else why it does not."""

    kernel: OwnKernel
    fit: Fit | None
    unfit: str = ""

    def __str__(self) -> str:
        return str(self.fit) if self.fit else self.unfit


@dataclass(frozen=True, slots=True)
class DecodeSelection:
    """The kernel chosen and how it is launched.

    ``ctas`` is the grid, ``heads_together`` the KV heads that neighbouring CTAs read side by side, ``row_tiles``
    the row tiles of a request at its bound, ``splits`` the kernel's field of that name, ``microseconds`` the
    predicted time at the bounds. ``candidates`` are the release's decode kernels in its order.
    """

    kernel: OwnKernel
    ctas: int
    heads_together: int
    row_tiles: int
    splits: int
    microseconds: float
    reason: str
    candidates: tuple[Candidate, ...]


def select_decode(
    kernels: Iterable[OwnKernel], shape: DecodeShape, device: DeviceFacts, costs: Costs | None = None
) -> DecodeSelection:
    """The kernel with the least predicted time; of equals, the one with the least padding.

    Of those, the one with the fewest row tiles, and then the one built closest to the device.

    Args:
        kernels: of a release, of any operation.
        shape: the problem's bounds.
        device: where it will run.
        costs: constants of the prediction; None: those known for the device's name.

    Raises:
        UsageError: no kernel fits; the message says what those for this device can do.
    """
    constants = costs or costs_of(device.name)
    candidates = tuple(_look_at(k, shape, device, constants) for k in kernels if k.operation == OPERATION)
    fits = [c.fit for c in candidates if c.fit]
    if not fits:
        raise UsageError(_refusal(candidates, shape, device))
    limit = min(fit.estimate.microseconds for fit in fits) * (1 + constants.equal_within)
    best = min((f for f in fits if f.estimate.microseconds <= limit), key=lambda fit: _order(fit, shape))
    return DecodeSelection(
        kernel=best.kernel,
        ctas=best.grid.ctas,
        heads_together=best.grid.heads_together,
        row_tiles=best.grid.row_tiles,
        splits=shape.splits,
        microseconds=best.estimate.microseconds,
        reason=_reason(best, shape, device),
        candidates=candidates,
    )


def _order(fit: Fit, shape: DecodeShape) -> tuple[int, int, int, bool, float, str]:
    padding = fit.grid.row_tiles * _trait(fit.kernel, "rows") - shape.rows
    target = fit.kernel.architecture
    closeness = (-target.number, target.suffix != "a")
    return padding, fit.grid.row_tiles, *closeness, fit.estimate.microseconds, fit.kernel.name


def _look_at(kernel: OwnKernel, shape: DecodeShape, device: DeviceFacts, costs: Costs) -> Candidate:
    unfit = _unfit(kernel, shape, device)
    if unfit:
        return Candidate(kernel, None, unfit)
    grid = _grid(kernel, shape, device, costs)
    return Candidate(kernel, Fit(kernel, grid, estimate(_work(kernel, grid, shape, device), costs)))


def _unfit(kernel: OwnKernel, shape: DecodeShape, device: DeviceFacts) -> str:
    if not kernel.architecture.runs_on(_number(device)):
        return f"built for {kernel.architecture}"
    for name, wanted in (("dtype", shape.dtype), ("head_dim", shape.head_dim)):
        if kernel.traits[name] != wanted:
            return f"{name} is {kernel.traits[name]}"
    needs = kernel.dynamic_shared_bytes + kernel.static_shared_bytes
    if needs > device.shared_bytes_per_block_optin:
        return f"needs {needs} bytes of shared memory a block, the device has {device.shared_bytes_per_block_optin}"
    return ""


def _grid(kernel: OwnKernel, shape: DecodeShape, device: DeviceFacts, costs: Costs) -> Grid:
    row_tiles = max(1, -(-shape.rows // _trait(kernel, "rows")))
    pairs, pair_tiles = _pairs(kernel, shape), _pair_tiles(kernel, shape)
    tiles = pairs * pair_tiles
    # What one CTA takes at a time: a tile of the line, or a part of a pair.
    units = pairs * min(shape.splits, pair_tiles) if shape.splits else tiles
    resident = _resident(kernel, device) if tiles >= costs.tiles_for_full_residency * device.multiprocessors else 1
    ctas = min(resident * device.multiprocessors, units)
    together = max(
        d for d in range(1, costs.heads_together + 1) if shape.kv_heads % d == 0 and ctas % d * costs.idle_share <= ctas
    )
    return Grid(ctas - ctas % together, resident, together, row_tiles, tiles)


def _pairs(kernel: OwnKernel, shape: DecodeShape) -> int:
    """(request, KV head, row tile) that have work at most; ragged requests fill fewer row tiles than their bound."""
    rows = _trait(kernel, "rows")
    row_tiles = max(1, -(-shape.rows // rows)) * shape.batch
    if shape.ragged:
        row_tiles = min(row_tiles, shape.batch + shape.tokens * shape.group // rows)
    return max(1, row_tiles) * shape.kv_heads


def _pair_tiles(kernel: OwnKernel, shape: DecodeShape) -> int:
    return max(1, -(-shape.kv_tokens // _trait(kernel, "tile_tokens")))


def _work(kernel: OwnKernel, grid: Grid, shape: DecodeShape, device: DeviceFacts) -> Work:
    item_bytes = ITEM_BYTES[shape.dtype]
    pairs, pair_tiles = _pairs(kernel, shape), _pair_tiles(kernel, shape)
    if shape.splits:
        parts = min(shape.splits, pair_tiles)
        tiles_per_cta = -(-pairs * parts // grid.ctas) * -(-pair_tiles // parts)
    else:
        # Lengths differ, so that the cuts of the line do not fall on the ends of pairs.
        parts = min(pair_tiles, -(-grid.ctas // pairs) + 1)
        tiles_per_cta = -(-grid.tiles // grid.ctas)
    return Work(
        kv_bytes=2 * shape.batch * shape.kv_heads * shape.kv_tokens * shape.head_dim * item_bytes,
        item_bytes=item_bytes,
        rows=_trait(kernel, "rows"),
        head_dim=shape.head_dim,
        tile_tokens=_trait(kernel, "tile_tokens"),
        row_tiles=pairs / (max(1, shape.batch) * shape.kv_heads),
        tiles_per_cta=tiles_per_cta,
        parts=parts,
        multiprocessors=device.multiprocessors,
    )


def _resident(kernel: OwnKernel, device: DeviceFacts) -> int:
    by_shared = device.shared_bytes_per_multiprocessor // (kernel.dynamic_shared_bytes + _RESERVED_SHARED_BYTES)
    return max(1, min(by_shared, _trait(kernel, "ctas_per_multiprocessor")))


def _reason(fit: Fit, shape: DecodeShape, device: DeviceFacts) -> str:
    kernel, grid = fit.kernel, fit.grid
    built = f"built for {kernel.architecture}" + ("" if kernel.status == MEASURED else f" ({kernel.status})")
    tokens = f"{'up to ' if shape.ragged else ''}{_count(shape.q_len, 'query token')}"
    keys = f"{_trait(kernel, 'tile_tokens')} keys" + (" in the window" if shape.kv_tokens < shape.max_seq_len else "")
    splits = f"; {shape.splits} splits from {_count(shape.kv_heads, 'KV head')} alone" if shape.splits else ""
    return (
        f"{built}; {tokens} x {_count(shape.group, 'query head')} a KV head in "
        f"{_count(grid.row_tiles, 'row tile')} of {kernel.traits['rows']}; "
        f"at most {_count(grid.tiles, 'tile')} of {keys} over {_count(grid.ctas, 'CTA')} "
        f"({grid.resident} on each of {device.multiprocessors} multiprocessors), "
        f"{_count(grid.heads_together, 'KV head')} side by side{splits}; "
        f"about {fit.estimate.microseconds:.1f} us, limited by {fit.estimate.limit}"
    )


def _refusal(candidates: tuple[Candidate, ...], shape: DecodeShape, device: DeviceFacts) -> str:
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
        sizes.setdefault(str(candidate.kernel.traits["dtype"]), set()).add(_trait(candidate.kernel, "head_dim"))
    can = "; ".join(f"{dtype} with head_dim {', '.join(map(str, sorted(dims)))}" for dtype, dims in sizes.items())
    if shape.head_dim not in sizes.get(shape.dtype, ()):
        return f"{asked}: its kernels take {can}"
    asked_for = (shape.dtype, shape.head_dim)
    close = [c for c in here if (c.kernel.traits["dtype"], c.kernel.traits["head_dim"]) == asked_for]
    return f"{asked}: " + "; ".join(f"{c.kernel.name}: {c.unfit}" for c in close)


def _number(device: DeviceFacts) -> int:
    return device.capability[0] * 10 + device.capability[1]


def _trait(kernel: OwnKernel, name: str) -> int:
    return int(kernel.traits[name])


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
