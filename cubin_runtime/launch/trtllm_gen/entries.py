"""The four entry points: each reduces its arguments to a ``Problem``."""

from __future__ import annotations

from math import prod

from .arguments import (
    NO_OUT_SCALES,
    NO_SAGE,
    Common,
    Heads,
    OutScales,
    PagedKv,
    Sage,
    Tensor,
    check_length,
    check_out_scales,
    check_rank,
    check_top_k,
    dtype_of,
    heads_of,
)
from .carving import Carving, carve
from .problem import Pointers, Problem, Strides, is_mla
from .refusals import ArgumentRefused
from .traits import INT32_MAX, KernelType, MaskType, QkvLayout, SparseType, TileScheduler, float32, int32

LOG2_E = 1.4426950408889634  # the double nearest to log2(e)
DSV4_WINDOW_LEFT = 127


def decode(
    common: Common,
    kv: PagedKv,
    out_scales: OutScales = NO_OUT_SCALES,
    *,
    top_k: int = 0,
    top_k_lens: Tensor | None = None,
) -> Problem:
    """Paged decoding, GQA and MLA; ``top_k`` > 0 is sparse MLA over that many KV tokens a query.

    Raises:
        ArgumentRefused, PlanRefused: an argument that no kernel takes.
        WorkspaceRefused: the workspace does not hold counters and statistics.
        UsageError: a dtype, rank or size that does not exist here.
    """
    check_out_scales(out_scales)
    check_top_k(top_k)
    heads = _paged_heads(common, kv)
    sparse = SparseType.NONE if top_k <= 0 else SparseType.DYNAMIC if top_k_lens is not None else SparseType.STATIC
    mla = is_mla(heads.dim_qk, heads.dim_v, sparse != SparseType.NONE)
    if sparse and not mla:
        raise ArgumentRefused(f"top_k={top_k} with heads {heads.dim_qk}/{heads.dim_v}: sparse KV needs MLA heads")
    return _paged(
        common,
        kv,
        out_scales,
        heads,
        _carve(common, heads.query, mergeable=True),
        mask=MaskType.DENSE if mla else MaskType.CAUSAL,
        kernel_type=KernelType.GENERATION,
        sparse=sparse,
        top_k=max(top_k, 0),
        top_k_lens=top_k_lens,
        cum_seq_lens_kv=None,
    )


def context(
    common: Common,
    kv: PagedKv,
    cum_seq_lens_kv: Tensor,
    out_scales: OutScales = NO_OUT_SCALES,
    *,
    causal: bool = True,
) -> Problem:
    """Paged context (prefill); errors as ``decode``."""
    check_out_scales(out_scales)
    heads = _paged_heads(common, kv)
    if common.window_left != -1 and not causal:
        raise ArgumentRefused(f"window_left={common.window_left} without causal: paged dense attention has no window")
    return _paged(
        common,
        kv,
        out_scales,
        heads,
        _carve(common, heads.query, mergeable=False),
        mask=MaskType.CAUSAL if causal else MaskType.DENSE,
        kernel_type=KernelType.CONTEXT,
        sparse=SparseType.NONE,
        top_k=0,
        top_k_lens=None,
        cum_seq_lens_kv=cum_seq_lens_kv,
    )


def ragged(
    common: Common,
    key: Tensor,
    value: Tensor,
    cum_seq_lens_kv: Tensor,
    max_kv: int,
    *,
    causal: bool = True,
    sage: Sage = NO_SAGE,
    out_scale: float = -1.0,
) -> Problem:
    """Context over keys [tokens, heads, head_dim] and values that are not paged; errors as ``decode``.

    The query is taken as contiguous, whatever its strides say.
    """
    check_rank("key", key, 3)
    check_rank("value", value, 3)
    check_length("max_kv_len", max_kv)
    check_length("key tokens", key.shape[0])
    heads = heads_of(common, key.shape[1], value.shape[2])
    return _problem(
        common,
        heads,
        layout=QkvLayout.SEPARATE,
        mask=MaskType.CAUSAL if causal else MaskType.DENSE,
        kernel_type=KernelType.CONTEXT,
        dtypes=(dtype_of("key", key), dtype_of("value", value)),
        max_kv=max_kv,
        pages=(0, 0, 0),
        pointers=_pointers(
            common,
            _carve(common, heads.query, mergeable=True),
            key=key.pointer,
            value=value.pointer,
            cum_seq_lens_kv=cum_seq_lens_kv.pointer,
            sage_q=_at(sage.scales[0]),
            sage_k=_at(sage.scales[1]),
            sage_p=_at(sage.scales[2]),
            sage_v=_at(sage.scales[3]),
        ),
        strides=Strides(key=_ragged_strides(key), value=_ragged_strides(value), lse=_lse_strides(common)),
        tokens_kv=key.shape[0],
        sage_blocks=sage.blocks,
        out_scales=OutScales(scale=out_scale),
    )


def decode_dsv4(
    common: Common, pool: Tensor, window_pool: Tensor, indices: Tensor, top_k_lens: Tensor | None
) -> Problem:
    """Sparse MLA over single tokens of two pools, [pages, 1, page size, 512] each; errors as ``decode``.

    ``indices`` [tokens, top_k] name KV tokens; a query visits ``top_k_lens`` [tokens] of them.
    """
    check_rank("primary_kv_cache", pool, 4)
    check_rank("sparse_indices", indices, 2, 3)
    top_k = indices.shape[-1]
    check_top_k(top_k)
    check_length("top_k", top_k)
    heads = heads_of(common, pool.shape[-3])
    token, head = int32(pool.strides[-2]), int32(pool.strides[-3])
    strides = (token, head, token)
    dtype = dtype_of("primary_kv_cache", pool)
    return _problem(
        common,
        heads,
        layout=QkvLayout.PAGED,
        mask=MaskType.DENSE,
        kernel_type=KernelType.GENERATION,
        dtypes=(dtype, dtype),
        max_kv=top_k,
        pages=(1, int32(pool.shape[0] * pool.shape[-2]), top_k),
        pointers=_pointers(
            common,
            _carve(common, heads.query, mergeable=True),
            key=pool.pointer,
            value=pool.pointer,
            page_table=indices.pointer,
            window_pool=window_pool.pointer,
            top_k_lens=_at(top_k_lens),
        ),
        strides=Strides(query=_query_strides(common), key=strides, value=strides),
        window_left=DSV4_WINDOW_LEFT,
        sparse=SparseType.DYNAMIC,
        top_k=top_k,
        scale_kv_scales=1.0,
        shares_page_index=True,
    )


def _paged_heads(common: Common, kv: PagedKv) -> Heads:
    check_rank("key_cache", kv.key, 4)
    check_rank("value_cache", kv.value, 4)
    check_rank("block_tables", kv.table, 2, 3)
    check_length("max_kv_len", kv.max_kv)
    check_length("page size", kv.key.shape[-2])
    return heads_of(common, kv.key.shape[-3])


def _paged(
    common: Common,
    kv: PagedKv,
    out_scales: OutScales,
    heads: Heads,
    carving: Carving,
    *,
    mask: MaskType,
    kernel_type: KernelType,
    sparse: SparseType,
    top_k: int,
    top_k_lens: Tensor | None,
    cum_seq_lens_kv: Tensor | None,
) -> Problem:
    key, value, scales = kv.key, kv.value, kv.key_scales
    packed = 2 if key.dtype == "uint8" else 1
    # The same strides serve V; where V is elsewhere, the pool is taken as pages of K and V in turn.
    strides = (
        int32(key.strides[-2] * packed),
        int32(key.strides[-3] * packed),
        int32(key.strides[0] * packed),
    )
    pages = int32(key.shape[0] if key.pointer == value.pointer else key.shape[0] * 2)
    return _problem(
        common,
        heads,
        layout=QkvLayout.PAGED,
        mask=mask,
        kernel_type=kernel_type,
        dtypes=(dtype_of("key_cache", key), dtype_of("value_cache", value)),
        max_kv=kv.max_kv,
        pages=(key.shape[-2], pages, kv.table.shape[-1]),
        pointers=_pointers(
            common,
            carving,
            key=key.pointer,
            value=value.pointer,
            page_table=kv.table.pointer,
            key_scales=_at(scales),
            value_scales=_at(kv.value_scales),
            out_scales=_at(out_scales.scales),
            top_k_lens=_at(top_k_lens),
            cum_seq_lens_kv=_at(cum_seq_lens_kv),
        ),
        strides=Strides(
            query=_query_strides(common),
            key=strides,
            value=strides,
            key_scales=(0, 0) if scales is None else (int32(scales.strides[-3]), int32(scales.strides[0])),
            lse=common.lse_strides,
        ),
        sparse=sparse,
        top_k=top_k,
        scale_kv_scales=1.0,
        out_scales=out_scales,
        shares_page_index=kv.shares_index,
    )


def _problem(
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
        first_out_scale_token=out_scales.first_token,
        shares_page_index=shares_page_index,
        pdl=common.pdl,
        allows_tile_kv_64=common.allows_tile_kv_64,
    )


def _pointers(common: Common, carving: Carving, **others: int) -> Pointers:
    return Pointers(
        query=common.query.pointer,
        out=common.out.pointer,
        seq_lens=common.seq_lens.pointer,
        cum_seq_lens_q=_at(common.cum_seq_lens_q),
        sinks=_at(common.sinks),
        softmax_scale_log2=common.bmm1.pointer,
        output_scale=common.bmm2.pointer,
        lse=_at(common.lse),
        counters=carving.counters,
        softmax_stats=carving.softmax_stats,
        scratch=carving.scratch,
        **others,
    )


def _carve(common: Common, heads_q: int, *, mergeable: bool) -> Carving:
    rows = None if common.lse is None else (heads_q, common.batch, common.max_q)
    return carve(*common.workspace, counters=mergeable, stats_rows=rows, scratch=mergeable)


def _query_strides(common: Common) -> tuple[int, int]:
    return int32(common.query.strides[0]), int32(common.query.strides[1])


def _ragged_strides(tensor: Tensor) -> tuple[int, int, int]:
    return int32(tensor.strides[0]), int32(tensor.strides[1]), int32(prod(tensor.shape))


def _lse_strides(common: Common) -> tuple[int, int]:
    if common.lse is None:
        return (0, 0)
    return int32(common.lse.strides[0]), int32(common.lse.strides[1])


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.pointer
