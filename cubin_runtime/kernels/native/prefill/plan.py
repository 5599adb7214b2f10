"""Context attention as a launch plan: grid, workspace, and every parameter that does not come with a run."""

from __future__ import annotations

import math

from ....dtypes import BY_SHORT
from ....launch.plan import LaunchAttributes
from ....launch.regions import Region
from ....launch.tensormap import TensorMapSpec
from ....values import dataclass
from ..launches import STATUS, KernelFile, NativeLaunch, native_plan
from ..problem import LOG2_E, kv_scale_strides, page_size_log2
from .select import ContextSelection

_COUNTERS = Region("counters", 8, zeroed=True)
# Of a row in one TMA box, which are swizzled; a longer row is several boxes of the same map. Rows that are no multiple
# of them are in boxes of half as many.
_BOX_BYTES = 128
_WARPGROUP_ROWS = 64
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class KvStrides:
    """Elements between pages (or requests), tokens and KV heads of one of K and V; ragged keys are one page."""

    page: int
    token: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextProblem:
    """Sizes, strides (in elements) and options of a context attention; addresses come with each run.

    ``q_len`` is a bound on the query tokens of a request, or the number of each. Keys are paged where ``num_pages`` is
    not 0. Else there are ``kv_tokens``, in all if ``ragged``, otherwise of each request. Windows are -1 where there is
    none; ``window_right`` is 0 for causal attention. ``soft_cap`` is 0 without one, ``v_table_offset`` where K and V
    share pages. Scales of e4m3 keys and values lie at strides of a request and of a KV head, 0 where all have one.
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
    k_strides: KvStrides
    v_strides: KvStrides
    k_scale_strides: tuple[int, int] = (0, 0)
    v_scale_strides: tuple[int, int] = (0, 0)
    table_stride: int
    v_table_offset: int = 0
    programmatic_serialization: bool = False


def context_launch(
    selection: ContextSelection, problem: ContextProblem, file: KernelFile
) -> NativeLaunch[ContextSelection]:
    """The launch of a context attention.

    A run's values are the tensors' addresses by name, ``q``, ``k`` and ``v`` among them, those of the workspace's
    regions, and ``problem.NUMBERS``.
    """
    regions = (STATUS, _COUNTERS)
    tile_tokens = int(selection.kernel.traits["tile_tokens"])
    plan = native_plan(
        selection.kernel,
        file,
        grid=selection.grid(problem),
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values={
            **_scale_strides(problem),
            "q_map": _query_map(problem, selection.packed),
            "k_map": _kv_map(problem, problem.head_dim, problem.k_strides, tile_tokens),
            "v_map": _kv_map(problem, problem.value_dim, problem.v_strides, tile_tokens),
            "out_token_stride": problem.out_strides[0],
            "out_head_stride": problem.out_strides[1],
            "lse_token_stride": problem.lse_strides[0],
            "lse_head_stride": problem.lse_strides[1],
            "table_stride": problem.table_stride,
            "v_table_offset": problem.v_table_offset,
            "batch": problem.batch,
            "tokens": problem.tokens,
            "kv_tokens": problem.kv_tokens,
            "q_len": problem.q_len,
            "max_seq_len": problem.max_seq_len,
            "group": problem.heads // problem.kv_heads,
            "packed_log2": selection.packed.bit_length() - 1,
            "head_packs": problem.heads // selection.packed,
            "section_packs": selection.section_packs,
            "page_size_log2": page_size_log2(problem.page_size),
            "num_pages": problem.num_pages,
            "window_left": _window(problem.window_left),
            "window_right": _window(problem.window_right),
            "softmax_scale_log2": problem.softmax_scale * LOG2_E,
            "output_scale": problem.output_scale,
            "soft_cap": problem.soft_cap,
            "lse_scale": math.log(2) if problem.lse_natural else 1.0,
            "lse_sink": int(problem.lse_with_sink),
        },
        caches={"q_map": "q", "k_map": "k", "v_map": "v"},
        regions=regions,
        why=selection,
    )
    return NativeLaunch(selection, plan, regions)


def _scale_strides(problem: ContextProblem) -> dict[str, object]:
    """The fields that only kernels of e4m3 caches have."""
    if problem.kv_dtype == problem.dtype:
        return {}
    return kv_scale_strides(problem.k_scale_strides, problem.v_scale_strides)


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


def _kv_map(problem: ContextProblem, columns: int, strides: KvStrides, tile_tokens: int) -> TensorMapSpec:
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
