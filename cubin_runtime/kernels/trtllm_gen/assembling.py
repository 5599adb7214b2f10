"""What the entry points share: one place that fills every field of a ``Problem``."""

from __future__ import annotations

from math import prod

from .arguments import (
    NO_OUT_SCALES,
    Common,
    Heads,
    OutScales,
    Tensor,
    dtype_of,
)
from .problem import Pointers, Problem, Strides
from .traits import (
    INT32_MAX,
    KernelType,
    MaskType,
    QkvLayout,
    SparseType,
    TileScheduler,
    float32,
    int32,
)
from .workspace_layout import Carving, carve

LOG2_E = 1.4426950408889634  # the double nearest to log2(e)


def assemble(
    common: Common,
    heads: Heads,
    *,
    layout: QkvLayout,
    mask: MaskType,
    kernel_type: KernelType,
    dtypes: tuple[str, str],
    max_kv: int,
    pages: tuple[int, int, int],
    pointers: Pointers,
    scratch_limit: int,
    strides: Strides,
    tokens_kv: int = 0,
    window_left: int | None = None,
    sparse: SparseType = SparseType.NONE,
    top_k: int = 0,
    sage_blocks: tuple[int, int, int, int] = (0, 0, 0, 0),
    scale_kv_scales: float = 0.0,
    out_scales: OutScales = NO_OUT_SCALES,
    shares_page_index: bool = False,
) -> Problem:
    """What all entry points fill alike; ``pages`` are page size, pages of the pool, and the table's width."""
    page, pool, width = pages
    window_left = common.window_left if window_left is None else window_left
    merges = common.multi_ctas_enabled and kernel_type != KernelType.CONTEXT
    return Problem(
        sm=common.device.sm,
        multiprocessors=common.device.multiprocessors,
        layout=layout,
        mask=mask,
        kernel_type=kernel_type,
        scheduler=TileScheduler.STATIC if merges else TileScheduler.PERSISTENT,
        multi_ctas=merges,
        dtype_q=dtype_of("query", common.query),
        dtype_k=dtypes[0],
        dtype_v=dtypes[1],
        dtype_o=dtype_of("out", common.out),
        heads_q=heads.query,
        heads_kv=heads.kv,
        head_dim_qk=heads.dim_qk,
        head_dim_v=heads.dim_v,
        batch=common.batch,
        max_q=common.max_q,
        max_kv=max_kv,
        tokens_q=common.query.shape[0],
        tokens_kv=tokens_kv,
        page=page,
        pages=pool,
        table_width=width,
        window=INT32_MAX if window_left == -1 else int32(window_left + 1),
        pointers=pointers,
        strides=strides,
        sparse=sparse,
        top_k=top_k,
        skip_softmax_factor=float32(common.skip_softmax_factor),
        sage_blocks=sage_blocks,
        softmax_scale_log2=float32((1.0 if common.bmm1.pointer else common.bmm1.value) * LOG2_E),
        output_scale=float32(1.0 if common.bmm2.pointer else common.bmm2.value),
        scale_kv_scales=scale_kv_scales,
        scale_out_scales=float32(out_scales.scale),
        first_out_scale_token=int32(out_scales.first_token),
        shares_page_index=shares_page_index,
        pdl=common.pdl,
        scratch_limit=scratch_limit,
        allows_tile_kv_64=common.allows_tile_kv_64,
    )


def pointers_of(common: Common, carving: Carving, **others: int) -> Pointers:
    """The addresses that all entry points take alike, and ``others`` by their fields' names."""
    return Pointers(
        query=common.query.pointer,
        out=common.out.pointer,
        seq_lens=common.seq_lens.pointer,
        cum_seq_lens_q=address_of(common.cum_seq_lens_q),
        sinks=address_of(common.sinks),
        softmax_scale_log2=common.bmm1.pointer,
        output_scale=common.bmm2.pointer,
        lse=address_of(common.lse),
        counters=common.counters if common.counters is not None else carving.counters,
        softmax_stats=carving.softmax_stats,
        scratch=carving.scratch,
        **others,
    )


def carve_for(common: Common, heads_q: int, *, mergeable: bool) -> Carving:
    """The workspace of a call; ``mergeable`` ones have counters and scratch, those with an LSE statistics."""
    rows = None if common.lse is None else (heads_q, common.batch, common.max_q)
    carves_counters = mergeable and common.counters is None
    return carve(*common.workspace, counters=carves_counters, stats_rows=rows, scratch=mergeable)


def query_strides(common: Common) -> tuple[int, int]:
    """Of tokens and heads."""
    return int32(common.query.strides[0]), int32(common.query.strides[1])


def ragged_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Of tokens, heads and the one "page" that is the whole tensor."""
    return int32(tensor.strides[0]), int32(tensor.strides[1]), int32(prod(tensor.shape))


def lse_strides(common: Common) -> tuple[int, int]:
    """Of tokens and heads; zeros without an LSE."""
    if common.lse is None:
        return (0, 0)
    return int32(common.lse.strides[0]), int32(common.lse.strides[1])


def address_of(tensor: Tensor | None) -> int:
    """The address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.pointer
