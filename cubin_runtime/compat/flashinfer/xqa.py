"""Decoding with separate semaphores and scratch: the operators of ``flashinfer.xqa``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...attention.attention_operator import default_scale
from ...attention.backends import XQA
from ...attention.checks import check_dtype
from ...attention.fast_path.notes import note_compared
from ...attention.fast_path.operator_function import operator_function
from ...attention.latent_cache import LATENTS, SEPARATE_DTYPE
from ...attention.operators.mla_decode import mla_decode
from ...attention.operators.paged_decode import paged_decode
from ...errors import UsageError
from ...tensor import TensorView, view_of
from .arguments import MEMORY, XqaArguments
from .layouts import check_layout, latent_cache, like_query, without
from .lengths import lengths_of
from .native import launch
from .scales import head_scales
from .torch_ops import torch_op
from .workspace import with_enough_semaphores

if TYPE_CHECKING:
    from ...protocols import KvLayout
    from ...tensor import Scale, Tensor

# Arguments of our operators -> those of these operators, where the names differ.
_NAMES = {
    "out": "output",
    "kv_cache": "k_cache",
    "max_q_len": "q_seq_len",
    "softmax_scale": "q_scale * kv_scale",
    "output_scale": "kv_scale * rcp_out_scale",
    "scratch": "workspace_buffer",
}


@operator_function(memory=MEMORY, op=torch_op)
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: Scale = 1.0,
    kv_scale: Scale = 1.0,
    sliding_win_size: int = 0,
    kv_layout: KvLayout = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """Decoding over a paged KV cache (GQA) into ``output``.

    Args:
        q: ``[batch, 1, q_heads, head_dim]``; with ``q_seq_len`` over 1 ``[batch, 1, q_seq_len, q_heads, head_dim]``;
            with ``q_cu_seq_lens`` ``[tokens, q_heads, head_dim]``. The 1 may be left out. bf16, fp16 or e4m3.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages, kv_heads, page_size,
            head_dim]`` (HND), any strides between rows; the dtype of q, or e4m3.
        page_table: int32 ``[batch, columns]``; its capacity is the bound on the KV lengths.
        seq_lens: uint32 or int32 ``[batch, 1]`` or ``[batch]``, KV length of each request, draft tokens included.
        output: shaped like ``q``; bf16, fp16 or e4m3.
        workspace_buffer: scratch, any dtype and contents; like ``semaphores`` contiguous and 16-byte aligned.
        semaphores: zero before first use, left so; any dtype. Work of one stream must be done with it before another
            stream's. If it is smaller than native kernels need, memory of the runtime replaces it from then on.
        num_kv_heads, page_size: must match ``k_cache``.
        sinks: float32 ``[kv_heads, group]`` or ``[q_heads]``.
        q_scale, kv_scale: each a number or a float32 scalar on the device. Scores are multiplied by
            q_scale * kv_scale / sqrt(head_dim), the output by kv_scale (for 16-bit caches too, where FlashInfer drops
            it). Two tensors are multiplied by a launch of their own.
        sliding_win_size: keys that a query token sees, its own included; 0: all.
        sm_count: None, or the number of SMs of the device.
        enable_pdl: programmatic dependent launch; None: on where the device supports it.
        rcp_out_scale: scale of an e4m3 ``output``.
        q_seq_len: query tokens of each request; with ``q_cu_seq_lens`` their bound.
        mask: as ``cubin_runtime.draft_mask`` makes it: uint16 ``[batch, q_seq_len, 2 * words]`` or ``[tokens, 2 *
            words]``, words = ceil(q_seq_len / 32); None: causal.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, cumulative query lengths.
        k_sf_cache, v_sf_cache: refused: there are no native FP4 kernels.
        batch_invariant: make a request's bits independent of other requests and of all bounds.
    """
    call = XqaArguments(
        operator=xqa,
        query=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        output=output,
        workspace_buffer=workspace_buffer,
        semaphores=semaphores,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        sinks=sinks,
        q_scale=q_scale,
        kv_scale=kv_scale,
        sliding_win_size=sliding_win_size,
        kv_layout=kv_layout,
        sm_count=sm_count,
        enable_pdl=enable_pdl,
        rcp_out_scale=rcp_out_scale,
        q_seq_len=q_seq_len,
        mask=mask,
        q_cu_seq_lens=q_cu_seq_lens,
        k_sf_cache=k_sf_cache,
        v_sf_cache=v_sf_cache,
        batch_invariant=batch_invariant,
    )
    call.refuse("k_sf_cache", "v_sf_cache")
    query = view_of(q, "q")
    _check_multiprocessors(call, query.device)
    keys = view_of(k_cache, "k_cache")
    _check_cache(call, keys)
    if not 0 <= call.sliding_win_size <= 1 << 31:
        raise UsageError(
            "expected 0 (none) or more, at most 2^31", argument="sliding_win_size", value=call.sliding_win_size
        )
    out, table = view_of(output, "output", written=True), view_of(page_table, "page_table")
    if out.shape != query.shape:
        raise UsageError(f"shape {out.shape}, expected {query.shape}", argument="output")
    _check_table(table)
    lengths, ragged = lengths_of(seq_lens), q_cu_seq_lens is not None
    requests, results = (
        _by_request(view, name, call.q_seq_len, ragged) for view, name in ((query, "q"), (out, "output"))
    )
    _launch(
        paged_decode,
        call,
        _NAMES,
        (requests, keys, v_cache, table, lengths),
        results,
        scores_factor=default_scale(query.shape),
        tokens=lengths.shape[0] * call.q_seq_len,
        max_seq_len=table.shape[1] * call.page_size,
        kv_layout=call.kv_layout,
        q_cu_seq_lens=q_cu_seq_lens,
        max_q_len=call.q_seq_len if ragged else None,
        mask=mask,
        window_left=call.sliding_win_size - 1,
        draft_position="index",
    )


@operator_function(memory=MEMORY, op=torch_op)
def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    page_size: int,
    q_scale: Scale = 1.0,
    kv_scale: Scale = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """MLA decoding of one token per request over a paged latent cache into ``output``; other parameters as in ``xqa``.

    On SM120 and SM121 too: with a warning, as these kernels were not run, and with queries and caches of e4m3 alone.

    Args:
        q: ``[batch, 1, heads, columns]`` or without the 1, with columns and heads as for ``mla_decode``; bf16, or e4m3
            with an e4m3 cache.
        k_cache: ``[pages, page_size, columns]``, or with a dimension of 1 head before or after page_size; bf16 or
            e4m3.
        v_cache: the same memory, whole or its first latent columns; or other memory of the same shape, of which the
            first latent columns are read, with 576 columns, e4m3 and e4m3 queries on compute capability 9.0.
        output: ``[batch, 1, heads, latent]`` or without the 1; bf16, fp16 or e4m3.
        page_size: must match ``k_cache``: a power of two from 16 to 1024.
        q_scale, kv_scale: each a number or a float32 scalar on the device. Scores are multiplied by
            q_scale * kv_scale, the output by kv_scale. In contrast to ``xqa``, ``q_scale`` has to include the softmax
            scale, 1 / sqrt(head_dim before the projection).
    """
    call = XqaArguments(
        operator=xqa_mla,
        query=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        output=output,
        workspace_buffer=workspace_buffer,
        semaphores=semaphores,
        page_size=page_size,
        q_scale=q_scale,
        kv_scale=kv_scale,
        sm_count=sm_count,
        enable_pdl=enable_pdl,
        batch_invariant=batch_invariant,
    )
    query, out, table = view_of(q, "q"), view_of(output, "output", written=True), view_of(page_table, "page_table")
    _check_multiprocessors(call, query.device)
    cache, values = _latent_caches(view_of(k_cache, "k_cache"), view_of(v_cache, "v_cache"), call.page_size)
    if len(query.shape) == 4 and query.shape[1] == 1:
        query = without(query, 1)
    if len(query.shape) != 3:
        raise UsageError(f"shape {query.shape}, expected [batch, 1, heads, columns]", argument="q")
    _check_table(table)
    lengths = lengths_of(seq_lens)
    check_dtype("output", out, ("bfloat16", "float16", "float8_e4m3fn"))
    _launch(
        mla_decode,
        call,
        {**_NAMES, "output_scale": "kv_scale"},
        (query, cache, table, lengths),
        out,
        tokens=lengths.shape[0],
        max_seq_len=table.shape[1] * call.page_size,
        v_cache=values,
    )


def _launch(
    decode: Callable[..., Any],
    call: XqaArguments,
    names: Mapping[str, str],
    tensors: tuple[Any, ...],
    out: TensorView,
    *,
    tokens: int,
    scores_factor: float = 1.0,
    **options: Any,
) -> None:
    """``native.launch`` with these operators' scales and workspace; ``tokens`` is a bound on the query tokens.

    Scores are multiplied by ``scores_factor`` besides the caller's scales.
    """
    q = tensors[0]
    call.backend_on(q.device, XQA)
    softmax_scale, output_scale = head_scales(call, q, out, scores_factor)
    workspace = with_enough_semaphores(call, tokens * q.shape[-2], q.device)
    out = like_query(q, out, "output", 1)
    launch(
        decode,
        call,
        names,
        tensors,
        out=out,
        workspace=workspace,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        batch_invariant=call.batch_invariant,
        **options,
    )


def _check_multiprocessors(call: XqaArguments, device: int) -> None:
    has = call.runtime.driver.device(device).multiprocessors
    if call.sm_count not in (None, has):
        raise UsageError(
            f"the device has {has}, and kernels here run on all of them", argument="sm_count", value=call.sm_count
        )


def _check_cache(call: XqaArguments, cache: TensorView) -> None:
    kv_layout = call.kv_layout
    check_layout(kv_layout)
    if len(cache.shape) != 4:
        raise UsageError(f"shape {cache.shape}, expected 4 dimensions in layout {kv_layout}", argument="k_cache")
    tokens, heads = cache.shape[1:3] if kv_layout == "NHD" else cache.shape[2:0:-1]
    for name, stated, has in (("num_kv_heads", call.num_kv_heads, heads), ("page_size", call.page_size, tokens)):
        if stated != has:
            raise UsageError(f"k_cache has {has} in layout {kv_layout}", argument=name, value=stated)


def _check_table(table: TensorView) -> None:
    if len(table.shape) != 2:
        raise UsageError(f"shape {table.shape}, expected [batch, columns]", argument="page_table")


def _by_request(view: TensorView, name: str, q_len: int, ragged: bool) -> TensorView:
    """``view`` without its beam dimension: ``[batch, heads, head_dim]``, ``[batch, q_len, ...]`` or ragged tokens."""
    rank = len(view.shape)
    if q_len < 1:
        raise UsageError("expected 1 or more", argument="q_seq_len", value=q_len)
    if ragged:
        form, fits = "[tokens, heads, head_dim]", rank == 3
    elif q_len == 1:
        form, fits = "[batch, 1, heads, head_dim]", rank in (3, 4, 5) and set(view.shape[1 : rank - 2]) <= {1}
    else:
        form = f"[batch, 1, {q_len}, heads, head_dim]"
        fits = rank in (4, 5) and view.shape[1 : rank - 2] in ((q_len,), (1, q_len))
    if not fits:
        raise UsageError(f"shape {view.shape}, expected {form}", argument=name)
    axes = 4 if q_len > 1 and not ragged else 3
    while len(view.shape) > axes:
        view = without(view, 1)
    return view


def _latent_caches(keys: TensorView, values: TensorView, page_size: int) -> tuple[TensorView, TensorView | None]:
    """The latent cache, and the values unless they are its first columns."""
    keys, values = _without_head(keys, page_size), _without_head(values, page_size)
    cache = latent_cache(keys, "k_cache")
    if cache.shape[2] != page_size:
        raise UsageError(f"k_cache has {cache.shape[2]}", argument="page_size", value=page_size)
    note_compared(values.pointer, keys.pointer)
    same = (values.pointer, values.dtype, values.device) == (keys.pointer, keys.dtype, keys.device)
    same = same and values.strides == keys.strides and values.shape[:-1] == keys.shape[:-1]
    latent = LATENTS.get(keys.shape[-1], 0)
    if values.shape[-1:] not in ((keys.shape[-1],), (latent,)):
        raise UsageError(
            f"shape {values.shape}, expected {keys.shape[-1]} columns, like k_cache, or its latent ones",
            argument="v_cache",
        )
    if not same and keys.dtype != SEPARATE_DTYPE:
        raise UsageError(
            "other memory than k_cache, expected the same latent cache or its first columns unless both are "
            f"{SEPARATE_DTYPE}",
            argument="v_cache",
        )
    return cache, None if same else replace(values, shape=(*values.shape[:-1], latent))


def _without_head(view: TensorView, page_size: int) -> TensorView:
    if len(view.shape) == 4 and view.shape[2] == 1 and view.shape[1] == page_size:
        return without(view, 2)
    return without(view, 1) if len(view.shape) == 4 and view.shape[1] == 1 else view
