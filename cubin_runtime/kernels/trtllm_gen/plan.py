"""One call planned: the kernel and why, grid, attributes, parameters, and the launches that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...artifacts.path import ArtifactPath
from ...artifacts.tables.metadata import KernelMeta
from ...launch.plan import LaunchAttributes, LaunchPlan
from ..native.reduction.plan import OperationLaunch
from .grid import LARGEST_PORTABLE_CLUSTER
from .kernels import KernelFinder
from .parameter_values import parameter_values
from .params import KERNEL_PARAMS
from .problem import Problem
from .reduction import lse_after, reduction_after
from .select import Occupancy, Selection, select
from .tensor_maps import describe_tensors
from .traits import MultiCtasMode, Policy
from .workspace_layout import partial_offset, scratch_bytes, workspace_bytes

CLUSTER_POLICY_DEFAULT = 0
CLUSTER_POLICY_SPREAD = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """Everything a launch needs but bytes and a driver.

    ``values`` holds every field of the parameter struct, descriptors as specs. ``reduction`` and ``lse`` are the
    launches that follow. ``scratch_bytes`` is what the launch writes of the scratch, ``partial_offset`` where in it
    the partial outputs begin.
    """

    problem: Problem
    selection: Selection
    attributes: LaunchAttributes
    values: Mapping[str, object]
    reduction: OperationLaunch | None
    lse: OperationLaunch | None
    scratch_bytes: int
    partial_offset: int

    @property
    def meta(self) -> KernelMeta:
        """The kernel's row of the metadata."""
        return self.selection.meta

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs."""
        return self.selection.geometry.grid

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a CTA."""
        return (self.meta.threads, 1, 1)

    @property
    def workspace_bytes(self) -> int:
        """What a workspace at a multiple of 16 must have for this launch."""
        return workspace_bytes(self.problem, self.scratch_bytes)

    @property
    def following(self) -> tuple[OperationLaunch, ...]:
        """The launches behind the main one, in their order."""
        return tuple(launch for launch in (self.reduction, self.lse) if launch is not None)

    def launch_plan(self, release: ArtifactPath) -> LaunchPlan:
        """The main launch as the launch layer takes it; ``release`` is the folder of the kernels."""
        meta = self.meta
        return LaunchPlan(
            kernel=meta.symbol,
            symbol=meta.symbol,
            path=release.child(meta.file),
            sha256=meta.sha256,
            layout=KERNEL_PARAMS,
            grid=self.grid,
            block=self.block,
            shared_bytes=meta.shared_bytes,
            attributes=self.attributes,
            values=self.values,
            reason=f"{self.problem.dtypes}: {self.selection.state}",
        )


def plan(problem: Problem, kernels: KernelFinder, occupancy: Occupancy, policy: Policy = Policy.BEST) -> Planned:
    """Decide everything about one call; the driver is never touched.

    Args:
        problem: the call.
        kernels: the kernels of a release.
        occupancy: (kernel, cluster size, grid) -> clusters that the GPU holds at once.
        policy: whose decisions.

    Raises:
        KernelMissing, PlanRefused: no plan exists.
    """
    return plan_selected(problem, select(problem, kernels.for_problem(problem), occupancy, policy))


def plan_selected(problem: Problem, selection: Selection) -> Planned:
    """The plan of a call whose kernel and geometry are decided.

    Raises:
        PlanRefused: no reduction exists for the dtypes.
    """
    meta, geometry = selection.meta, selection.geometry
    maps = describe_tensors(problem, meta)
    offset = partial_offset(problem, meta)
    bindings = problem.bindings.with_partial_out(offset)
    cluster = geometry.cluster_x
    attributes = LaunchAttributes(
        cluster=(cluster, 1, 1),
        scheduling_policy=CLUSTER_POLICY_SPREAD if cluster > 1 else CLUSTER_POLICY_DEFAULT,
        programmatic_serialization=problem.pdl,
        nonportable_cluster=cluster > LARGEST_PORTABLE_CLUSTER,
    )
    return Planned(
        problem=problem,
        selection=selection,
        attributes=attributes,
        values=parameter_values(problem, geometry, maps, bindings),
        reduction=reduction_after(problem, meta, geometry, maps.tokens_per_cta, bindings),
        lse=lse_after(problem, bindings),
        scratch_bytes=scratch_bytes(problem, meta, geometry, MultiCtasMode(selection.state.multi_ctas)),
        partial_offset=offset,
    )
