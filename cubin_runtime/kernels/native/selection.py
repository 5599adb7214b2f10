"""What the selections of all native kernels have in common: the kernel of a launch, its reason, and the candidates."""

from __future__ import annotations

from typing import Any

from ...artifacts.tables.native_kernels import NativeKernel
from ...values import dataclass
from ..explanation import Facts
from .cost_model import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel that was considered: ``unfit`` is why it cannot be launched, empty if it can."""

    kernel: NativeKernel
    unfit: str = ""

    @property
    def estimate(self) -> Estimate | None:
        """The predicted time; None if it cannot be launched, or the family has no cost model."""
        return None

    def cells(self) -> dict[str, object]:
        """What a table shows of one that can be launched, by column."""
        return {}

    def record(self) -> dict[str, object]:
        """What JSON shows of one that can be launched."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The kernel chosen for one launch.

    ``ctas`` is the grid, ``row_tiles`` the row tiles of a request at its bound, ``splits`` the kernel's field of that
    name. ``candidates`` are all kernels of the family in the release, in its order.
    """

    kernel: NativeKernel
    ctas: int
    row_tiles: int
    splits: int
    reason: str
    candidates: tuple[Candidate, ...]

    def grid(self, shape: Any) -> tuple[int, int, int]:
        """The grid as the kernel numbers it, for the problem ``shape`` that this was selected for."""
        return self.ctas, 1, 1

    def facts(self, shape: Any) -> Facts:
        """What is particular to the family, for that problem."""
        raise NotImplementedError
