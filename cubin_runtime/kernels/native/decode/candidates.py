"""Decode kernels as candidates for a problem: the predicted time of each, or why it is rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.driver import DeviceFacts
from ....values import dataclass
from ..cost_model import Estimate
from ..selection import Candidate
from .grids import DecodeShape, Grid, Tiling


class Fit(NamedTuple):
    """A kernel that fits the problem: its tiling, its grid and the predicted time at the bound.

    ``times`` are those for each of the tiling's ``lengths``, the bound's first.
    """

    kernel: NativeKernel
    tiling: Tiling
    grid: Grid
    estimate: Estimate
    microseconds: float
    times: tuple[float, ...]

    @property
    def row_tiles(self) -> str:
        """Row tiles of a request and the rows of one."""
        return f"{self.grid.row_tiles} x {self.kernel.traits['rows']}"

    def __str__(self) -> str:
        rows = f"{count(self.grid.row_tiles, 'row tile')} of {self.kernel.traits['rows']}"
        return f"fits, {rows}, about {self.microseconds:.1f} us, limited by {self.estimate.limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate(Candidate):
    """A decode kernel of the release: its best fit and its other fits, or why it does not fit."""

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


def refusal(candidates: Sequence[DecodeCandidate], shape: DecodeShape, device: DeviceFacts) -> str:
    """Return the reason why none of the candidates fits a problem."""
    where = f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})"
    opening = f"no decode kernel for {shape.dtype} KV with head_dim {shape.head_dim} on {where}"
    if not candidates:
        return f"{opening}: the release has no decode kernel"
    here = [c for c in candidates if c.kernel.architecture.runs_on(device.sm_number)]
    if not here:
        targets = sorted({c.kernel.architecture for c in candidates}, key=lambda a: (a.number, a.suffix or ""))
        return f"{opening}: the release has decode kernels for {', '.join(map(str, targets))}"
    sizes: dict[str, set[int]] = {}
    for candidate in here:
        sizes.setdefault(str(candidate.kernel.traits["dtype"]), set()).add(int(candidate.kernel.traits["head_dim"]))
    can = "; ".join(f"{dtype} with head_dim {', '.join(map(str, sorted(dims)))}" for dtype, dims in sizes.items())
    if shape.head_dim not in sizes.get(shape.dtype, ()):
        return f"{opening}: its kernels take {can}"
    asked_for = (shape.dtype, shape.head_dim)
    close = [c for c in here if (c.kernel.traits["dtype"], c.kernel.traits["head_dim"]) == asked_for]
    return f"{opening}: " + "; ".join(f"{c.kernel.name}: {c.unfit}" for c in close)


def count(number: int, word: str) -> str:
    """A number with its noun, in the plural where needed."""
    return f"{number} {word}" + ("" if number == 1 else "s")
