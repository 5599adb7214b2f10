"""Decoding under FlashInfer's names: grouped queries, and MLA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention.trtllm_gen import DecodeCall, run
from ..attention.views import TensorView, view_of
from ..errors import UsageError
from .arguments import (
    batch_of,
    flat_tokens,
    longest_query,
    lse_of,
    output_of,
    pdl_of,
    process_runtime,
    query_of,
    refuse,
    scales_of,
    sinks_of,
    split_cache,
    tensor_or_none,
)

_MLA_HEADS = ((512, 64), (256, 64))
_SPARSE_MLA_HEADS = (512, 0)


def trtllm_batch_decode_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Decoding over a paged KV cache (GQA).

    Args:
        query: ``[tokens, q_heads, head_dim]``, fp16, bf16 or e4m3; tokens are batch x q_len_per_req.
        kv_cache: a pair of K and V, or ``[pages, 2, ...]``; each ``[pages, kv_heads, page_size, head_dim]`` (HND) or
            ``[pages, page_size, kv_heads, head_dim]`` (NHD); uint8 for FP4.
        workspace_buffer: scratch, any dtype and contents.
        block_tables: int32 ``[batch, columns]``; ``[batch, 2, columns]`` if not ``uses_shared_paged_kv_idx``.
        seq_lens: int32 ``[batch]``, keys of each request.
        max_seq_len: bound on them.
        bmm1_scale, bmm2_scale: factors of scores and output: numbers, or one float32 on the device.
        window_left: keys before its own that a query sees; -1: all.
        out: like ``query``, or an ``FP4Tensor``; None: made here.
        out_dtype: None: that of ``query``; fp16, bf16, or "nvfp4" (e4m3 queries).
        o_sf_scale, o_sf_vec_size: of an nvfp4 output.
        sinks: float32 ``[q_heads]``.
        kv_layout: "HND" or "NHD".
        enable_pdl: None: on.
        backend: "auto" or "trtllm-gen".
        q_len_per_req: query tokens of every request; None with ``cum_seq_lens_q``.
        o_scale: ``bmm2_scale`` has it in it already, so nothing is left to do with it.
        mask: expected None.
        max_q_len: bound on the query tokens of a request, with ``cum_seq_lens_q``. None reads that tensor back.
        cum_seq_lens_q: int32 ``[batch + 1]``, running sum of query tokens.
        skip_softmax_threshold_scale_factor: None or 0: off.
        kv_cache_sf: block scales of an FP4 cache, e4m3, laid out like it.
        lse: float32 ``[tokens, q_heads]`` to fill, any strides.
        return_lse: return (out, lse).
        bmm1_scale_log2: ``bmm1_scale`` times log2(e) on the device, instead of it.
        multi_ctas_kv_counter_buffer: zeroed counters, left zeroed; None: made for this call.
        enable_block_sparse_attention, bf16q_fp8kv_transform_mode, uses_shared_paged_kv_idx: as the peer names them;
            the first two are refused.
        batch_invariant: a request's bits do not depend on its neighbours or on any bound.

    Returns:
        ``out``, or (``out``, ``lse``).
    """
    operator = "trtllm_batch_decode_with_kv_cache"
    refuse(
        operator,
        {
            "mask": mask,
            "enable_block_sparse_attention": enable_block_sparse_attention,
            "bf16q_fp8kv_transform_mode": bf16q_fp8kv_transform_mode,
        },
    )
    rt = process_runtime()
    q = query_of(query, 3)
    key, value = split_cache(kv_cache, kv_layout)
    lengths = view_of(seq_lens, "seq_lens")
    max_q, cum_q = _query_lengths(q_len_per_req, max_q_len, cum_seq_lens_q, batch_of(lengths), q.shape[0])
    scales = scales_of(bmm1_scale, bmm2_scale, bmm1_scale_log2, q.device, rt)
    output = output_of(out, out_dtype, query, q.shape, q.dtype, o_sf_scale, o_sf_vec_size, rt)
    key_scales, value_scales = (
        (None, None) if kv_cache_sf is None else split_cache(kv_cache_sf, kv_layout, "kv_cache_sf")
    )
    kept_lse = lse_of(lse, return_lse, query, (q.shape[0], q.shape[1]), rt)
    call = DecodeCall(
        query=q,
        out=output.view,
        seq_lens=lengths,
        max_q=max_q,
        max_kv=int(max_seq_len),
        bmm1=scales.bmm1,
        bmm2=scales.bmm2,
        cum_seq_lens_q=cum_q,
        sinks=sinks_of(sinks, "sinks", q.device),
        lse=tensor_or_none(kept_lse, "lse", q.device),
        window_left=window_left,
        skip_softmax_factor=skip_softmax_threshold_scale_factor or 0.0,
        pdl=pdl_of(enable_pdl),
        batch_invariant=batch_invariant,
        key=key,
        value=value,
        block_tables=view_of(block_tables, "block_tables"),
        key_scales=key_scales,
        value_scales=value_scales,
        shares_index=uses_shared_paged_kv_idx,
        out_scales=output.scales,
    )
    run(call, workspace_buffer, counters=multi_ctas_kv_counter_buffer, backend=backend, runtime=rt)
    return (output.tensor, kept_lse) if return_lse else output.tensor


def trtllm_batch_decode_with_kv_cache_mla(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Any = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Any = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Any = None,
    sparse_mla_top_k_lens: Any = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Any = None,
    use_fp16_softmax: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """MLA decoding over a paged latent cache; parameters not named here are as in the GQA operator.

    Args:
        query: ``[batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]``, or ``[tokens, heads, ...]`` with
            ``cum_seq_lens_q``; bf16 or e4m3.
        kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]`` or ``[pages, 1, page_size, ...]``.
        qk_nope_head_dim: of the model, 1 or more; only ``bmm1_scale`` depends on it.
        kv_lora_rank, qk_rope_head_dim: (512, 64) or (256, 64); (512, 0) sparse.
        block_tables: int32 ``[batch, columns]``; ``[batch, q_len, sparse_mla_top_k]`` key numbers where sparse.
        sparse_mla_top_k: keys that a query looks at, a multiple of 4; 0: all.
        out: ``[batch, q_len, heads, kv_lora_rank]`` (``[tokens, heads, kv_lora_rank]``); None: bf16, made here.
        is_var_seq: a hint that decides nothing here.
        sparse_mla_top_k_lens: int32 ``[tokens]``, how many of its keys a query has.
        cute_dsl_impl, kv_scale_format, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, use_fp16_softmax:
            refused unless at their defaults.

    Returns:
        ``out``, or (``out``, ``lse``) with lse float32 ``[tokens, heads]``, or as the caller gave it
        (``[batch, q_len, heads]`` is taken too).
    """
    operator = "trtllm_batch_decode_with_kv_cache_mla"
    refuse(
        operator,
        {
            "cute_dsl_impl": cute_dsl_impl,
            "kv_scale_format": kv_scale_format,
            "enable_dcp": enable_dcp,
            "cp_world": cp_world,
            "cp_rank": cp_rank,
            "causal_seqlens_kv_global": causal_seqlens_kv_global,
            "use_fp16_softmax": use_fp16_softmax,
        },
        {"cute_dsl_impl": "auto", "kv_scale_format": "auto", "enable_dcp": False, "cp_world": 1, "cp_rank": 0},
    )
    rt = process_runtime()
    _check_mla_heads(qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, sparse_mla_top_k)
    given = query_of(query, 4 if cum_seq_lens_q is None else 3)
    q = flat_tokens(given, "query") if cum_seq_lens_q is None else given
    if q.shape[2] != kv_lora_rank + qk_rope_head_dim:
        raise UsageError(f"query: head dimension {q.shape[2]}, expected {kv_lora_rank + qk_rope_head_dim}")
    key = _latent_cache(kv_cache)
    lengths = view_of(seq_lens, "seq_lens")
    q_len = given.shape[1] if cum_seq_lens_q is None else None
    if q_len is not None and given.shape[0] != batch_of(lengths):
        raise UsageError(f"query: batch {given.shape[0]}, seq_lens has {batch_of(lengths)}")
    max_q, cum_q = _query_lengths(q_len, max_q_len, cum_seq_lens_q, batch_of(lengths), q.shape[0])
    scales = scales_of(bmm1_scale, bmm2_scale, None, q.device, rt)
    shape = (*given.shape[:-1], kv_lora_rank)
    output = output_of(out, None, query, shape, "bfloat16", None, None, rt)
    kept_lse = lse_of(lse, return_lse, query, (q.shape[0], q.shape[1]), rt)
    call = DecodeCall(
        query=q,
        out=output.view if cum_q is not None else flat_tokens(output.view, "out"),
        seq_lens=lengths,
        max_q=max_q,
        max_kv=int(max_seq_len),
        bmm1=scales.bmm1,
        bmm2=scales.bmm2,
        cum_seq_lens_q=cum_q,
        sinks=sinks_of(sinks, "sinks", q.device),
        lse=_flat_lse(tensor_or_none(kept_lse, "lse", q.device), given),
        skip_softmax_factor=skip_softmax_threshold_scale_factor or 0.0,
        pdl=pdl_of(enable_pdl),
        batch_invariant=batch_invariant,
        key=key,
        value=key,
        block_tables=view_of(block_tables, "block_tables"),
        shares_index=uses_shared_paged_kv_idx,
        top_k=sparse_mla_top_k,
        top_k_lens=tensor_or_none(sparse_mla_top_k_lens, "sparse_mla_top_k_lens", q.device),
    )
    run(call, workspace_buffer, counters=multi_ctas_kv_counter_buffer, backend=backend, runtime=rt)
    return (output.tensor, kept_lse) if return_lse else output.tensor


def _query_lengths(
    q_len: int | None, max_q_len: int | None, cum_seq_lens_q: Any, batch: int, tokens: int
) -> tuple[int, TensorView | None]:
    """The bound on query lengths, and their running sum where they differ."""
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise UsageError(f"max_q_len={max_q_len} without cum_seq_lens_q: nothing says which tokens are whose")
        if q_len is None:
            raise UsageError("q_len_per_req: None without cum_seq_lens_q; expected the query tokens of a request")
        return int(q_len), None
    if q_len is not None:
        raise UsageError(f"q_len_per_req={q_len} with cum_seq_lens_q: expected None where lengths differ")
    view = view_of(cum_seq_lens_q, "cum_seq_lens_q")
    return longest_query(max_q_len, cum_seq_lens_q, view, batch, tokens, process_runtime()), view


def _check_mla_heads(nope: int, lora: int, rope: int, top_k: int) -> None:
    if nope < 1:
        raise UsageError(f"qk_nope_head_dim={nope}: expected 1 or more")
    sparse = " or (512, 0) with sparse_mla_top_k"
    if (lora, rope) not in _MLA_HEADS and not ((lora, rope) == _SPARSE_MLA_HEADS and top_k > 0):
        raise UsageError(f"kv_lora_rank={lora}, qk_rope_head_dim={rope}: expected (512, 64), (256, 64){sparse}")


def _flat_lse(lse: TensorView | None, query: TensorView) -> TensorView | None:
    nested = lse is not None and len(query.shape) == 4 and lse.shape == query.shape[:3]
    return flat_tokens(lse, "lse") if lse is not None and nested else lse


def _latent_cache(kv_cache: Any) -> TensorView:
    view = view_of(kv_cache, "kv_cache")
    if len(view.shape) == 3:
        pages, tokens, width = view.shape
        strides = (view.strides[0], view.strides[0], *view.strides[1:])
        return replace(view, shape=(pages, 1, tokens, width), strides=strides)
    if len(view.shape) != 4 or view.shape[1] != 1:
        raise UsageError(f"kv_cache: shape {view.shape}, expected [pages, page_size, width] with or without a 1 behind")
    return view
