"""A decode problem as a launch plan: every field of the kernel's parameters but the pointers of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....artifacts.path import ArtifactPath
from ....launch.plan import LaunchAttributes, LaunchPlan
from ....launch.regions import Region
from ....launch.structs import StructLayout
from ....launch.tensormap import TensorMapSpec
from ..constants import CONSTANTS, TYPE_CODES
from ..cost_model import ITEM_BYTES
from .params import PAGED_DECODE_TMA
from .select import DecodeSelection

LOG2_E = math.log2(math.e)
# What the driver's descriptors call the elements; e4m3 is moved as bytes.
_MAP_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "uint8"}
_SWIZZLE_BYTES = 128  # the widest span; a longer row is several boxes of the same map

# What is a pointer for each call, in the order that a prepared launch takes it; those of tensors that a call may
# leave out come last.
TENSOR_POINTERS = ("q", "page_table", "seq_lens", "out")
OPTIONAL_POINTERS = ("lse", "q_cu_seq_lens", "mask", "sinks", "softmax_scale_device", "output_scale_device")
WORKSPACE_POINTERS = ("status", "counters", "partial_statistics", "partial_out")
STEP_NUMBERS = ("max_seq_len", "softmax_scale_log2", "output_scale")
# What changes from step to step, in the order that a prepared launch takes it.
STEP_FIELDS = (*TENSOR_POINTERS, *OPTIONAL_POINTERS, *WORKSPACE_POINTERS, *STEP_NUMBERS)

STATUS = Region("status", 4, zeroed=True)


@dataclass(frozen=True, slots=True)
class CacheView:
    """One of K and V: address and the strides in elements between pages, tokens of a page, and KV heads."""

    pointer: int
    page_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """Sizes, strides (in elements) and options of a decode; pointers other than the caches' come with each step.

    ``tokens`` are the query tokens of all requests, ``q_len`` those of each, or their bound where requests differ.
    Dtypes are ``bf16``, ``fp16`` or ``e4m3``. ``window_left`` is -1 without a window. Strides of tensors with heads
    are those of a token and of a head. ``softmax_scale`` and ``output_scale`` are 1 where the device has them.
    """

    batch: int
    tokens: int
    q_len: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_pages: int
    max_seq_len: int
    window_left: int
    kv_dtype: str
    q_dtype: str
    out_dtype: str
    softmax_scale: float
    output_scale: float
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    table_stride: int
    programmatic_serialization: bool = False


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """One launch of a decode, and its parts of the workspace in the order of ``WORKSPACE_POINTERS``."""

    selection: DecodeSelection
    regions: tuple[Region, ...]


def decode_launches(selections: Sequence[DecodeSelection], problem: DecodeProblem) -> tuple[DecodeLaunch, ...]:
    """The launches of a decode: one word of status together, all other scratch apart."""
    many = len(selections) > 1
    return tuple(
        DecodeLaunch(selection, (STATUS, *_own_regions(selection, problem, f" {number}" if many else "")))
        for number, selection in enumerate(selections, 1)
    )


def _own_regions(selection: DecodeSelection, problem: DecodeProblem, suffix: str) -> tuple[Region, ...]:
    """A pair is a request, a KV head and a row tile."""
    pairs = problem.batch * selection.row_tiles * problem.kv_heads
    rows = int(selection.kernel.traits["rows"])
    ctas = 0 if selection.cluster_parts else selection.ctas  # a cluster merges in its shared memory
    return scratch_regions(pairs, selection.splits, ctas, rows * 2 * 4, rows * problem.head_dim * 4, suffix)


def scratch_regions(
    pairs: int, splits: int, ctas: int, statistics_bytes: int, out_bytes: int, suffix: str = ""
) -> tuple[Region, Region, Region]:
    """Counters, statistics and outputs of the parts of split pairs; ``_bytes`` are those of one part.

    Where the grid cuts the pairs (``splits`` 0) there are two partials a CTA, of the pair that ends in it and of the
    pair that begins in it, and a counter a CTA. Else every pair has a counter and ``splits`` partials.
    """
    counters, slots = (pairs, pairs * splits) if splits else (ctas, CONSTANTS.partials_per_cta * ctas)
    return (
        Region(f"counters{suffix}", 4 * counters, zeroed=True),
        Region(f"partial_statistics{suffix}", slots * statistics_bytes),
        Region(f"partial_out{suffix}", slots * out_bytes),
    )


def decode_plan(
    selection: DecodeSelection,
    path: ArtifactPath,
    sha256: str,
    layout: StructLayout,
    problem: DecodeProblem,
    k: CacheView,
    v: CacheView,
) -> LaunchPlan:
    """The plan for ``problem`` on the selected kernel; step pointers are null until a step gives them.

    Args:
        selection: kernel, number of CTAs, and which requests it takes.
        path: artifact path of the kernel's cubin; ``sha256`` is its digest.
        layout: the struct that the kernel takes.
        problem: sizes, strides and options.
        k: key cache. ``v`` is the value cache.

    Raises:
        UsageError: a value does not fit its field.
    """
    kernel = selection.kernel
    values: dict[str, object] = dict.fromkeys((*TENSOR_POINTERS, *OPTIONAL_POINTERS, *WORKSPACE_POINTERS), 0)
    values |= {
        "q_token_stride": problem.q_strides[0],
        "q_head_stride": problem.q_strides[1],
        "out_token_stride": problem.out_strides[0],
        "out_head_stride": problem.out_strides[1],
        "lse_token_stride": problem.lse_strides[0],
        "lse_head_stride": problem.lse_strides[1],
        "table_stride": problem.table_stride,
        "batch": problem.batch,
        "tokens": problem.tokens,
        "q_len": problem.q_len,
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "least_rows": selection.least_rows,
        "most_rows": selection.most_rows,
        "group_reciprocal": -(-(1 << CONSTANTS.decode_group_reciprocal_bits) // problem.group),
        "head_blocks": problem.kv_heads // selection.heads_together,
        "heads_together": selection.heads_together,
        "splits": selection.splits,
        "cluster_parts_log2": selection.cluster_parts.bit_length() - 1,
        "page_size_log2": problem.page_size.bit_length() - 1,
        "num_pages": problem.num_pages,
        "max_seq_len": problem.max_seq_len,
        "window_left": problem.window_left,
        "q_type": TYPE_CODES[problem.q_dtype],
        "out_type": TYPE_CODES[problem.out_dtype],
        "softmax_scale_log2": problem.softmax_scale * LOG2_E,
        "output_scale": problem.output_scale,
    }
    values |= cache_values(layout, problem, int(kernel.traits["tile_tokens"]), k, v)
    return LaunchPlan(
        kernel=kernel.name,
        symbol=kernel.symbol,
        path=path,
        sha256=sha256,
        layout=layout,
        grid=launch_grid(selection, problem.batch, problem.kv_heads),
        block=(kernel.threads, 1, 1),
        shared_bytes=kernel.dynamic_shared_bytes,
        attributes=LaunchAttributes(
            cluster=(selection.cluster_parts, 1, 1) if selection.cluster_parts > 1 else None,
            programmatic_serialization=problem.programmatic_serialization,
        ),
        values=values,
        reason=selection.reason,
    )


def launch_grid(selection: DecodeSelection, batch: int, kv_heads: int) -> tuple[int, int, int]:
    """The grid as the kernels number it: a cluster for each KV head, request and row tile; or teams of CTAs."""
    if selection.cluster_parts:
        return selection.cluster_parts, kv_heads, batch * selection.row_tiles
    return selection.heads_together, selection.ctas // selection.heads_together, 1


def cache_values(
    layout: StructLayout, problem: DecodeProblem, tile_tokens: int, k: CacheView, v: CacheView
) -> dict[str, object]:
    """The fields that name the caches: two descriptors, or pointers and strides."""
    if layout is PAGED_DECODE_TMA:
        return {
            "k_map": _descriptor(problem, tile_tokens, k),
            "v_map": _descriptor(problem, tile_tokens, v),
        }
    values: dict[str, object] = {}
    for name, cache in (("k", k), ("v", v)):
        values |= {
            name: cache.pointer,
            f"{name}_page_stride": cache.page_stride,
            f"{name}_token_stride": cache.token_stride,
            f"{name}_head_stride": cache.head_stride,
        }
    return values


def _descriptor(problem: DecodeProblem, tile_tokens: int, cache: CacheView) -> TensorMapSpec:
    item_bytes = ITEM_BYTES[problem.kv_dtype]
    span = min(problem.head_dim * item_bytes, _SWIZZLE_BYTES)
    strides = (cache.token_stride, cache.head_stride, cache.page_stride)
    return TensorMapSpec(
        dtype=_MAP_DTYPES[problem.kv_dtype],
        address=cache.pointer,
        dims=(problem.head_dim, problem.page_size, problem.kv_heads, problem.num_pages),
        strides=tuple(stride * item_bytes for stride in strides),
        box=(span // item_bytes, min(problem.page_size, tile_tokens), 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=f"{span}B",
        l2_promotion="128B",
    )
