"""MLA decoding under FlashInfer's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention.trtllm_gen import DecodeCall
from ..attention.views import TensorView, view_of
from ..errors import UsageError
from .arguments import batch_of, flat_tokens, process_runtime, query_of, refuse, tensor_or_none
from .calls import query_lengths, run_published
from .outputs import output_of

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
    lengths = view_of(seq_lens, "seq_lens")
    batch = batch_of(lengths)
    q_len = given.shape[1] if cum_seq_lens_q is None else None
    if q_len is not None and given.shape[0] != batch:
        raise UsageError(f"query: batch {given.shape[0]}, seq_lens has {batch}")
    max_q, cum_q = query_lengths(q_len, max_q_len, cum_seq_lens_q, batch, q.shape[0], rt)
    key = _latent_cache(kv_cache)
    return run_published(
        DecodeCall,
        query,
        output_of(out, None, query, (*given.shape[:-1], kv_lora_rank), "bfloat16", None, None, rt),
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
        backend=backend,
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
