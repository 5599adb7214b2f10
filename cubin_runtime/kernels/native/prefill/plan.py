"""Context attention as a launch plan: grid, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ....artifacts.tables.native_kernels import NativeKernel
from ....dtypes import BY_SHORT
from ....launch.plan import LaunchAttributes
from ....launch.tensormap import TensorMapSpec
from ....launch.workspace import Region
from ....values import dataclass, replaced
from ..launches import STATUS, KernelFile, NativeLaunch, native_plan
from ..problem import LOG2_E, NUMBERS, CacheStrides, cache_strides, kv_scale_strides, page_size_log2
from .select import MOST_SPLITS, ContextSelection, ContextSelections, ContextShape, ConversionSelection, PartsMerge

_COUNTERS = Region("counters", 8, zeroed=True)
_COPY = {"k_map": "converted_k", "v_map": "converted_v"}
# Of a row in one TMA box, which are swizzled; a longer row is several boxes of the same map. Rows that are no multiple
# of them are in boxes of half as many.
_BOX_BYTES = 128
_WARPGROUP_ROWS = 64
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextProblem:
    """Sizes, strides (in elements) and options of a context attention; addresses come with each run.

    ``q_len`` is a bound on the query tokens of a request, or the number of each. Keys are paged where ``num_pages`` is
    not 0. Else there are ``kv_tokens``, in all if ``ragged``, otherwise of each request. Windows are -1 where there is
    none; ``window_right`` is 0 for causal attention. ``soft_cap`` is 0 without one, ``v_table_offset`` where K and V
    share pages. Scales of e4m3 keys and values lie at strides of a request and of a KV head, 0 where all have one;
    ``scale_tensors`` are the scales that are tensors.
    """

    dtype: str
    kv_dtype: str
    batch: int
    tokens: int
    q_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_seq_len: int
    page_size: int = 0
    num_pages: int = 0
    kv_tokens: int = 0
    ragged: bool = False
    window_left: int
    window_right: int
    soft_cap: float
    softmax_scale: float
    output_scale: float
    lse_natural: bool
    lse_with_sink: bool
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    k_strides: CacheStrides
    v_strides: CacheStrides
    k_scale_strides: tuple[int, int] = (0, 0)
    v_scale_strides: tuple[int, int] = (0, 0)
    scale_tensors: frozenset[str] = frozenset()
    table_stride: int
    v_table_offset: int = 0
    programmatic_serialization: bool = False


def context_launches(
    selections: ContextSelections,
    shape: ContextShape,
    problem: ContextProblem,
    file_of: Callable[[NativeKernel], KernelFile],
) -> list[NativeLaunch[Any]]:
    """The launches of a context attention, with the selections of ``select_context_launches``.

    A run's values are the tensors' addresses by name, ``q``, ``k`` and ``v`` among them, those of the workspace's
    regions, and ``problem.NUMBERS``.
    """
    match selections:
        case (ContextSelection() as attention, PartsMerge() as merge):
            return _split_launches(attention, merge, problem, file_of)
        case (ConversionSelection() as conversion, ContextSelection() as attention):
            scales = {"softmax_scale_device": "k_scale", "output_scale_device": "v_scale"}
            sources = {field: scale for field, scale in scales.items() if scale in problem.scale_tensors}
            over_copy, file = _problem_of_copy(problem), file_of(attention.kernel)
            return [
                _conversion_launch(conversion, shape, problem, file_of(conversion.kernel)),
                context_launch(attention, over_copy, file, {**_COPY, **sources}, nulls=("page_table",)),
            ]
        case (ContextSelection() as attention,):
            return [context_launch(attention, problem, file_of(attention.kernel))]
    raise AssertionError(selections)


def resized_launches(
    launches: Sequence[NativeLaunch[Any]], selections: ContextSelections, problem: ContextProblem
) -> list[NativeLaunch[Any]] | None:
    """``context_launches``, made of those of a problem with other numbers of tokens and requests, whose selections have
    the same kernels; None: more than a few fields depend on these numbers."""
    match selections:
        case (ContextSelection() as attention, PartsMerge() as merge):
            parts = _problem_of_parts(problem, attention.splits)
            values = [_sized_values(attention, parts), _merge_values(merge, problem)]
        case (ContextSelection() as attention,):
            values = [_sized_values(attention, problem)]
        case _:
            return None
    return [
        launch.resized(selection, selection.grid(problem), of_launch)
        for launch, selection, of_launch in zip(launches, selections, values, strict=True)
    ]


def copy_of_cache(problem: ContextProblem) -> tuple[int, int]:
    """Requests of the 16-bit copy of a cache, and the tokens that each has room for; ragged tokens are of one."""
    return 1 if problem.ragged else problem.batch, problem.kv_tokens or problem.max_seq_len


def _problem_of_copy(problem: ContextProblem) -> ContextProblem:
    """The problem over the 16-bit copy of the cache."""
    _, tokens = copy_of_cache(problem)

    def strides(columns: int) -> CacheStrides:
        return CacheStrides(problem.kv_heads * tokens * columns, columns, tokens * columns)

    return replaced(
        problem,
        kv_dtype=problem.dtype,
        page_size=0,
        num_pages=0,
        kv_tokens=tokens,
        k_strides=strides(problem.head_dim),
        v_strides=strides(problem.value_dim),
        table_stride=0,
        v_table_offset=0,
        programmatic_serialization=True,  # it waits for the conversion by itself
    )


def _conversion_launch(
    selection: ConversionSelection, shape: ContextShape, problem: ContextProblem, file: KernelFile
) -> NativeLaunch[ConversionSelection]:
    requests, tokens = copy_of_cache(problem)
    token_bytes = requests * tokens * problem.kv_heads * BY_SHORT[problem.dtype].nbytes
    regions = (
        STATUS,
        Region("converted_k", token_bytes * problem.head_dim, lent=True),
        Region("converted_v", token_bytes * problem.value_dim, lent=True),
    )
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(shape),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values={
            **cache_strides(problem.k_strides, problem.v_strides),
            **(dict.fromkeys(("seq_lens", "q_cu_seq_lens"), 0) if problem.ragged else {}),
            "table_stride": problem.table_stride,
            "v_table_offset": problem.v_table_offset,
            "kv_heads": problem.kv_heads,
            "tokens": tokens,
            "max_seq_len": tokens,
            "k_columns": problem.head_dim,
            "v_columns": problem.value_dim,
            "page_size_log2": page_size_log2(problem.page_size),
            "num_pages": problem.num_pages,
        },
        regions=(STATUS,),
        why=selection,
        numbers=() if problem.ragged else NUMBERS,
    )
    return NativeLaunch(selection, plan, regions)


def _split_launches(
    selection: ContextSelection,
    merge: PartsMerge,
    problem: ContextProblem,
    file_of: Callable[[NativeKernel], KernelFile],
) -> list[NativeLaunch[Any]]:
    """Attention whose outputs are fp32 parts, ``[tokens, splits, heads, columns]``, and their merge.

    The workspace is as large for any number of parts and tokens, so that who reserves it once has enough.
    """
    regions = (
        STATUS,
        Region("counters", 8 * MOST_SPLITS, zeroed=True),
        Region("parts", 4 * merge.room * problem.value_dim),
        Region("part_lses", 4 * merge.room),
    )
    launch = context_launch(
        selection,
        _problem_of_parts(problem, selection.splits),
        file_of(selection.kernel),
        {"out": "parts", "lse": "part_lses"},
        nulls=("sinks",),  # the merge adds them, once
        regions=regions,
    )
    plan = native_plan(
        merge.kernel,
        file_of(merge.kernel),
        grid=merge.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=True),  # it waits for the attention by itself
        values=_merge_values(merge, problem),
        why=merge,
        numbers=(),
    )
    return [launch, NativeLaunch(merge, plan, regions)]


def _problem_of_parts(problem: ContextProblem, splits: int) -> ContextProblem:
    """The problem whose outputs are the parts."""
    heads, columns = problem.heads, problem.value_dim
    return replaced(
        problem,
        out_strides=(splits * heads * columns, columns),
        lse_strides=(splits * heads, 1),
        lse_natural=False,
    )


def _merge_values(merge: PartsMerge, problem: ContextProblem) -> dict[str, object]:
    """The fields of the kernel that merges the parts."""
    return {
        **_output_values(problem),
        "heads": problem.heads,
        "columns": problem.value_dim,
        "splits": merge.splits,
        "warps_log2": merge.warps.bit_length() - 1,
    }


def context_launch(
    selection: ContextSelection,
    problem: ContextProblem,
    file: KernelFile,
    sources: Mapping[str, str] = MappingProxyType({}),
    nulls: Sequence[str] = (),
    regions: tuple[Region, ...] = (STATUS, _COUNTERS),
) -> NativeLaunch[ContextSelection]:
    """The launch of a context attention kernel.

    ``sources`` are fields and the values of a run that they take instead of their own; ``nulls`` take none.
    """
    tile_tokens = int(selection.kernel.traits["tile_tokens"])
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values={
            **_scale_strides(problem),
            **dict.fromkeys(nulls, 0),
            **_sized_values(selection, problem),
            "k_map": _kv_map(problem, problem.head_dim, problem.k_strides, tile_tokens),
            "v_map": _kv_map(problem, problem.value_dim, problem.v_strides, tile_tokens),
            "table_stride": problem.table_stride,
            "v_table_offset": problem.v_table_offset,
            "kv_tokens": problem.kv_tokens,
            "max_seq_len": problem.max_seq_len,
            "group": problem.heads // problem.kv_heads,
            "packed_log2": selection.packed.bit_length() - 1,
            "head_packs": problem.heads // selection.packed,
            "page_size_log2": page_size_log2(problem.page_size),
            "num_pages": problem.num_pages,
            "window_left": _window(problem.window_left),
            "window_right": _window(problem.window_right),
            "softmax_scale_log2": problem.softmax_scale * LOG2_E,
            "output_scale": problem.output_scale,
            "soft_cap": problem.soft_cap,
            "lse_sink": int(problem.lse_with_sink),
        },
        caches={"q_map": "q", "k_map": "k", "v_map": "v", **sources},
        regions=regions[:2],
        why=selection,
    )
    return NativeLaunch(selection, plan, regions)


def _scale_strides(problem: ContextProblem) -> dict[str, object]:
    """The fields that only kernels of e4m3 caches have."""
    if problem.kv_dtype == problem.dtype:
        return {}
    return kv_scale_strides(problem.k_scale_strides, problem.v_scale_strides)


def _sized_values(selection: ContextSelection, problem: ContextProblem) -> dict[str, object]:
    """The fields of an attention kernel that depend on the numbers of tokens and requests."""
    return {
        "q_map": _query_map(problem, selection.packed),
        **_output_values(problem),
        "q_len": problem.q_len,
        "section_packs": selection.section_packs,
    }


def _output_values(problem: ContextProblem) -> dict[str, object]:
    """The fields of all kernels that write outputs."""
    return {
        "out_token_stride": problem.out_strides[0],
        "out_head_stride": problem.out_strides[1],
        "lse_token_stride": problem.lse_strides[0],
        "lse_head_stride": problem.lse_strides[1],
        "lse_scale": math.log(2) if problem.lse_natural else 1.0,
        "batch": problem.batch,
        "tokens": problem.tokens,
    }


def _window(keys: int) -> int:
    return min(keys, _NO_WINDOW) if keys >= 0 else _NO_WINDOW


def _query_map(problem: ContextProblem, packed: int) -> TensorMapSpec:
    """Boxes of a warpgroup's rows: tokens times the heads of a pack."""
    token, head = problem.q_strides
    return _map(
        problem.dtype,
        _BOX_BYTES,
        dims=(problem.head_dim, problem.heads, problem.tokens),
        strides=(head, token),
        rows=(packed, _WARPGROUP_ROWS // packed),
    )


def _kv_map(problem: ContextProblem, columns: int, strides: CacheStrides, tile_tokens: int) -> TensorMapSpec:
    """Boxes of the tokens of a tile that one page holds together; without pages a request, or all, are one."""
    tokens, pages = problem.kv_tokens, 1 if problem.ragged else problem.batch
    if problem.num_pages:
        tokens, pages = problem.page_size, problem.num_pages
    row_bytes = columns * BY_SHORT[problem.kv_dtype].nbytes
    return _map(
        problem.kv_dtype,
        _BOX_BYTES if row_bytes % _BOX_BYTES == 0 else _BOX_BYTES // 2,
        dims=(columns, tokens, problem.kv_heads, pages),
        strides=(strides.token, strides.head, strides.page),
        rows=(min(1 << page_size_log2(problem.page_size), tile_tokens), 1, 1),
    )


def _map(
    short: str, box_bytes: int, *, dims: tuple[int, ...], strides: tuple[int, ...], rows: tuple[int, ...]
) -> TensorMapSpec:
    dtype = BY_SHORT[short]
    return TensorMapSpec(
        dtype=dtype.map_type,
        address=0,
        dims=dims,
        strides=tuple(stride * dtype.nbytes for stride in strides),
        box=(box_bytes // dtype.nbytes, *rows),
        element_strides=(1,) * len(dims),
        swizzle=f"{box_bytes}B",
        l2_promotion="256B",
    )
