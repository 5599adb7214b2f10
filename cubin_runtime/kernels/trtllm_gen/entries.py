"""The four entry points: each reduces its arguments to a ``Problem``."""

from __future__ import annotations

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
    check_sage,
    check_top_k,
    dtype_of,
    heads_of,
)
from .assembling import (
    address_of,
    assemble,
    carve_for,
    lse_strides,
    pointers_of,
    query_strides,
    ragged_strides,
)
from .problem import Problem, Strides, is_mla
from .refusals import ArgumentRefused
from .traits import (
    KernelType,
    MaskType,
    QkvLayout,
    SparseType,
    int32,
)
from .workspace_layout import Carving

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
    check_length("top_k + 1", max(top_k, 0) + 1)
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
        carve_for(common, heads.query, mergeable=True),
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
        carve_for(common, heads.query, mergeable=False),
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
    check_sage(sage)
    heads = heads_of(common, key.shape[1], value.shape[2])
    carving = carve_for(common, heads.query, mergeable=True)
    return assemble(
        common,
        heads,
        layout=QkvLayout.SEPARATE,
        mask=MaskType.CAUSAL if causal else MaskType.DENSE,
        kernel_type=KernelType.CONTEXT,
        dtypes=(dtype_of("key", key), dtype_of("value", value)),
        max_kv=max_kv,
        pages=(0, 0, 0),
        pointers=pointers_of(
            common,
            carving,
            key=key.pointer,
            value=value.pointer,
            cum_seq_lens_kv=cum_seq_lens_kv.pointer,
            sage_q=address_of(sage.scales[0]),
            sage_k=address_of(sage.scales[1]),
            sage_p=address_of(sage.scales[2]),
            sage_v=address_of(sage.scales[3]),
        ),
        scratch_limit=carving.scratch_bytes,
        strides=Strides(key=ragged_strides(key), value=ragged_strides(value), lse=lse_strides(common)),
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
    carving = carve_for(common, heads.query, mergeable=True)
    token, head = int32(pool.strides[-2]), int32(pool.strides[-3])
    strides = (token, head, token)
    dtype = dtype_of("primary_kv_cache", pool)
    return assemble(
        common,
        heads,
        layout=QkvLayout.PAGED,
        mask=MaskType.DENSE,
        kernel_type=KernelType.GENERATION,
        dtypes=(dtype, dtype),
        max_kv=top_k,
        pages=(1, int32(pool.shape[0] * pool.shape[-2]), top_k),
        pointers=pointers_of(
            common,
            carving,
            key=pool.pointer,
            value=pool.pointer,
            page_table=indices.pointer,
            window_pool=window_pool.pointer,
            top_k_lens=address_of(top_k_lens),
        ),
        scratch_limit=carving.scratch_bytes,
        strides=Strides(query=query_strides(common), key=strides, value=strides),
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
    return assemble(
        common,
        heads,
        layout=QkvLayout.PAGED,
        mask=mask,
        kernel_type=kernel_type,
        dtypes=(dtype_of("key_cache", key), dtype_of("value_cache", value)),
        max_kv=kv.max_kv,
        pages=(key.shape[-2], pages, int32(kv.table.shape[-1])),
        pointers=pointers_of(
            common,
            carving,
            key=key.pointer,
            value=value.pointer,
            page_table=kv.table.pointer,
            key_scales=address_of(scales),
            value_scales=address_of(kv.value_scales),
            out_scales=address_of(out_scales.scales),
            top_k_lens=address_of(top_k_lens),
            cum_seq_lens_kv=address_of(cum_seq_lens_kv),
        ),
        scratch_limit=carving.scratch_bytes,
        strides=Strides(
            query=query_strides(common),
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
