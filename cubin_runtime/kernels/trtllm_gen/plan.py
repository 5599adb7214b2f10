"""One call planned: the kernel and why, grid, attributes, parameters, and the launches that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...artifacts.path import ArtifactPath
from ...artifacts.tables.metadata import KernelMeta
from ...launch.plan import LaunchAttributes, LaunchPlan
from .fill import fill
from .grid import LARGEST_PORTABLE_CLUSTER
from .kernels import KernelFinder
from .params import KERNEL_PARAMS
from .problem import Problem
from .reduction import (
    LseLaunch,
    ReductionLaunch,
    lse_after,
    reduction_after,
)
from .refusals import WorkspaceRefused
from .select import Occupancy, Selection, select
from .tensor_maps import TensorMaps, describe_tensors
from .traits import MultiCtasMode, Policy
from .workspace_layout import scratch_bytes, workspace_bytes

CLUSTER_POLICY_DEFAULT = 0
CLUSTER_POLICY_SPREAD = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """Everything a launch needs but bytes and a driver.

    ``values`` holds every field of the parameter struct, descriptors as specs. ``scratch_bytes`` is what the
    launch writes of the scratch.
    """

    problem: Problem
    selection: Selection
    attributes: LaunchAttributes
    maps: TensorMaps
    values: Mapping[str, object]
    reduction: ReductionLaunch | None
    lse: LseLaunch | None
    scratch_bytes: int

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

    def check_workspace(self) -> None:
        """Hold the launch against its workspace, which the reference never does for scratch.

        Raises:
            WorkspaceRefused: it would write past the end; ``needed_bytes`` says what it takes.
        """
        if self.scratch_bytes > self.problem.scratch_limit:
            raise WorkspaceRefused(
                f"workspace: partial results take {self.scratch_bytes} bytes, {self.problem.scratch_limit} are left; "
                f"this launch needs {self.workspace_bytes} bytes in all",
                self.workspace_bytes,
            )

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
        maps=maps,
        values=fill(problem, meta, geometry, maps),
        reduction=reduction_after(problem, meta, geometry),
        lse=lse_after(problem),
        scratch_bytes=scratch_bytes(problem, meta, geometry, MultiCtasMode(selection.state.multi_ctas)),
    )
