"""MLA decoding under FlashInfer's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention.backends import XQA, find_backend
from ..attention.runtime import Runtime
from ..attention.trtllm_gen import DecodeCall
from ..errors import UsageError
from ..kernels.trtllm_gen.arguments import OutScales
from ..tensor import TensorView, view_of
from .arguments import (
    batch_of,
    flat_tokens,
    nested_tokens,
    process_runtime,
    query_of,
    refuse,
    tensor_or_none,
)
from .calls import query_lengths, run_published
from .latent import decode_latent
from .outputs import Output, is_fp4, output_of
from .pages import lengths_of

_MLA_HEADS = ((512, 64), (256, 64))
_SPARSE_MLA_HEADS = (512, 0)


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
            ``cum_seq_lens_q``; bf16 or e4m3 (xqa: where a kernel takes it).
        kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]`` or ``[pages, 1, page_size, ...]``; bf16 or
            e4m3; xqa: pages of 32, 64 or 128 tokens.
        workspace_buffer: any dtype. trtllm-gen: scratch of any contents. xqa: more than 8 MiB, the first 8 MiB
            semaphores (zero on first use, left so), the rest scratch.
        qk_nope_head_dim: of the model, 1 or more; only ``bmm1_scale`` depends on it.
        kv_lora_rank, qk_rope_head_dim: (512, 64) or (256, 64); trtllm-gen: (512, 0) sparse.
        block_tables: int32 ``[batch, columns]``, any number of columns; ``[batch, q_len, sparse_mla_top_k]`` key
            numbers where sparse.
        seq_lens: int32 (xqa: or uint32) ``[batch]``, keys of each request.
        max_seq_len: bound on them; xqa: what ``block_tables`` holds, if that is less.
        sparse_mla_top_k: trtllm-gen: keys that a query looks at, a multiple of 4; 0: all.
        out: ``[batch, q_len, heads, kv_lora_rank]`` (``[tokens, heads, kv_lora_rank]``), for one token a request also
            ``[batch, heads, kv_lora_rank]``; None: bf16, made here in the first shape.
        backend: "xqa" (our kernels), "trtllm-gen" (the published ones), or "auto": the one that is for the device.
        is_var_seq: a hint that decides nothing here.
        cum_seq_lens_q: int32 ``[batch + 1]``, running sum of query tokens; a request may have none.
        max_q_len: bound on the query tokens of a request, with ``cum_seq_lens_q``. None reads that tensor back.
        skip_softmax_threshold_scale_factor, uses_shared_paged_kv_idx=False, sparse_mla_top_k_lens (int32 ``[tokens]``,
            how many of its keys a query has): trtllm-gen.
        multi_ctas_kv_counter_buffer: trtllm-gen: zeroed counters, left zeroed; None: made for this call. xqa needs
            none.
        cute_dsl_impl, kv_scale_format, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global, use_fp16_softmax:
            refused unless at their defaults.
        batch_invariant: a request's bits do not depend on its neighbours or on any bound.

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
    lengths = view_of(seq_lens, "seq_lens")
    batch = batch_of(lengths)
    _check_query(given, lengths, kv_lora_rank + qk_rope_head_dim)
    q_len = given.shape[1] if cum_seq_lens_q is None else None
    found = find_backend(operator, backend, rt.driver.device(q.device))
    max_q, cum_q = query_lengths(q_len, max_q_len, cum_seq_lens_q, batch, q.shape[0], rt)
    if found == XQA:
        refuse(
            f"{operator} by backend {XQA!r}",
            {
                "sparse_mla_top_k": sparse_mla_top_k,
                "sparse_mla_top_k_lens": sparse_mla_top_k_lens,
                "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor or None,
                "uses_shared_paged_kv_idx": uses_shared_paged_kv_idx,
            },
            {"sparse_mla_top_k": 0, "uses_shared_paged_kv_idx": True},
        )
        return decode_latent(
            query,
            given,
            kv_cache,
            workspace_buffer,
            block_tables,
            lengths,
            max_seq_len,
            _output(out, query, given, kv_lora_rank, rt),
            runtime=rt,
            max_q_len=None if cum_q is None else max_q,
            q_cu_seq_lens=cum_q,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
            lse=lse,
            return_lse=return_lse,
            sinks=sinks,
            enable_pdl=enable_pdl,
            batch_invariant=batch_invariant,
        )
    key = _latent_cache(kv_cache)
    return run_published(
        DecodeCall,
        query,
        _output(out, query, given, kv_lora_rank, rt),
        workspace_buffer,
        runtime=rt,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        lse=lse,
        return_lse=return_lse,
        sinks=sinks,
        enable_pdl=enable_pdl,
        skip_softmax=skip_softmax_threshold_scale_factor,
        counters=multi_ctas_kv_counter_buffer,
        backend=found,
        query_view=q,
        seq_lens=lengths,
        max_q=max_q,
        max_kv=int(max_seq_len),
        cum_seq_lens_q=cum_q,
        batch_invariant=batch_invariant,
        key=key,
        value=key,
        block_tables=view_of(block_tables, "block_tables"),
        shares_index=uses_shared_paged_kv_idx,
        top_k=sparse_mla_top_k,
        top_k_lens=tensor_or_none(sparse_mla_top_k_lens, "sparse_mla_top_k_lens", q.device),
    )


def xqa_batch_decode_with_kv_cache_mla(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    out: Any = None,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """MLA decoding on our kernels; parameters as in ``trtllm_batch_decode_with_kv_cache_mla`` with backend xqa.

    Args:
        query: ``[batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]``; q_len to 16, heads to 128.
        out: ``[batch, q_len, heads, kv_lora_rank]``. The peer makes that shape for one token and takes
            ``[batch, heads, kv_lora_rank]``: both are taken here, the first is made.

    Returns:
        ``out``.
    """
    operator = "xqa_batch_decode_with_kv_cache_mla"
    rt = process_runtime()
    _check_mla_heads(qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, 0)
    given, lengths = query_of(query, 4), lengths_of(seq_lens)
    _check_query(given, lengths, kv_lora_rank + qk_rope_head_dim)
    find_backend(operator, XQA, rt.driver.device(given.device))
    return decode_latent(
        query,
        given,
        kv_cache,
        workspace_buffer,
        block_tables,
        lengths,
        max_seq_len,
        _output(out, query, given, kv_lora_rank, rt),
        runtime=rt,
        max_q_len=None,
        q_cu_seq_lens=None,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        enable_pdl=enable_pdl,
        batch_invariant=batch_invariant,
    )


def _check_query(query: TensorView, lengths: TensorView, width: int) -> None:
    if query.shape[-1] != width:
        raise UsageError(f"query: head dimension {query.shape[-1]}, expected {width}")
    if len(query.shape) == 4 and query.shape[0] != lengths.shape[0]:
        raise UsageError(f"query: batch {query.shape[0]}, seq_lens has {lengths.shape[0]}")


def _output(out: Any, query: Any, given: TensorView, latent: int, runtime: Runtime) -> Output:
    """The output for ``query`` as ``given`` views it; a caller's may lack the dimension of a single token."""
    shape = (*given.shape[:-1], latent)
    if out is not None and not is_fp4(out, None) and len(shape) == 4 and shape[1] == 1:
        view = view_of(out, "out")
        if view.shape == (shape[0], *shape[2:]):
            return Output(out, nested_tokens(view, 1), OutScales())
    return output_of(out, None, query, shape, "bfloat16", None, None, runtime)


def _check_mla_heads(nope: int, lora: int, rope: int, top_k: int) -> None:
    if nope < 1:
        raise UsageError(f"qk_nope_head_dim={nope}: expected 1 or more")
    sparse = " or (512, 0) with sparse_mla_top_k"
    if (lora, rope) not in _MLA_HEADS and not ((lora, rope) == _SPARSE_MLA_HEADS and top_k > 0):
        raise UsageError(f"kv_lora_rank={lora}, qk_rope_head_dim={rope}: expected (512, 64), (256, 64){sparse}")


def _latent_cache(kv_cache: Any) -> TensorView:
    view = view_of(kv_cache, "kv_cache")
    if len(view.shape) == 3:
        pages, tokens, width = view.shape
        strides = (view.strides[0], view.strides[0], *view.strides[1:])
        return replace(view, shape=(pages, 1, tokens, width), strides=strides)
    if len(view.shape) != 4 or view.shape[1] != 1:
        raise UsageError(f"kv_cache: shape {view.shape}, expected [pages, page_size, width] with or without a 1 behind")
    return view
