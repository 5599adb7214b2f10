"""A decode problem as a launch plan: every field of the kernel's parameters but the pointers of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...artifacts.path import ArtifactPath
from ..plan import LaunchAttributes, LaunchPlan
from ..structs import StructLayout
from ..tensormap import TensorMapSpec
from ..workspace import Region
from .params import PAGED_DECODE_TMA
from .select import DecodeSelection

LOG2_E = math.log2(math.e)
_BF16_BYTES = 2
_SWIZZLE_SPAN = 64  # elements: a row of 128 bytes

TENSOR_POINTERS = ("q", "out", "lse", "page_table", "seq_lens")
WORKSPACE_POINTERS = ("status", "counters", "partial_statistics", "partial_out")
# What changes from step to step, in the order that a prepared launch takes it.
STEP_FIELDS = (*TENSOR_POINTERS, *WORKSPACE_POINTERS, "max_seq_len", "softmax_scale_log2")


@dataclass(frozen=True, slots=True)
class CacheView:
    """One of K and V: address and the strides in elements between pages, tokens of a page, and KV heads."""

    pointer: int
    page_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """Sizes, strides (in elements) and options of a decode; pointers other than the caches' come with each step."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_pages: int
    max_seq_len: int
    softmax_scale: float
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    lse_strides: tuple[int, int]
    table_stride: int
    programmatic_serialization: bool = False


def decode_regions(ctas: int, rows: int, head_dim: int) -> tuple[Region, ...]:
    """The workspace of a decode, regions named as the step pointers that they give.

    Two partials a CTA: of the pair that ends in it and of the pair that begins in it (paged_decode.cu).
    """
    partials = 2 * ctas * rows
    return (
        Region("status", 4),
        Region("counters", 4 * ctas),
        Region("partial_statistics", partials * 2 * 4),
        Region("partial_out", partials * head_dim * 4),
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
        selection: kernel and number of CTAs.
        path: artifact path of the kernel's cubin; ``sha256`` is its digest.
        layout: the struct that the kernel takes.
        problem: sizes, strides and options.
        k: key cache. ``v`` is the value cache.

    Raises:
        UsageError: a value does not fit its field.
    """
    kernel = selection.kernel
    values: dict[str, object] = dict.fromkeys((*TENSOR_POINTERS, *WORKSPACE_POINTERS), 0)
    values |= {
        "q_token_stride": problem.q_strides[0],
        "q_head_stride": problem.q_strides[1],
        "out_token_stride": problem.out_strides[0],
        "out_head_stride": problem.out_strides[1],
        "lse_token_stride": problem.lse_strides[0],
        "lse_head_stride": problem.lse_strides[1],
        "table_stride": problem.table_stride,
        "batch": problem.batch,
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "heads_together": selection.heads_together,
        "page_size_log2": problem.page_size.bit_length() - 1,
        "num_pages": problem.num_pages,
        "max_seq_len": problem.max_seq_len,
        "softmax_scale_log2": problem.softmax_scale * LOG2_E,
    }
    values |= cache_values(layout, problem, int(kernel.traits["tile_tokens"]), k, v)
    return LaunchPlan(
        kernel=kernel.name,
        symbol=kernel.symbol,
        path=path,
        sha256=sha256,
        layout=layout,
        grid=(selection.ctas, 1, 1),
        block=(kernel.threads, 1, 1),
        shared_bytes=kernel.dynamic_shared_bytes,
        attributes=LaunchAttributes(programmatic_serialization=problem.programmatic_serialization),
        values=values,
        reason=selection.reason,
    )


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
    strides = (cache.token_stride, cache.head_stride, cache.page_stride)
    return TensorMapSpec(
        dtype="bfloat16",
        address=cache.pointer,
        dims=(problem.head_dim, problem.page_size, problem.kv_heads, problem.num_pages),
        strides=tuple(stride * _BF16_BYTES for stride in strides),
        box=(_SWIZZLE_SPAN, min(problem.page_size, tile_tokens), 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle="128B",
        l2_promotion="128B",
    )
