"""The launch for one call: kernel, grid, attributes, parameters, and the launches that follow."""

from __future__ import annotations

from collections.abc import Mapping

from ...artifacts.path import ArtifactPath
from ...artifacts.tables.metadata import KernelMeta
from ...launch.plan import LARGEST_PORTABLE_CLUSTER, LaunchAttributes, LaunchPlan
from ...values import dataclass
from ..native.reduction.plan import OperationLaunch
from .batch_invariance import select_invariant
from .errors import PlanRefused
from .kernel_finder import KernelFinder
from .parameter_values import INPUTS, parameter_values
from .params import KERNEL_PARAMS
from .problem import Problem
from .reduction import lse_after, reduction_after
from .select import Occupancy, Selection, select
from .tensor_maps import describe_tensors
from .traits import MultiCtasMode, Policy
from .workspace_layout import counter_bytes, partial_offset, scratch_bytes, workspace_bytes

CLUSTER_POLICY_DEFAULT = 0
CLUSTER_POLICY_SPREAD = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """The kernel of a call and everything that its launch needs except the cubin's bytes and a driver.

    ``values`` holds every field of the parameter struct, descriptors as specs. ``reduction`` and ``lse`` are the
    launches that follow. The launch writes ``scratch_bytes`` of scratch, with the partial outputs at
    ``partial_offset``.
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
        """CTAs in each dimension."""
        return self.selection.geometry.grid

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of one CTA."""
        return (self.meta.threads, 1, 1)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a workspace needs that begins at a multiple of 16 and holds no counters."""
        return workspace_bytes(self.problem, self.scratch_bytes)

    @property
    def counter_bytes(self) -> int:
        """Bytes of zeroed counters that a run needs beside the workspace; 0 for none."""
        mode = MultiCtasMode(self.selection.key.multi_ctas)
        return counter_bytes(self.problem, self.selection.geometry, mode)

    @property
    def following(self) -> tuple[OperationLaunch, ...]:
        """The launches behind the main one, in launch order."""
        return tuple(launch for launch in (self.reduction, self.lse) if launch is not None)

    def launch_plan(self, release: ArtifactPath) -> LaunchPlan:
        """The main launch, whose inputs are ``Bindings``; ``release`` is the folder of the kernels."""
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
            why=f"{self.problem.dtypes}: {self.selection.key}",
            inputs={field: name for field, name in INPUTS.items() if self.values[field] is not None},
        )


def decide(
    problem: Problem,
    kernels: KernelFinder,
    occupancy: Occupancy,
    policy: Policy = Policy.BEST,
    *,
    batch_invariant: bool = False,
) -> Decision:
    """Decide what to launch for a problem, without a driver.

    Args:
        problem: the call, reduced.
        kernels: the kernels of a release.
        occupancy: (kernel, cluster size, grid) -> number of clusters that the GPU holds at once.
        policy: the reference launcher's decisions, or ours.
        batch_invariant: take the kernel of ``select_invariant``.

    Raises:
        KernelMissing, PlanRefused: no kernel serves the problem, or ``batch_invariant`` is asked of the reference.
    """
    serving = kernels.for_problem(problem)
    if not batch_invariant:
        return decide_selected(problem, select(problem, serving, occupancy, policy))
    if policy != Policy.BEST:
        raise PlanRefused(f"batch_invariant with policy={policy.value!r}: the reference launcher has no such selection")
    return decide_selected(problem, select_invariant(problem, serving))


def decide_selected(problem: Problem, selection: Selection) -> Decision:
    """The decision once the kernel and its grid are selected.

    Raises:
        PlanRefused: no reduction kernel exists for the dtypes, or the heads do not divide into tiles.
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
    return Decision(
        problem=problem,
        selection=selection,
        attributes=attributes,
        values=parameter_values(problem, geometry, maps, bindings),
        reduction=reduction_after(problem, meta, geometry, maps.tokens_per_cta, bindings),
        lse=lse_after(problem, bindings),
        scratch_bytes=scratch_bytes(problem, meta, geometry, MultiCtasMode(selection.key.multi_ctas)),
        partial_offset=offset,
    )
