"""An MLA decode as a launch plan: grid, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

from collections.abc import Sequence

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.plan import LaunchAttributes
from ....launch.tensormap import TensorMapSpec
from ....launch.workspace import Region
from ....values import dataclass
from ..constants import CONSTANTS
from ..launches import KernelFile, NativeLaunch, native_plan, scratch_regions
from ..problem import Problem
from .select import MlaSelection, MlaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaProblem(Problem):
    """An MLA decode; ``cache_strides`` are elements between pages and tokens of a page of the latent cache.

    ``value_strides`` are the same of values in memory of their own; None: they are the first columns of the cache.
    ``q_rope_strides`` are elements between tokens and heads of rope columns of queries in memory of their own; None:
    they follow the latent ones in q.
    ``kv_dtype`` is ``bf16`` or ``e4m3``, q is ``bf16`` or, beside an e4m3 cache, ``e4m3``. Rows of q begin at multiples
    of 16 bytes, those of out at multiples of 8 elements.
    """

    heads: int
    latent: int
    rope: int
    cache_strides: tuple[int, int]
    value_strides: tuple[int, int] | None = None
    q_rope_strides: tuple[int, int] | None = None

    def shape(self, *, ragged: bool, batch_invariant: bool) -> MlaShape:
        """The shape that a kernel is chosen by."""
        return MlaShape(
            dtype=self.kv_dtype,
            q_dtype=self.q_dtype,
            latent=self.latent,
            rope=self.rope,
            heads=self.heads,
            batch=self.batch,
            q_len=self.q_len,
            ragged=ragged,
            max_seq_len=self.max_seq_len,
            batch_invariant=batch_invariant,
            separate_values=self.value_strides is not None,
        )


def mla_launch(selection: MlaSelection, problem: MlaProblem, file: KernelFile) -> NativeLaunch[MlaSelection]:
    """The launch of an MLA decode.

    A run's values are the tensors' addresses by name, ``kv_cache`` among them, those of the workspace's regions, and
    ``problem.NUMBERS``.
    """
    regions = mla_regions(selection, problem)
    width = problem.latent + problem.rope
    rope_strides = problem.q_strides if problem.q_rope_strides is None else problem.q_rope_strides
    maps = {"kv_map": cache_descriptor(problem, selection.kernel, width, problem.cache_strides)}
    caches = {"kv_map": "kv_cache"}
    if problem.value_strides is not None:
        maps["v_map"] = cache_descriptor(problem, selection.kernel, problem.latent, problem.value_strides)
        caches["v_map"] = "v_cache"
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values={
            **problem.values(),
            **problem.dealing.values(),
            **maps,
            "q_rope_token_stride": rope_strides[0],
            "q_rope_head_stride": rope_strides[1],
            "heads": problem.heads,
            **_sized_values(selection, problem),
        },
        caches=caches,
        regions=regions,
        why=selection,
    )
    return NativeLaunch(selection, plan, regions)


def resized_mla(
    launches: Sequence[NativeLaunch[MlaSelection]], selections: Sequence[MlaSelection], problem: MlaProblem
) -> list[NativeLaunch[MlaSelection]]:
    """``mla_launch``, made of that of a problem with other numbers of requests and query tokens, whose selection has
    the same kernel."""
    (launch,), (selection,) = launches, selections
    values, regions = _sized_values(selection, problem), mla_regions(selection, problem)
    return [launch.resized(selection, selection.grid(problem), values, regions)]


def _sized_values(selection: MlaSelection, problem: MlaProblem) -> dict[str, object]:
    """The fields that depend on the numbers of requests and query tokens."""
    return {
        "batch": problem.batch,
        "tokens": problem.tokens,
        "q_len": problem.q_len,
        "cta_group_size": selection.cta_group_size,
        "splits": selection.splits,
        "slack_tiles": selection.slack_tiles,
        "spread_tiles": selection.spread_tiles,
        "start_tiles": selection.start_tiles,
    }


def mla_regions(selection: MlaSelection, problem: MlaProblem) -> tuple[Region, ...]:
    """The workspace of an MLA decode; an output tile is one row tile of a request."""
    output_tiles, rows = problem.batch * selection.row_tiles, int(selection.kernel.traits["rows"])
    statistics_bytes, out_bytes = rows * (2 + CONSTANTS.mla_max_row_scales) * 4, rows * problem.latent * 2
    return scratch_regions(output_tiles, selection.splits, selection.ctas, statistics_bytes, out_bytes)


def cache_descriptor(
    problem: MlaProblem, kernel: NativeKernel, columns: int, strides: tuple[int, int]
) -> TensorMapSpec:
    """Boxes of the kernel's columns and the tokens of a tile that one page holds together."""
    dtype = BY_SHORT[problem.kv_dtype]
    page, token = strides
    return TensorMapSpec(
        dtype=dtype.map_type,
        address=0,
        dims=(columns, problem.page_size, problem.num_pages),
        strides=(token * dtype.nbytes, page * dtype.nbytes),
        box=(int(kernel.traits["box_columns"]), min(problem.page_size, int(kernel.traits["tile_tokens"])), 1),
        element_strides=(1, 1, 1),
        swizzle=str(kernel.traits["swizzle"]),
        l2_promotion="128B",
    )
