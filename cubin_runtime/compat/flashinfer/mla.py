"""MLA decoding over a paged latent cache: the operators of ``flashinfer.mla``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...attention.backends import XQA
from ...attention.checks import listed
from ...attention.fast_path.operator_function import operator_function
from ...attention.operators.mla_decode import mla_decode
from ...attention.trtllm_gen import DecodeCall
from ...attention.trtllm_gen.checks import check_vector
from ...errors import UsageError
from ...kernels.native.mla.select import COLUMNS
from ...tensor import TensorView, view_of
from .arguments import MEMORY, SCALES, MlaArguments, TrtllmMlaArguments, query_of, tensor_or_none
from .layouts import flat_tokens, latent_cache, nested_tokens, without
from .lengths import batch_of, lengths_of, query_lengths
from .native import check_skip_factor, decode_batch, page_table_of
from .outputs import Output, is_fp4, output_of
from .sparse_mla import decode_lists
from .torch_ops import torch_op
from .trtllm_gen import MLA_NAMES, pages, run_call

if TYPE_CHECKING:
    from ...protocols import CompatBackend
    from ...tensor import Scale, Tensor

# kv_lora_rank, qk_rope_head_dim: of trtllm-gen kernels, without lists and with them.
_HEAD_DIMS = ((512, 64), (256, 64))
_SPARSE_HEAD_DIMS = (*_HEAD_DIMS, (512, 0))
_LSE_BASES = ("basee", "base2")
# Page sizes of FlashInfer's trtllm-gen kernels, with an LSE in base 2; heads of its CuTe DSL kernel, in base e.
_BASE_2_PAGES = (32, 64)
_BASE_E_HEADS = range(65, 128)


def _output_shape(call: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of an output for a call's arguments."""
    return (*call["query"].shape[:-1], call["kv_lora_rank"])


@operator_function(scales=SCALES, memory=MEMORY, op=partial(torch_op, shape=_output_shape, dtype="bfloat16"))
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: CompatBackend = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Any = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """MLA decoding over a paged latent cache; other parameters as in ``trtllm_batch_decode_with_kv_cache``.

    On SM120 and SM121, "auto" is xqa as in FlashInfer. Its kernels there were built but not run, of which a warning
    tells; they take queries and caches of e4m3 alone.

    With ``sparse_mla_top_k``, backend xqa is ``cubin_runtime.attention.sparse_mla_decode``, on compute capability 9.0.
    A list's entry is a slot, ``page * page_size + offset``; negative ones are holes. Of each list count the entries
    within its query token's keys, as in FlashInfer.

    Args:
        query: ``[batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]``, or ``[tokens, heads, ...]`` with
            ``cum_seq_lens_q``; bf16 or e4m3 (xqa: only with an e4m3 cache).
        kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]`` or ``[pages, 1, page_size, ...]``; bf16 or
            e4m3; xqa: page_size a power of two from 16 to 1024. Sparse MLA on xqa: queries of bf16, and caches of bf16
            or of rows of 656 bytes (uint8 or e4m3), in pages of any size, as ``sparse_mla_decode`` takes them.
        qk_nope_head_dim: head dimension of the model without rope, 1 or more; only ``bmm1_scale`` depends on it.
        kv_lora_rank, qk_rope_head_dim: (512, 64) or (256, 64); xqa: also (512, 0), (256, 32) or (128, 32); sparse MLA:
            (512, 64) or (512, 0).
        block_tables: int32 ``[batch, columns]``, any number of columns; sparse MLA: ``[batch, q_len,
            sparse_mla_top_k]`` slots, xqa: with ``cum_seq_lens_q`` ``[tokens, sparse_mla_top_k]``.
        seq_lens: int32 ``[batch]``, keys of each request, those of its query tokens included. Sparse MLA on xqa also
            takes ``[batch, q_len]`` or ``[tokens]``, how many entries of its list each query token has: more than the
            list are all. Of rows of 656 bytes, with several query tokens per request, it takes nothing else but None:
            all entries of each list count, or as many as ``sparse_mla_top_k_lens`` says.
        max_seq_len: bound on ``seq_lens``; sparse MLA on xqa does not depend on it.
        sparse_mla_top_k: entries of a list, one for each query token; 0: there are no lists. trtllm-gen: a multiple of
            4; xqa: 1 to 32,768.
        out: ``[batch, q_len, heads, kv_lora_rank]`` (``[tokens, heads, kv_lora_rank]``), with one token per request
            also ``[batch, heads, kv_lora_rank]``; None: bf16 of the first shape, allocated here.
        is_var_seq: a hint, unused.
        cum_seq_lens_q: int32 ``[batch + 1]``, cumulative query lengths; a request may have none.
        skip_softmax_threshold_scale_factor: as in ``trtllm_batch_decode_with_kv_cache``, but sparse MLA refuses it, and
            trtllm-gen with ``cum_seq_lens_q``.
        uses_shared_paged_kv_idx: False: ``block_tables`` has K's and V's, ``[batch, 2, columns]``; xqa: V lies in K.
            Sparse MLA on xqa refuses it.
        sparse_mla_top_k_lens: int32 ``[tokens]``, how many entries of its list a query token has; ``seq_lens`` then
            does not count. None: as ``seq_lens`` says.
        return_lse_base: "base2" or "basee", the base of ``lse``; "basee" needs a torch tensor, and multiplies it by a
            launch of its own. None: that of the kernel which FlashInfer has for the call: base e with ``enable_dcp`` or
            ``cum_seq_lens_q``, with 65 to 127 heads, and with pages of other than 32 or 64 tokens, else base 2. Sparse
            MLA on xqa: None is base 2, and base e costs nothing.
        enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: xqa: key i of all ranks is on rank i modulo
            ``cp_world``; int32 ``[batch]``, keys of each request on all ranks, those of its query tokens included.
        kv_scale_format: refused unless "auto"; sparse MLA over rows of 656 bytes: also "pow2_fp32" and
            "arbitrary_fp32", which change nothing, as any scales are taken.
        cute_dsl_impl, use_fp16_softmax: refused unless at their defaults.

    Returns:
        ``out``, or (``out``, ``lse``); lse is float32 ``[tokens, heads]``, or the caller's, which may also have
        ``[batch, q_len, heads]``.
    """
    call = TrtllmMlaArguments(
        operator=trtllm_batch_decode_with_kv_cache_mla,
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        qk_nope_head_dim=qk_nope_head_dim,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        sparse_mla_top_k=sparse_mla_top_k,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        enable_pdl=enable_pdl,
        backend=backend,
        is_var_seq=is_var_seq,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        lse=lse,
        return_lse=return_lse,
        cute_dsl_impl=cute_dsl_impl,
        kv_scale_format=kv_scale_format,
        cum_seq_lens_q=cum_seq_lens_q,
        max_q_len=max_q_len,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        sparse_mla_top_k_lens=sparse_mla_top_k_lens,
        enable_dcp=enable_dcp,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        use_fp16_softmax=use_fp16_softmax,
        return_lse_base=return_lse_base,
        batch_invariant=batch_invariant,
    )
    call.refuse("cute_dsl_impl", "use_fp16_softmax")
    if not call.enable_dcp:
        call.refuse("cp_world", "cp_rank", "causal_seqlens_kv_global")
    elif causal_seqlens_kv_global is None:
        raise UsageError("None with enable_dcp, expected the lengths on all ranks", argument="causal_seqlens_kv_global")
    _check_lse_base(call)
    nested = cum_seq_lens_q is None
    by_request = query_of(query, 4 if nested else 3)
    q = flat_tokens(by_request, "query") if nested else by_request
    name = call.backend_on(q.device, call.backend)
    _check_head_dims(call, name)
    _check_width(call, by_request)
    if name == XQA and call.sparse_mla_top_k > 0:
        return decode_lists(call, by_request, _output(call, by_request))
    call.refuse("kv_scale_format")
    if seq_lens is None:
        raise UsageError("None, expected lengths: only lists on backend xqa have none", argument="seq_lens")
    lengths = view_of(seq_lens, "seq_lens")
    batch = batch_of(lengths)
    _check_batch(by_request, lengths)
    max_q, cum_q = query_lengths(call, by_request.shape[1] if nested else None, batch, q)
    if name == XQA:
        if call.sparse_mla_top_k < 0:
            raise UsageError("expected 0 (off) or more", argument="sparse_mla_top_k", value=call.sparse_mla_top_k)
        if sparse_mla_top_k_lens is not None:
            raise UsageError("sparse_mla_top_k_lens without sparse_mla_top_k: nothing is sparse")
        check_skip_factor(call)
        dealing: dict[str, Any] = {}
        if call.enable_dcp:
            named = view_of(causal_seqlens_kv_global, "causal_seqlens_kv_global")
            check_vector("causal_seqlens_kv_global", named, batch, "int32", q.device)
            if (call.cp_world, call.cp_rank) != (1, 0):  # that rank has all keys
                dealing = {"global_seq_lens": named, "cp_world": call.cp_world, "cp_rank": call.cp_rank}
        bound = None if nested else max_q
        return _decode_native(call, by_request, lengths, bound, cum_q, **dealing)
    call.refuse("enable_dcp", backend=name)
    cache = latent_cache(kv_cache)
    return run_call(
        DecodeCall,
        call,
        q,
        _output(call, by_request),
        backend=name,
        names=MLA_NAMES,
        seq_lens=lengths,
        max_q=max_q,
        max_kv=call.max_seq_len,
        cum_seq_lens_q=cum_q,
        natural_lse=_has_natural_lse(call, q.shape[1], cache.shape[2]),
        **pages(call, cache, cache),
        top_k=call.sparse_mla_top_k,
        top_k_lens=tensor_or_none(sparse_mla_top_k_lens, "sparse_mla_top_k_lens", q.device),
    )


trtllm_prefill_with_kv_cache_mla = trtllm_batch_decode_with_kv_cache_mla  # FlashInfer has both names for one function


@operator_function(scales=SCALES, memory=MEMORY, op=partial(torch_op, shape=_output_shape, dtype="bfloat16"))
def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """MLA decoding on native kernels; parameters as in ``trtllm_batch_decode_with_kv_cache_mla`` with backend xqa.

    On SM120 and SM121 too: with a warning, as these kernels were not run, and with queries and caches of e4m3 alone.

    Args:
        query: ``[batch, q_len, heads, kv_lora_rank + qk_rope_head_dim]``; q_len up to 16, up to 128 heads.
        bmm1_scale, bmm2_scale: scales of scores and output. FlashInfer's SM120 kernel multiplies the scores by
            bmm1_scale * bmm2_scale; here, as in trtllm-gen kernels, ``bmm2_scale`` is a factor of the output alone.
        out: ``[batch, q_len, heads, kv_lora_rank]``. With one token per request, FlashInfer allocates that shape but
            accepts only ``[batch, heads, kv_lora_rank]``; both are accepted here.

    Returns:
        ``out``.
    """
    call = MlaArguments(
        operator=xqa_batch_decode_with_kv_cache_mla,
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        qk_nope_head_dim=qk_nope_head_dim,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        out=out,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        sinks=sinks,
        enable_pdl=enable_pdl,
        batch_invariant=batch_invariant,
    )
    _check_head_dims(call, XQA)
    q, lengths = query_of(query, 4), lengths_of(seq_lens)
    _check_width(call, q)
    _check_batch(q, lengths)
    call.backend_on(q.device, XQA)
    return _decode_native(call, q, lengths)


def _decode_native(
    call: MlaArguments,
    q: TensorView,
    lengths: TensorView,
    max_q_len: int | None = None,
    q_cu_seq_lens: TensorView | None = None,
    **dealing: Any,
) -> Any:
    output, cache, table = _output(call, q), latent_cache(call.kv_cache), page_table_of(call)
    return decode_batch(
        mla_decode,
        call,
        {"q_cu_seq_lens": "cum_seq_lens_q", "global_seq_lens": "causal_seqlens_kv_global"},
        q,
        (cache,),
        table if call.uses_shared_paged_kv_idx else without(table, 1),  # values lie in their keys
        lengths,
        output,
        page_size=cache.shape[2],
        natural_lse=_has_natural_lse(call, q.shape[-2], cache.shape[2]),
        max_q_len=max_q_len,
        q_cu_seq_lens=q_cu_seq_lens,
        **dealing,
    )


def _check_lse_base(call: MlaArguments) -> None:
    base = call.return_lse_base
    if base is not None and base not in _LSE_BASES:
        raise UsageError(
            f"expected None, {' or '.join(map(repr, _LSE_BASES))}", argument="return_lse_base", value=repr(base)
        )


def _has_natural_lse(call: MlaArguments, heads: int, page_size: int) -> bool:
    """Return whether the LSE leaves in base e."""
    if call.return_lse_base is not None:
        return call.return_lse_base == "basee"
    of_cute_dsl = heads in _BASE_E_HEADS or page_size not in _BASE_2_PAGES
    return call.enable_dcp or call.cum_seq_lens_q is not None or of_cute_dsl


def _check_head_dims(call: MlaArguments, backend: str) -> None:
    lora, rope = call.kv_lora_rank, call.qk_rope_head_dim
    if call.qk_nope_head_dim < 1:
        raise UsageError("expected 1 or more", argument="qk_nope_head_dim", value=call.qk_nope_head_dim)
    lists = call.sparse_mla_top_k > 0
    expected = _SPARSE_HEAD_DIMS if lists else COLUMNS if backend == XQA else _HEAD_DIMS
    if (lora, rope) not in expected:
        where = f"on backend {backend}{' with sparse_mla_top_k' if lists else ''}"
        raise UsageError(f"kv_lora_rank={lora}, qk_rope_head_dim={rope}: expected {listed(expected)} {where}")


def _check_width(call: MlaArguments, query: TensorView) -> None:
    width = call.kv_lora_rank + call.qk_rope_head_dim
    if query.shape[-1] != width:
        raise UsageError(f"head dimension {query.shape[-1]}, expected {width}", argument="query")


def _check_batch(query: TensorView, lengths: TensorView) -> None:
    if len(query.shape) == 4 and query.shape[0] != lengths.shape[0]:
        raise UsageError(f"batch {query.shape[0]}, seq_lens has {lengths.shape[0]}", argument="query")


def _output(call: MlaArguments, q: TensorView) -> Output:
    """The output for ``q``; with one token per request, a caller's may lack the dimension of tokens."""
    out: Any = call.out
    shape = (*q.shape[:-1], call.kv_lora_rank)
    if out is not None and not is_fp4(call) and len(shape) == 4 and shape[1] == 1:
        view = view_of(out, "out", written=True)
        if view.shape == (shape[0], *shape[2:]):
            return Output(out, nested_tokens(view, shape[0], 1))
    return output_of(call, shape, "bfloat16")
