"""Grouped-query decoding under the name of FlashInfer that serves several backends."""

from __future__ import annotations

from typing import Any

from ..attention.backends import XQA, find_backend
from ..attention.checks import integer
from ..attention.trtllm_gen import DecodeCall
from ..tensor import view_of
from .arguments import (
    batch_of,
    process_runtime,
    query_of,
    refuse,
    split_cache,
)
from .calls import block_scales, query_lengths, run_published
from .outputs import output_of
from .pages import decode_batch


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
        workspace_buffer: any dtype. trtllm-gen: scratch of any contents. xqa: more than 8 MiB, the first 8 MiB
            semaphores (zero on first use, left so), the rest scratch.
        block_tables: int32 ``[batch, columns]``; ``[batch, 2, columns]`` if not ``uses_shared_paged_kv_idx``.
        seq_lens: int32 (xqa: or uint32) ``[batch]``, keys of each request.
        max_seq_len: bound on them; what ``block_tables`` holds, if that is less.
        bmm1_scale, bmm2_scale: factors of scores and output: numbers, or one float32 on the device.
        window_left: keys before its own that a query sees; -1: all.
        out: like ``query``, or an ``FP4Tensor``; None: made here.
        out_dtype: None: that of ``query``; fp16, bf16, xqa: e4m3, trtllm-gen: "nvfp4" (e4m3 queries).
        o_sf_scale, o_sf_vec_size: of an nvfp4 output.
        sinks: float32 ``[q_heads]``.
        kv_layout: "HND" or "NHD".
        enable_pdl: None: on.
        backend: "xqa" (our kernels), "trtllm-gen" (the published ones), or "auto": the one that is for the device.
        q_len_per_req: query tokens of every request; None with ``cum_seq_lens_q``.
        o_scale: ``bmm2_scale`` has its inverse in it, so nothing is left to do with it; but on xqa an output that is
            not e4m3 is multiplied by it.
        mask: xqa: uint16 ``[batch, q_len_per_req, 2]`` or ``[tokens, 2]`` (``cubin_runtime.launch.mask``); None:
            causal.
        max_q_len: bound on the query tokens of a request, with ``cum_seq_lens_q``. None reads that tensor back.
        cum_seq_lens_q: int32 ``[batch + 1]``, running sum of query tokens.
        skip_softmax_threshold_scale_factor: trtllm-gen; None or 0: off.
        kv_cache_sf: trtllm-gen: block scales of an FP4 cache, e4m3, laid out like it.
        lse: float32 ``[tokens, q_heads]`` to fill, any strides.
        return_lse: return (out, lse).
        bmm1_scale_log2: trtllm-gen: ``bmm1_scale`` times log2(e) on the device, instead of it.
        multi_ctas_kv_counter_buffer: trtllm-gen: zeroed counters, left zeroed; None: made for this call. xqa needs
            none.
        uses_shared_paged_kv_idx: xqa: True; trtllm-gen: False for tables of K and V apart.
        enable_block_sparse_attention, bf16q_fp8kv_transform_mode: refused.
        batch_invariant: a request's bits do not depend on its neighbours or on any bound.

    Returns:
        ``out``, or (``out``, ``lse``).
    """
    operator = "trtllm_batch_decode_with_kv_cache"
    refuse(
        operator,
        {
            "enable_block_sparse_attention": enable_block_sparse_attention,
            "bf16q_fp8kv_transform_mode": bf16q_fp8kv_transform_mode,
        },
    )
    rt = process_runtime()
    q = query_of(query, 3)
    lengths = view_of(seq_lens, "seq_lens")
    found = find_backend(operator, backend, rt.driver.device(q.device))
    max_q, cum_q = query_lengths(q_len_per_req, max_q_len, cum_seq_lens_q, batch_of(lengths), q.shape[0], rt)
    if found == XQA:
        refuse(
            f"{operator} by backend {XQA!r}",
            {
                "o_sf_scale": o_sf_scale,
                "o_sf_vec_size": o_sf_vec_size,
                "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor or None,
                "kv_cache_sf": kv_cache_sf,
                "uses_shared_paged_kv_idx": uses_shared_paged_kv_idx,
                "bmm1_scale_log2": bmm1_scale_log2,
            },
            {"uses_shared_paged_kv_idx": True},
        )
        return decode_batch(
            query,
            kv_cache,
            workspace_buffer,
            block_tables,
            lengths,
            max_seq_len,
            runtime=rt,
            q_len=max_q,
            q_cu_seq_lens=cum_q,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
            o_scale=o_scale,
            out=out,
            out_dtype=out_dtype,
            kv_layout=kv_layout,
            lse=lse,
            return_lse=return_lse,
            sinks=sinks,
            enable_pdl=enable_pdl,
            mask=mask,
            window_left=window_left,
            batch_invariant=batch_invariant,
        )
    refuse(f"{operator} by backend {found!r}", {"mask": mask})
    key, value = split_cache(kv_cache, kv_layout)
    return run_published(
        DecodeCall,
        query,
        output_of(out, out_dtype, query, q.shape, q.dtype, o_sf_scale, o_sf_vec_size, rt),
        workspace_buffer,
        query_view=q,
        runtime=rt,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        bmm1_scale_log2=bmm1_scale_log2,
        lse=lse,
        return_lse=return_lse,
        sinks=sinks,
        enable_pdl=enable_pdl,
        skip_softmax=skip_softmax_threshold_scale_factor,
        counters=multi_ctas_kv_counter_buffer,
        backend=found,
        seq_lens=lengths,
        max_q=max_q,
        max_kv=integer("max_seq_len", max_seq_len),
        cum_seq_lens_q=cum_q,
        window_left=window_left,
        batch_invariant=batch_invariant,
        key=key,
        value=value,
        block_tables=view_of(block_tables, "block_tables"),
        shares_index=uses_shared_paged_kv_idx,
        **block_scales(kv_cache_sf, kv_layout),
    )
