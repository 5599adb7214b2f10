"""Decoding over a paged KV cache (GQA): the operators of ``flashinfer.decode``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...attention.backends import XQA
from ...attention.fast_path.operator_function import operator_function
from ...attention.operators.paged_decode import paged_decode
from ...attention.paged_cache import E4M3
from ...attention.trtllm_gen import DecodeCall
from ...errors import UsageError
from ...tensor import view_of
from .arguments import MEMORY, SCALES, DecodeArguments, FP4Output, query_of, tensor_or_none
from .context_parallel import options_of_rank
from .layouts import cache_pair, cache_pair_by_head, nested_tokens
from .lengths import batch_of, lengths_of, query_lengths
from .native import check_skip_factor, decode_batch, page_table_of
from .outputs import is_fp4, output_of
from .scales import factor_of, times
from .torch_ops import torch_op
from .trtllm_gen import DECODE_NAMES, pages, run_call

if TYPE_CHECKING:
    from ...protocols import CompatBackend, KvLayout
    from ...tensor import Scale, Tensor


@operator_function(scales=SCALES, memory=MEMORY, op=torch_op)
def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | Sequence[Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Tensor | FP4Output | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | None = None,
    kv_layout: KvLayout = "HND",
    enable_pdl: bool | None = None,
    backend: CompatBackend = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Tensor | Sequence[Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: Any = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
    sparse_top_k: int = 0,
    length_aware_schedule: bool = False,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Decoding over a paged KV cache (GQA).

    Args:
        query: ``[tokens, q_heads, head_dim]``, fp16, bf16 or e4m3; tokens are batch x q_len_per_req.
        kv_cache: a pair of K and V, or ``[pages, 2, ...]``; each ``[pages, kv_heads, page_size, head_dim]`` (HND) or
            ``[pages, page_size, kv_heads, head_dim]`` (NHD); uint8 for FP4.
        workspace_buffer: any dtype. trtllm-gen: scratch of any contents. xqa: more than 8 MiB, of which the first
            8 MiB are semaphores (zero before first use, left so) and the rest is scratch.
        block_tables: int32 ``[batch, columns]``; ``[batch, 2, columns]`` if not ``uses_shared_paged_kv_idx``.
        seq_lens: int32 (xqa: or uint32) ``[batch]``, KV length of each request.
        max_seq_len: bound on the KV lengths; the capacity of ``block_tables`` if that is less.
        bmm1_scale, bmm2_scale: scales of scores and output, each a number or a float32 scalar on the device.
        window_left: keys before its own that a query token sees; -1: all.
        out: shaped like ``query``, or an ``FP4Tensor``; None: allocated here.
        out_dtype: fp16, bf16, xqa: e4m3, trtllm-gen: "nvfp4" (for e4m3 queries); None: the dtype of ``query``.
        o_sf_scale, o_sf_vec_size: block scales of an nvfp4 output.
        sinks: float32 ``[q_heads]``.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None: on.
        backend: "xqa" (native kernels), "trtllm-gen", or "auto": the backend that supports the device.
        q_len_per_req: query tokens of every request; None with ``cum_seq_lens_q``.
        o_scale: already divided out of ``bmm2_scale``, so e4m3 outputs ignore it; xqa multiplies other outputs by it.
        mask: xqa: as ``cubin_runtime.draft_mask`` makes it, uint16 ``[batch, q_len_per_req, 2 * words]`` or ``[tokens,
            2 * words]``; None: causal.
        max_q_len: bound on the query lengths, with ``cum_seq_lens_q``; None reads that tensor back.
        cum_seq_lens_q: int32 ``[batch + 1]``, cumulative query lengths.
        skip_softmax_threshold_scale_factor: trtllm-gen: skips keys of little weight, ragged queries included; xqa skips
            none. None or 0: off.
        kv_cache_sf: trtllm-gen: e4m3 block scales of an FP4 cache, in the layout of ``kv_cache``.
        lse: float32 ``[tokens, q_heads]`` to fill, any strides.
        return_lse: return (out, lse).
        bmm1_scale_log2: a float32 scalar on the device, the scale of the scores times log2(e); ``bmm1_scale`` is then
            unused.
        multi_ctas_kv_counter_buffer: trtllm-gen: zeroed counters, left zeroed; None: allocated for this call. Unused
            by xqa.
        uses_shared_paged_kv_idx: False: ``block_tables`` has the pages of K and those of V.
        enable_block_sparse_attention, bf16q_fp8kv_transform_mode, request_order, request_order_plan, sparse_top_k:
            refused unless at their defaults.
        length_aware_schedule: unused: work is divided by the lengths in every call.
        cp_world, cp_rank, causal_seqlens_kv_global: xqa: key i of all ranks is on rank i modulo ``cp_world``; int32
            ``[batch]``, contiguous: keys of each request on all ranks, without those of its query tokens. Query token j
            sees this rank's keys up to that position plus j; ``seq_lens`` counts those that the last one sees. Without
            mask and sinks where ``cp_world`` is over 1.
        batch_invariant: make a request's bits independent of other requests and of all bounds. On trtllm-gen kernels
            this fixes kernel, tiles and splits; that the bits are then equal has not been tested on a GPU. It is
            refused together with skipped keys.

    Returns:
        ``out``, or (``out``, ``lse``).
    """
    call = DecodeArguments(
        operator=trtllm_batch_decode_with_kv_cache,
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        window_left=window_left,
        out=out,
        out_dtype=out_dtype,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        backend=backend,
        q_len_per_req=q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        max_q_len=max_q_len,
        cum_seq_lens_q=cum_seq_lens_q,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        lse=lse,
        return_lse=return_lse,
        bmm1_scale_log2=bmm1_scale_log2,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        enable_block_sparse_attention=enable_block_sparse_attention,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
        request_order=request_order,
        request_order_plan=request_order_plan,
        sparse_top_k=sparse_top_k,
        length_aware_schedule=length_aware_schedule,
        batch_invariant=batch_invariant,
    )
    call.refuse(
        "enable_block_sparse_attention",
        "bf16q_fp8kv_transform_mode",
        "request_order",
        "request_order_plan",
        "sparse_top_k",
    )
    q, lengths = query_of(query, 3), view_of(seq_lens, "seq_lens")
    name = call.backend_on(q.device, call.backend)
    max_q, cum_q = query_lengths(call, call.q_len_per_req, batch_of(lengths), q)
    if name == XQA:
        call.refuse("o_sf_scale", "o_sf_vec_size", "kv_cache_sf", backend=name)
        check_skip_factor(call)
        return _decode_native(call, max_q, cum_q, {"q_cu_seq_lens": "cum_seq_lens_q"})
    call.refuse("mask", "cp_world", "cp_rank", "causal_seqlens_kv_global", backend=name)
    key, value = cache_pair_by_head(kv_cache, call.kv_layout)
    return run_call(
        DecodeCall,
        call,
        q,
        output_of(call, q.shape, q.dtype),
        backend=name,
        names=DECODE_NAMES,
        seq_lens=lengths,
        max_q=max_q,
        max_kv=call.max_seq_len,
        cum_seq_lens_q=cum_q,
        **pages(call, key, value),
    )


@operator_function(scales=SCALES, memory=MEMORY, op=torch_op)
def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | Sequence[Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: KvLayout = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Tensor | Sequence[Tensor] | None = None,
    q_cu_seq_lens: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Decoding over a paged KV cache (GQA); parameters not listed here are as in ``xqa``.

    Args:
        query: ``[tokens, q_heads, head_dim]``; tokens are batch x q_len_per_req, or as ``q_cu_seq_lens`` says.
        kv_cache: a pair of K and V, or ``[pages, 2, ...]``, or ``[pages, 1, ...]`` where V is K.
        workspace_buffer: more than 8 MiB, any dtype: the first 8 MiB are semaphores (zero before first use, left so),
            the rest is scratch of any contents. Work of one stream must be done with it before another stream's.
        max_seq_len: bound on the KV lengths; the capacity of ``block_tables`` if that is less.
        bmm1_scale, bmm2_scale: scales of scores and output, each a number or a float32 scalar on the device.
        window_left: keys before its own that a query token sees; -1: all.
        out: shaped like ``query``, bf16, fp16 or e4m3; None: allocated here with the dtype of ``query``.
        q_len_per_req: query tokens of each request; with ``q_cu_seq_lens`` their bound.
        o_scale: multiplies an ``out`` that is not e4m3 (its inverse is part of ``bmm2_scale``).
        kv_cache_sf: refused: there are no native FP4 kernels.

    Returns:
        ``out``.
    """
    call = DecodeArguments(
        operator=xqa_batch_decode_with_kv_cache,
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        window_left=window_left,
        out=out,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        q_len_per_req=q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        kv_cache_sf=kv_cache_sf,
        q_cu_seq_lens=q_cu_seq_lens,
        batch_invariant=batch_invariant,
    )
    call.refuse("kv_cache_sf")
    if call.q_len_per_req is None:
        raise UsageError("None, expected the query tokens of a request, or their bound", argument="q_len_per_req")
    call.backend_on(view_of(query, "query").device, XQA)
    return _decode_native(call, call.q_len_per_req, q_cu_seq_lens, {"max_q_len": "q_len_per_req"})


def _decode_native(call: DecodeArguments, q_len: int, q_cu_seq_lens: Any, names: Mapping[str, str]) -> Any:
    """Decode a query ``[tokens, q_heads, head_dim]`` on native kernels; ``names`` as for ``decode_batch``."""
    if is_fp4(call):
        raise UsageError("out_dtype or out is nvfp4: backend xqa writes bfloat16, float16 and float8_e4m3fn")
    q, lengths = query_of(call.query, 3), lengths_of(call.seq_lens)
    batch, ragged = lengths.shape[0], q_cu_seq_lens is not None
    if not ragged and (q_len < 1 or q.shape[0] != batch * q_len):
        raise UsageError(f"{q.shape[0]} tokens for {batch} requests of {q_len}", argument="query")
    caches = cache_pair(call.kv_cache, call.kv_layout)
    rank = options_of_rank(call, q.device, batch, q_len)
    output = output_of(call, q.shape, q.dtype)
    # FlashInfer: kv_scale = bmm2 * o_scale, q_scale = bmm1 / kv_scale * sqrt(D), rcp_out_scale = 1 / o_scale. By the
    # algebra of xqa: scores x bmm1; output x bmm2 where it is e4m3, else x bmm2 * o_scale.
    scale = factor_of("bmm2_scale", call.bmm2_scale, q.device)
    if output.view.dtype != E4M3 and call.o_scale is not None:
        scale = times(scale, factor_of("o_scale", call.o_scale, q.device), call.runtime)
    lse = tensor_or_none(call.lse, "lse", q.device, written=True)
    if lse is not None and lse.shape != q.shape[:2]:
        raise UsageError(f"shape {lse.shape}, expected {q.shape[:2]}", argument="lse")
    return decode_batch(
        paged_decode,
        call,
        names,
        nested_tokens(q, batch, q_len) if q_len > 1 and not ragged else q,
        caches,
        page_table_of(call),
        lengths,
        output,
        page_size=caches[0].shape[1 if call.kv_layout == "NHD" else 2],
        output_scale=scale,
        kv_layout=call.kv_layout,
        q_cu_seq_lens=q_cu_seq_lens,
        max_q_len=q_len if ragged else None,
        mask=call.mask,
        window_left=call.window_left,
        draft_position="index",
        **rank,
    )
