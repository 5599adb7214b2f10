"""The common part of the selections of all native kernels: the kernel of a launch, its reason, and the candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

from ...artifacts.tables.native_kernels import NativeKernel
from ...errors import UsageError
from ...launch.driver import DeviceFacts
from ...values import HashedOnce, dataclass
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
        """The cells of a table for one that can be launched, by column."""
        return {}

    def record(self) -> dict[str, object]:
        """The JSON values of one that can be launched."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The kernel chosen for one launch.

    ``ctas`` is the grid, ``row_tiles`` the row tiles of a request at its bound, ``splits`` the kernel's field of that
    name. ``explain`` gives ``reason`` and ``candidates``, which few calls ask for.
    """

    kernel: NativeKernel
    ctas: int
    row_tiles: int
    splits: int
    explain: Callable[[], tuple[str, tuple[Candidate, ...]]] = field(repr=False, compare=False)

    @property
    def reason(self) -> str:
        """The reason for this kernel and grid."""
        return self.explain()[0]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All kernels of the family in the release, in its order."""
        return self.explain()[1]

    def __str__(self) -> str:
        return self.reason

    def grid(self, shape: Any) -> tuple[int, int, int]:
        """The grid as the kernel numbers it, for the problem ``shape`` that this was selected for."""
        return self.ctas, 1, 1

    def facts(self, shape: Any) -> Facts:
        """The facts that are particular to the family, for that problem."""
        raise NotImplementedError

    def details(self, shape: Any) -> Facts:
        """Further facts that a curious reader may ask for."""
        return ()


def only_kernel(
    kernels: Iterable[NativeKernel], operation: str, traits: Mapping[str, object], device: DeviceFacts
) -> tuple[NativeKernel, tuple[Candidate, ...]]:
    """The kernel of a family of which one fits a problem, by ``traits``, and all kernels of the family.

    Raises:
        UsageError: none fits; the message says why not.
    """
    candidates = _candidates(HashedOnce.of(kernels), operation, tuple(traits.items()), device.sm_number)
    fitting = [candidate.kernel for candidate in candidates if not candidate.unfit]
    if not fitting:
        words = ", ".join(f"{name} {value or 'none'}" for name, value in traits.items())
        reasons = "; ".join(f"{c.kernel.name}: {c.unfit}" for c in candidates) or "the release has none"
        major, minor = device.capability
        raise UsageError(f"no {operation} kernel for {words} on compute capability {major}.{minor}: {reasons}")
    return fitting[0], candidates


@lru_cache(maxsize=256)  # calls of any size have the same
def _candidates(
    kernels: HashedOnce[NativeKernel], operation: str, traits: tuple[tuple[str, object], ...], number: int
) -> tuple[Candidate, ...]:
    def unfit(kernel: NativeKernel) -> str:
        if not kernel.architecture.runs_on(number):
            return f"built for {kernel.architecture}"
        other = next((name for name, value in traits if kernel.traits[name] != value), None)
        return "" if other is None else f"{other} is {kernel.traits[other] or 'none'}"

    return tuple(Candidate(kernel=k, unfit=unfit(k)) for k in kernels if k.operation == operation)
