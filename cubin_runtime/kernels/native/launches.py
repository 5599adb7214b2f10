"""The launches of a native operator: which kernel file each takes, its plan, and its parts of the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from ...artifacts.path import ArtifactPath
from ...artifacts.tables.native_kernels import NativeKernel
from ...launch.plan import LaunchAttributes, LaunchPlan
from ...launch.structs import StructLayout
from ...launch.workspace import Region
from ...values import dataclass, replaced
from .constants import CONSTANTS
from .problem import NUMBERS

STATUS = Region("status", 4, zeroed=True)
# Fields that take the addresses of a launch's regions, in their order.
WORKSPACE_FIELDS = ("status", "counters", "partial_statistics", "partial_out")
SelectionT_co = TypeVar("SelectionT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class KernelFile:
    """The place of a kernel's cubin, its digest, and the struct that it takes."""

    path: ArtifactPath
    sha256: str
    layout: StructLayout


@dataclass(frozen=True, slots=True)
class NativeLaunch(Generic[SelectionT_co]):
    """One launch of an operator: what was chosen for it and why, its plan, and its parts of the workspace.

    ``portable`` is launched in a context that has no room for the plan's clusters.
    """

    selection: SelectionT_co
    plan: LaunchPlan
    regions: tuple[Region, ...]
    portable: LaunchPlan | None = None

    def resized(
        self,
        selection: Any,
        grid: tuple[int, int, int],
        values: Mapping[str, object],
        regions: tuple[Region, ...] | None = None,
        attributes: LaunchAttributes | None = None,
    ) -> NativeLaunch[SelectionT_co]:
        """The launch with another selection of the same kernel, another grid, and other values of some fields.

        ``regions`` are of the same names; they and ``attributes`` stay where there are none.
        """
        fields: Any = self.plan.values  # a proxy, whose union takes a sixth of the time of a dict that is made of it
        plan = replaced(
            self.plan,
            grid=grid,
            values=fields | values,
            why=selection,
            attributes=attributes or self.plan.attributes,
        )
        return replaced(self, selection=selection, plan=plan, regions=regions or self.regions)


def scratch_regions(
    output_tiles: int,
    splits: int,
    ctas: int,
    statistics_bytes: int,
    out_bytes: int,
    suffix: str = "",
    *,
    slots: int | None = None,
) -> tuple[Region, ...]:
    """The workspace of a split-KV launch in the order of ``WORKSPACE_FIELDS``; ``_bytes`` are those of one partial.

    If the grid determines the splits (``splits`` 0), each CTA has a counter and two partials: of the output tile that
    ends in its range and of the one that begins in it. Otherwise every output tile has a counter and ``splits``
    partials, or all together have ``slots``. Launches of one operator share the status word; their other regions differ
    by ``suffix``.
    """
    counters, partials = (output_tiles, output_tiles * splits) if splits else (ctas, CONSTANTS.partials_per_cta * ctas)
    slots = partials if slots is None else slots
    return (
        STATUS,
        Region(f"counters{suffix}", 4 * counters, zeroed=True),
        Region(f"partial_statistics{suffix}", slots * statistics_bytes),
        Region(f"partial_out{suffix}", slots * out_bytes),
    )


def native_plan(
    kernel: NativeKernel,
    file: KernelFile,
    *,
    grid: tuple[int, int, int],
    attributes: LaunchAttributes,
    values: Mapping[str, object],
    caches: Mapping[str, str] = MappingProxyType({}),
    regions: tuple[Region, ...] = (),
    why: object,
    numbers: Sequence[str] = NUMBERS,
) -> LaunchPlan:
    """The plan of a launch of ``kernel``.

    Every pointer of its struct that belongs to no cache and no region takes the value of its own name at a run: the
    address of the operator's tensor of that name.

    Args:
        kernel: what the release says of it; ``file`` where it is.
        grid: in CTAs; threads and shared memory are the kernel's.
        attributes: cluster and PDL.
        values: every field but pointers, which are null without a run; a pointer among them takes no value of a run.
        caches: the fields of the caches, each with the value of a run that it takes.
        regions: of the workspace, in the order of ``WORKSPACE_FIELDS``; the first alone for a kernel that never splits.
        why: its text says why this kernel was chosen.
        numbers: the fields that take a number of a run, the one of their own name.

    Raises:
        UsageError: a field is missing or unknown.
    """
    pointers = tuple([name for name in file.layout.pointers if name not in values])
    inputs = _inputs(
        file.layout, pointers, tuple(numbers), tuple(caches.items()), tuple([region.name for region in regions])
    )
    return LaunchPlan(
        kernel=kernel.name,
        symbol=kernel.symbol,
        path=file.path,
        sha256=file.sha256,
        layout=file.layout,
        grid=grid,
        block=(kernel.threads, 1, 1),
        shared_bytes=kernel.dynamic_shared_bytes,
        attributes=attributes,
        values={**dict.fromkeys(inputs, 0), **values},
        why=why,
        inputs=inputs,
    )


@lru_cache(maxsize=256)  # launches of a kernel have them in common
def _inputs(
    layout: StructLayout,
    pointers: tuple[str, ...],
    numbers: tuple[str, ...],
    caches: tuple[tuple[str, str], ...],
    regions: tuple[str, ...],
) -> Mapping[str, str]:
    """The value of a run that each field takes."""
    names = [*pointers, *[name for name in numbers if name in layout.names]]
    scratch = zip(WORKSPACE_FIELDS, regions, strict=False)
    return MappingProxyType({**dict(zip(names, names, strict=True)), **dict(caches), **dict(scratch)})
