"""An MLA decode problem as a launch plan: every field of the kernel's parameters but the pointers of one step."""

from __future__ import annotations

from dataclasses import dataclass

from ....artifacts.path import ArtifactPath
from ....artifacts.tables.native_kernels import NativeKernel
from ....launch.plan import LaunchAttributes, LaunchPlan
from ....launch.regions import Region
from ....launch.structs import StructLayout
from ....launch.tensormap import TensorMapSpec
from ..constants import CONSTANTS, TYPE_CODES
from ..decode.plan import (
    LOG2_E,
    OPTIONAL_POINTERS,
    STATUS,
    TENSOR_POINTERS,
    WORKSPACE_POINTERS,
    scratch_regions,
)
from .select import MlaSelection

# Bytes of an element and what the descriptor calls it: e4m3 is moved as bytes.
_CACHE_ELEMENTS = {"bf16": (2, "bfloat16"), "e4m3": (1, "uint8")}


@dataclass(frozen=True, slots=True)
class LatentCacheView:
    """The latent cache: address and the strides in elements between pages and tokens of a page."""

    pointer: int
    page_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class MlaProblem:
    """Sizes, strides (in elements) and options of an MLA decode; pointers other than the cache's come with each step.

    ``tokens`` are the query tokens of all requests, ``q_len`` those of each, or their bound where requests differ.
    ``kv_dtype`` is ``bf16`` or ``e4m3``, q is ``bf16`` or, beside an e4m3 cache, ``e4m3``. Rows of q begin at multiples
    of 16 bytes, those of out at multiples of 8 elements. ``softmax_scale`` and ``output_scale`` are 1 where the device
    has them.
    """

    batch: int
    tokens: int
    q_len: int
    heads: int
    latent: int
    rope: int
    page_size: int
    num_pages: int
    max_seq_len: int
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


def mla_regions(selection: MlaSelection, problem: MlaProblem) -> tuple[Region, ...]:
    """The workspace of an MLA decode, in the order of ``WORKSPACE_POINTERS``; a pair is a request and a row tile."""
    pairs, rows = problem.batch * selection.row_tiles, int(selection.kernel.traits["rows"])
    statistics_bytes, out_bytes = rows * (2 + CONSTANTS.mla_max_row_scales) * 4, rows * problem.latent * 2
    return (STATUS, *scratch_regions(pairs, selection.splits, selection.ctas, statistics_bytes, out_bytes))


def mla_plan(
    selection: MlaSelection,
    path: ArtifactPath,
    sha256: str,
    layout: StructLayout,
    problem: MlaProblem,
    cache: LatentCacheView,
) -> LaunchPlan:
    """The plan for ``problem`` on the selected kernel; step pointers are null until a step gives them.

    Args:
        selection: kernel, number of CTAs and how they share the work.
        path: artifact path of the kernel's cubin; ``sha256`` is its digest.
        layout: the struct that the kernel takes.
        problem: sizes, strides and options.
        cache: the latent cache.

    Raises:
        UsageError: a value does not fit its field.
    """
    kernel = selection.kernel
    values: dict[str, object] = dict.fromkeys((*TENSOR_POINTERS, *OPTIONAL_POINTERS, *WORKSPACE_POINTERS), 0)
    values |= {
        "kv_map": cache_descriptor(problem, kernel, cache),
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
        "heads": problem.heads,
        "tiles_together": selection.tiles_together,
        "splits": selection.splits,
        "page_size_log2": problem.page_size.bit_length() - 1,
        "num_pages": problem.num_pages,
        "max_seq_len": problem.max_seq_len,
        "q_type": TYPE_CODES[problem.q_dtype],
        "out_type": TYPE_CODES[problem.out_dtype],
        "softmax_scale_log2": problem.softmax_scale * LOG2_E,
        "output_scale": problem.output_scale,
    }
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


def cache_descriptor(problem: MlaProblem, kernel: NativeKernel, cache: LatentCacheView) -> TensorMapSpec:
    """Boxes of the kernel's columns and the tokens of a tile that one page holds together."""
    itemsize, dtype = _CACHE_ELEMENTS[problem.kv_dtype]
    return TensorMapSpec(
        dtype=dtype,
        address=cache.pointer,
        dims=(problem.latent + problem.rope, problem.page_size, problem.num_pages),
        strides=(cache.token_stride * itemsize, cache.page_stride * itemsize),
        box=(int(kernel.traits["box_columns"]), min(problem.page_size, int(kernel.traits["tile_tokens"])), 1),
        element_strides=(1, 1, 1),
        swizzle=str(kernel.traits["swizzle"]),
        l2_promotion="128B",
    )
