"""A paged decode as launch plans: grids, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.plan import LaunchAttributes
from ....launch.structs import StructLayout
from ....launch.tensormap import TensorMapSpec
from ....launch.workspace import Region
from ....values import dataclass
from ..constants import CONSTANTS
from ..launches import KernelFile, NativeLaunch, native_plan, scratch_regions
from ..problem import CacheStrides, Problem, cache_strides, kv_scale_strides, page_size_log2
from .grids import SEGMENTS, DecodeShape
from .select import DecodeSelection

_SWIZZLE_BYTES = 128  # the widest span; a longer row is several boxes of the same map
_SUFFIXES = ((), ("",), (" 1", " 2"))  # of the regions of each launch, by the number of launches


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProblem(Problem):
    """A paged decode.

    ``window_left`` is -1 without a window; ``positions_by_index`` says how a mask's tokens are counted for one.
    ``v_table_offset`` is 0 where K and V share pages. Scales of e4m3 keys and values lie at strides of a request and of
    a KV head, 0 where all have one.
    """

    kv_heads: int
    group: int
    head_dim: int
    window_left: int
    positions_by_index: bool = False
    k_strides: CacheStrides
    v_strides: CacheStrides
    k_scale_strides: tuple[int, int] = (0, 0)
    v_scale_strides: tuple[int, int] = (0, 0)
    v_table_offset: int = 0

    def shape(self, *, ragged: bool, batch_invariant: bool) -> DecodeShape:
        """The shape that a kernel is chosen by."""
        return DecodeShape(
            dtype=self.kv_dtype,
            q_dtype=self.q_dtype,
            head_dim=self.head_dim,
            group=self.group,
            kv_heads=self.kv_heads,
            batch=self.batch,
            q_len=self.q_len,
            tokens=self.tokens,
            ragged=ragged,
            max_seq_len=self.max_seq_len,
            window_left=self.window_left,
            batch_invariant=batch_invariant,
        )


def decode_launches(
    selections: Sequence[DecodeSelection], problem: DecodeProblem, file_of: Callable[[NativeKernel], KernelFile]
) -> tuple[NativeLaunch[DecodeSelection], ...]:
    """The launches of a decode, each on requests of its own; ``file_of`` finds a kernel's file.

    A run's values are the tensors' addresses by name, ``k_cache`` and ``v_cache`` among them, those of the workspace's
    regions, and ``problem.NUMBERS``.
    """
    return tuple(
        _launch(selection, problem, file_of(selection.kernel), suffix)
        for selection, suffix in zip(selections, _SUFFIXES[len(selections)], strict=True)
    )


def resized_decode(
    launches: Sequence[NativeLaunch[DecodeSelection]], selections: Sequence[DecodeSelection], problem: DecodeProblem
) -> list[NativeLaunch[DecodeSelection]]:
    """``decode_launches``, made of those of a problem with other numbers of requests and query tokens, whose selections
    have the same kernels."""
    return [
        launch.resized(
            selection,
            selection.grid(problem),
            _sized_values(selection, problem),
            _regions(selection, problem, suffix),
            _attributes(selection.cluster_size, problem.programmatic_serialization),
        )
        for launch, selection, suffix in zip(launches, selections, _SUFFIXES[len(selections)], strict=True)
    ]


def _launch(
    selection: DecodeSelection, problem: DecodeProblem, file: KernelFile, suffix: str
) -> NativeLaunch[DecodeSelection]:
    kernel = selection.kernel
    regions = _regions(selection, problem, suffix)
    values = {
        **problem.values(),
        **problem.dealing.values(),
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "group_reciprocal": -(-(1 << CONSTANTS.decode_group_reciprocal_bits) // problem.group),
        **_sized_values(selection, problem),
        "window_left": problem.window_left,
        "positions_by_index": int(problem.positions_by_index),
        "v_table_offset": problem.v_table_offset,
        **cache_values(file.layout, problem, int(kernel.traits["tile_tokens"])),
    }
    if "k_scale" in file.layout.names:
        values |= kv_scale_strides(problem.k_scale_strides, problem.v_scale_strides)
    names = file.layout.descriptors or ("k", "v")
    plan = native_plan(
        kernel,
        file,
        grid=selection.grid(problem),
        attributes=_attributes(selection.cluster_size, problem.programmatic_serialization),
        values=values,
        caches=dict(zip(names, ("k_cache", "v_cache"), strict=True)),
        regions=regions,
        why=selection,
    )
    return NativeLaunch(selection, plan, regions)


def _sized_values(selection: DecodeSelection, problem: DecodeProblem) -> dict[str, object]:
    """The fields that depend on the numbers of requests and query tokens."""
    return {
        "batch": problem.batch,
        "tokens": problem.tokens,
        "q_len": problem.q_len,
        "head_groups": problem.kv_heads // selection.cta_group_size,
        "cta_group_size": selection.cta_group_size,
        "splits": selection.splits,
        "cluster_size_log2": selection.cluster_size.bit_length() - 1,
        "slack_tiles": selection.slack_tiles,
        "min_rows": selection.min_rows,
        "max_rows": selection.max_rows,
    }


@lru_cache(maxsize=256)  # batches of any size have one of a few
def _attributes(cluster_size: int, programmatic_serialization: bool) -> LaunchAttributes:
    cluster = (cluster_size, 1, 1) if cluster_size > 1 else None
    return LaunchAttributes(cluster=cluster, programmatic_serialization=programmatic_serialization)


def _regions(selection: DecodeSelection, problem: DecodeProblem, suffix: str) -> tuple[Region, ...]:
    """An output tile is one row tile of a request and KV head."""
    output_tiles = problem.batch * selection.row_tiles * problem.kv_heads
    rows = int(selection.kernel.traits["rows"])
    ctas = 0 if selection.alone else selection.ctas  # clusters merge in their shared memory
    slots = ctas * selection.splits if selection.kernel.traits["arithmetic"] == SEGMENTS else None
    sizes = rows * 2 * 4, rows * problem.head_dim * 4
    return scratch_regions(output_tiles, selection.splits, ctas, *sizes, suffix, slots=slots)


def cache_values(layout: StructLayout, problem: DecodeProblem, tile_tokens: int) -> dict[str, object]:
    """The fields that describe the caches: two descriptors, or strides."""
    if not layout.descriptors:
        return cache_strides(problem.k_strides, problem.v_strides)
    pages = (problem.num_pages, problem.page_size, problem.kv_heads, problem.head_dim)
    caches = {"k_map": problem.k_strides, "v_map": problem.v_strides}
    return {name: _descriptor(problem.kv_dtype, pages, strides, tile_tokens) for name, strides in caches.items()}


@lru_cache(maxsize=256)  # batches of any size have the same caches
def _descriptor(
    kv_dtype: str, pages: tuple[int, int, int, int], strides: CacheStrides, tile_tokens: int
) -> TensorMapSpec:
    dtype, (num_pages, page_size, kv_heads, head_dim) = BY_SHORT[kv_dtype], pages
    span = min(head_dim * dtype.nbytes, _SWIZZLE_BYTES)
    return TensorMapSpec(
        dtype=dtype.map_type,
        address=0,
        dims=(head_dim, page_size, kv_heads, num_pages),
        strides=tuple(stride * dtype.nbytes for stride in (strides.token, strides.head, strides.page)),
        box=(span // dtype.nbytes, min(1 << page_size_log2(page_size), tile_tokens), 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=f"{span}B",
        l2_promotion="128B",
    )
