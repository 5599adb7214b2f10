"""A sparse MLA decode as a launch plan: grid, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

from dataclasses import replace

from ....launch.plan import LARGEST_PORTABLE_CLUSTER, LaunchAttributes, LaunchPlan
from ....launch.workspace import Region
from ....values import dataclass
from ..constants import ATTENTION_TYPES, CONSTANTS
from ..launches import KernelFile, NativeLaunch, native_plan, scratch_regions
from ..problem import LOG2_E
from .select import SparseMlaSelection, SparseMlaShape

NUMBERS = ("softmax_scale", "output_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaProblem:
    """A sparse MLA decode.

    Strides of tensors with heads are elements between tokens and between heads; ``cache_bytes`` are bytes between pages
    and between rows of a page of ``cache_rows`` rows. ``lse_base_e``: base e, not 2. Scales are 1 where the device has
    them.
    """

    shape: SparseMlaShape
    latent: int
    out_dtype: str
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    indices_stride: int
    cache_bytes: tuple[int, int]
    cache_rows: int
    page_size_log2: int
    lse_sink: bool
    lse_base_e: bool
    softmax_scale: float
    output_scale: float
    programmatic_serialization: bool

    def values(self) -> dict[str, object]:
        """The fields of the struct that follow from these alone."""
        strides: dict[str, object] = {}
        for name in ("q", "out", "lse"):
            token, head = getattr(self, f"{name}_strides")
            strides |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
        return {
            **strides,
            "indices_stride": self.indices_stride,
            "page_bytes": self.cache_bytes[0],
            "row_bytes": self.cache_bytes[1],
            "batch": self.shape.batch,
            "heads": self.shape.heads,
            "width": self.shape.width,
            "rows": self.cache_rows,
            "page_size_log2": self.page_size_log2,
            "out_type": ATTENTION_TYPES[self.out_dtype],
            "lse_sink": int(self.lse_sink),
            "softmax_scale": self.softmax_scale,
            "output_scale": self.output_scale,
            "lse_from_log2": 1 / LOG2_E if self.lse_base_e else 1.0,
        }


def sparse_mla_launch(
    selection: SparseMlaSelection, problem: SparseMlaProblem, file: KernelFile
) -> NativeLaunch[SparseMlaSelection]:
    """The launch of a sparse MLA decode; a run's values are the tensors' addresses by name, and ``NUMBERS``."""
    regions = sparse_mla_regions(selection, problem)
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(
            cluster=(selection.cluster_size, 1, 1) if selection.cluster_size > 1 else None,
            nonportable_cluster=selection.cluster_size > LARGEST_PORTABLE_CLUSTER,
            programmatic_serialization=problem.programmatic_serialization,
        ),
        values={
            **problem.values(),
            "cta_group_size": selection.cta_group_size,
            "splits": selection.splits,
            "slack_tiles": selection.slack_tiles,
        },
        regions=regions,
        why=selection,
        numbers=NUMBERS,
    )
    return NativeLaunch(selection, plan, regions, _portable(plan))


def _portable(plan: LaunchPlan) -> LaunchPlan | None:
    """The plan with clusters that every context has room for, if its own are larger: the kernel takes both."""
    if not plan.attributes.nonportable_cluster:
        return None
    attributes = replace(plan.attributes, cluster=(LARGEST_PORTABLE_CLUSTER, 1, 1), nonportable_cluster=False)
    return replace(plan, grid=(LARGEST_PORTABLE_CLUSTER, *plan.grid[1:]), attributes=attributes)


def sparse_mla_regions(selection: SparseMlaSelection, problem: SparseMlaProblem) -> tuple[Region, ...]:
    """The workspace; an output tile is one row tile of a token.

    Clusters merge in their shared memory, and what is not split needs no merge.
    """
    output_tiles, rows = problem.shape.batch * selection.row_tiles, int(selection.kernel.traits["rows"])
    statistics_bytes, out_bytes = rows * (2 + CONSTANTS.mla_max_row_scales) * 4, rows * problem.latent * 2
    merges = not selection.cluster_size and selection.splits != 1
    splits, ctas = (selection.splits, selection.ctas) if merges else (0, 0)
    return scratch_regions(output_tiles, splits, ctas, statistics_bytes, out_bytes)
