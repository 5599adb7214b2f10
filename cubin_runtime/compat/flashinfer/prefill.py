"""Prefill over pages and over ragged keys: the operators of ``flashinfer.prefill``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...attention.backends import NATIVE
from ...attention.checks import integer, shown
from ...attention.fast_path.operator_function import operator_function
from ...attention.trtllm_gen import ContextCall, RaggedCall, Sage
from ...dtypes import ITEM_BYTES
from ...errors import UsageError
from ...tensor import view_of
from .arguments import MEMORY, SCALES, ContextArguments, FP4Output, RaggedArguments, query_of, tensor_or_none
from .context import attend_paged, attend_ragged, context_backend
from .layouts import cache_pair_by_head
from .lengths import check_batch, check_none_empty, lengths_of
from .outputs import output_of
from .torch_ops import torch_op
from .trtllm_gen import pages, run_call

if TYPE_CHECKING:
    from ...protocols import CompatContextBackend, KvLayout
    from ...tensor import Scale, Tensor

_DTYPE_OF_BYTES = "bfloat16"  # of ragged attention's outputs for queries of 8 bits


def _ragged_shape(call: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an output for a call's arguments."""
    return (*call["query"].shape[:2], call["value"].shape[-1])


@operator_function(scales=SCALES, bound="max_kv_len", memory=MEMORY, op=torch_op)
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | Sequence[Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | FP4Output | None = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: KvLayout = "HND",
    enable_pdl: bool | None = None,
    sinks: Tensor | None = None,
    kv_cache_sf: Tensor | Sequence[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: CompatContextBackend = "trtllm-gen",
    window_right: int = -1,
    variable_window_token_starts: Tensor | None = None,
    variable_window_token_ends: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Prefill over a paged KV cache; other parameters as in ``trtllm_batch_decode_with_kv_cache``.

    Args:
        query: ``[tokens, q_heads, head_dim]``, the tokens of all requests in order.
        max_q_len, max_kv_len: bounds on the query and KV lengths.
        batch_size: must match ``seq_lens``.
        cum_seq_lens_q, cum_seq_lens_kv: int32 ``[batch + 1]``, cumulative query and KV lengths.
        workspace_buffer: scratch of any contents.
        causal: causal mask, aligned to the last key; trtllm-gen: without it there is no window.
        multi_ctas_kv_counter_buffer: unused.
        use_fp16_softmax, uses_spcompress: refused: they are for other GPUs.
        backend: "trtllm-gen" or "auto": the backend that supports the device, native kernels on Hopper; "native".
        window_right: native: keys after its own that a query token sees without ``causal``; -1: all. With ``causal``
            -1 or 0, for trtllm-gen nothing else.
        variable_window_token_starts, variable_window_token_ends: refused.

    Returns:
        ``out``, or (``out``, ``lse``).
    """
    call = ContextArguments(
        operator=trtllm_batch_context_with_kv_cache,
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        batch_size=batch_size,
        cum_seq_lens_q=cum_seq_lens_q,
        cum_seq_lens_kv=cum_seq_lens_kv,
        window_left=window_left,
        out=out,
        out_dtype=out_dtype,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        sinks=sinks,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        causal=causal,
        lse=lse,
        return_lse=return_lse,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        backend=backend,
        window_right=window_right,
        variable_window_token_starts=variable_window_token_starts,
        variable_window_token_ends=variable_window_token_ends,
        batch_invariant=batch_invariant,
    )
    call.refuse("use_fp16_softmax", "uses_spcompress", "variable_window_token_starts", "variable_window_token_ends")
    q, lengths = query_of(query, 3), lengths_of(seq_lens)
    check_batch(call.batch_size, lengths)
    name = context_backend(call, q.device)
    if name == NATIVE:
        return attend_paged(call, q, lengths)
    if not (call.causal and call.window_right == 0):
        call.refuse("window_right", backend=name)
    key, value = cache_pair_by_head(kv_cache, call.kv_layout)
    return run_call(
        ContextCall,
        call,
        q,
        output_of(call, q.shape, q.dtype),
        backend=name,
        seq_lens=lengths,
        max_q=call.max_q_len,
        max_kv=call.max_kv_len,
        cum_seq_lens_q=view_of(cum_seq_lens_q, "cum_seq_lens_q"),
        **pages(call, key, value),
        cum_seq_lens_kv=view_of(cum_seq_lens_kv, "cum_seq_lens_kv"),
        causal=call.causal,
    )


@operator_function(
    scales=SCALES,
    bound="max_kv_len",
    memory=MEMORY,
    contents=("q_seq_lens_cpu", "kv_seq_lens_cpu"),
    op=partial(torch_op, shape=_ragged_shape, dtype_of_bytes=_DTYPE_OF_BYTES),
)
def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Any, Any, Any, Any] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: CompatContextBackend = "trtllm-gen",
    q_seq_lens_cpu: Any = None,
    kv_seq_lens_cpu: Any = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Prefill over contiguous, ragged K and V; other parameters as in ``trtllm_batch_decode_with_kv_cache``.

    Args:
        query: ``[tokens, heads, head_dim]``, contiguous.
        key, value: ``[kv_tokens, kv_heads, head_dim]``; head dimensions (of Q and K, of V) (192, 128), (128, 128) or
            (256, 256); native: also (64, 64).
        workspace_buffer: scratch of any contents.
        o_sf_scale: trtllm-gen: passed to the kernel; -1 if unused. native: unused.
        window_left: trtllm-gen: needs ``is_causal``.
        out: ``[tokens, heads, head_dim of V]``; None: allocated here, bf16 for 8-bit queries, else the query's dtype.
        sage_attn_sfs, num_elts_per_sage_attn_blk: trtllm-gen: SageAttention scales of Q, K, P and V; elements that
            share a scale.
        backend: as in ``trtllm_batch_context_with_kv_cache``.
        q_seq_lens_cpu, kv_seq_lens_cpu: lengths known on the host; unused by native kernels, which take requests
            without query tokens or keys. No trtllm-gen kernel does: one that is listed here is refused.
        use_fp16_softmax, uses_spcompress: refused: they are for other GPUs.
        skip_all_rows_active_check: trtllm-gen: False needs the lengths on the host, as nothing is read back.

    Returns:
        ``out``, or (``out``, ``lse``).
    """
    call = RaggedArguments(
        operator=trtllm_ragged_attention_deepseek,
        query=query,
        key=key,
        value=value,
        workspace_buffer=workspace_buffer,
        seq_lens=seq_lens,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        o_sf_scale=o_sf_scale,
        batch_size=batch_size,
        window_left=window_left,
        cum_seq_lens_q=cum_seq_lens_q,
        cum_seq_lens_kv=cum_seq_lens_kv,
        enable_pdl=enable_pdl,
        is_causal=is_causal,
        return_lse=return_lse,
        sinks=attention_sinks,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        out=out,
        lse=lse,
        sage_attn_sfs=sage_attn_sfs,
        num_elts_per_sage_attn_blk=num_elts_per_sage_attn_blk,
        backend=backend,
        q_seq_lens_cpu=q_seq_lens_cpu,
        kv_seq_lens_cpu=kv_seq_lens_cpu,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
        skip_all_rows_active_check=skip_all_rows_active_check,
        batch_invariant=batch_invariant,
    )
    call.refuse("use_fp16_softmax", "uses_spcompress")
    q, lengths, v = query_of(query, 3), lengths_of(seq_lens), view_of(value, "value")
    if len(v.shape) != 3:
        raise UsageError(f"shape {v.shape}, expected 3 dimensions", argument="value")
    check_batch(call.batch_size, lengths)
    name = context_backend(call, q.device)
    _check_quadruple("sage_attn_sfs", sage_attn_sfs)
    _check_quadruple("num_elts_per_sage_attn_blk", num_elts_per_sage_attn_blk)
    if name == NATIVE:
        if any(scale is not None for scale in sage_attn_sfs):
            raise UsageError(
                f"given, expected None: backend {name!r} has no kernel for SageAttention", argument="sage_attn_sfs"
            )
        return attend_ragged(call, (q, view_of(key, "key"), v), lengths)
    check_none_empty("q_seq_lens_cpu", q_seq_lens_cpu)
    check_none_empty("kv_seq_lens_cpu", kv_seq_lens_cpu)
    if not call.skip_all_rows_active_check and (q_seq_lens_cpu is None or kv_seq_lens_cpu is None):
        raise UsageError(
            "skip_all_rows_active_check=False: expected q_seq_lens_cpu and kv_seq_lens_cpu, as nothing is read back"
        )
    if call.window_left >= 0 and not call.is_causal:
        raise UsageError(f"window_left={call.window_left} without is_causal: dense attention has no window")
    default = q.dtype if ITEM_BYTES[q.dtype] > 1 else _DTYPE_OF_BYTES
    sage = (tensor_or_none(scale, f"sage_attn_sfs[{place}]", q.device) for place, scale in enumerate(sage_attn_sfs))
    blocks = (integer("num_elts_per_sage_attn_blk", block) for block in num_elts_per_sage_attn_blk)
    return run_call(
        RaggedCall,
        call,
        q,
        output_of(call, (*q.shape[:2], v.shape[-1]), default),
        backend=name,
        names={"sinks": "attention_sinks"},
        seq_lens=lengths,
        max_q=call.max_q_len,
        max_kv=call.max_kv_len,
        cum_seq_lens_q=view_of(cum_seq_lens_q, "cum_seq_lens_q"),
        key=view_of(key, "key"),
        value=v,
        cum_seq_lens_kv=view_of(cum_seq_lens_kv, "cum_seq_lens_kv"),
        causal=call.is_causal,
        sage=Sage(tuple(sage), tuple(blocks)),  # type: ignore[arg-type]
        out_scale=call.o_sf_scale,
    )


def _check_quadruple(name: str, values: Any) -> None:
    """Raise ``UsageError`` unless there is a value for each of Q, K, P and V."""
    if not isinstance(values, (tuple, list)) or len(values) != 4:
        raise UsageError("expected a value for each of Q, K, P and V", argument=name, value=shown(values))
