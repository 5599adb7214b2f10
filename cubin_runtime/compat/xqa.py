"""FlashInfer's XQA operators on our own paged decode."""

from __future__ import annotations

import math
from typing import Any

from ..attention.backends import XQA, find_backend
from ..attention.checks import integer
from ..attention.paged_cache import LAYOUTS
from ..attention.runtime import Runtime
from ..attention.scales import ScaleProduct
from ..errors import UsageError
from ..tensor import TensorView, view_of
from .arguments import process_runtime, refuse, without
from .outputs import E4M3
from .pages import (
    decode_batch,
    launch,
    lengths_of,
    memory_of,
    scratch_of,
)
from .scales import factor_of, times
from .semaphores import with_enough_semaphores

# What ``xqa`` calls the arguments of ``paged_decode``, where it calls them otherwise.
NAMES = {
    "out": "output",
    "max_q_len": "q_seq_len",
    "softmax_scale": "q_scale * kv_scale",
    "output_scale": "kv_scale * rcp_out_scale",
    "scratch": "workspace_buffer",
}


def xqa(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    output: Any,
    workspace_buffer: Any,
    semaphores: Any,
    num_kv_heads: int,
    page_size: int,
    sinks: Any = None,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Any = None,
    *,
    q_cu_seq_lens: Any = None,
    k_sf_cache: Any = None,
    v_sf_cache: Any = None,
    batch_invariant: bool = False,
) -> None:
    """Decoding over a paged KV cache (GQA) into ``output``.

    Args:
        q: ``[batch, 1, q_heads, head_dim]``, with ``q_seq_len`` over 1 ``[batch, 1, q_seq_len, q_heads, head_dim]``,
            with ``q_cu_seq_lens`` ``[tokens, q_heads, head_dim]``; the 1 may be left out. bf16, fp16 or e4m3.
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages, kv_heads, page_size,
            head_dim]`` (HND), any strides between rows; q's dtype or e4m3.
        page_table: int32 ``[batch, columns]``; its columns are the bound on the lengths.
        seq_lens: uint32 or int32 ``[batch, 1]`` or ``[batch]``, keys of each request, its drafts among them.
        output: like ``q``; bf16, fp16 or e4m3.
        workspace_buffer: scratch, any dtype and contents; like ``semaphores`` contiguous and 16-byte aligned.
        semaphores: zero on first use, left so; any dtype. A stream's work must be done with it before another's.
            Where it is smaller than our kernels need, memory of our own goes with it from then on.
        num_kv_heads, page_size: as ``k_cache`` has them.
        sinks: float32 ``[kv_heads, group]`` or ``[q_heads]``.
        q_scale, kv_scale: numbers, or one float32 on the device. Scores are multiplied by
            q_scale * kv_scale / sqrt(head_dim), the output by kv_scale (16-bit caches too, where the peer drops it).
            Two tensors are multiplied by a launch of their own.
        sliding_win_size: keys that a query sees, its own among them; 0: all.
        sm_count: None, or the device's.
        enable_pdl: None: on where the device has it.
        rcp_out_scale: factor of an e4m3 ``output``.
        q_seq_len: query tokens of a request; with ``q_cu_seq_lens`` their bound.
        mask: uint16 ``[batch, q_seq_len, 2]`` or ``[tokens, 2]`` (``cubin_runtime.launch.mask``); None: causal.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, running sum of query tokens.
        k_sf_cache, v_sf_cache: refused: there are no FP4 kernels.
        batch_invariant: a request's bits do not depend on its neighbours or on any bound.
    """
    refuse("xqa", {"k_sf_cache": k_sf_cache, "v_sf_cache": v_sf_cache})
    rt = process_runtime()
    query = view_of(q, "q")
    check_multiprocessors(sm_count, query.device, rt)
    keys = view_of(k_cache, "k_cache")
    _check_cache(keys, kv_layout, num_kv_heads, page_size)
    q_seq_len = integer("q_seq_len", q_seq_len)
    if not 0 <= integer("sliding_win_size", sliding_win_size) <= 1 << 31:
        raise UsageError(f"sliding_win_size={sliding_win_size}: expected 0 (none) or more, at most 2^31")
    out, table = view_of(output, "output"), view_of(page_table, "page_table")
    if out.shape != query.shape:
        raise UsageError(f"output: shape {out.shape}, expected {query.shape}")
    if len(table.shape) != 2:
        raise UsageError(f"page_table: shape {table.shape}, expected [batch, columns]")
    lengths, ragged = lengths_of(seq_lens), q_cu_seq_lens is not None
    requests, answers = _requests(query, "q", q_seq_len, ragged), _requests(out, "output", q_seq_len, ragged)
    find_backend("xqa", XQA, rt.driver.device(query.device))
    scales = scales_of_heads(q_scale, kv_scale, rcp_out_scale, query, out, rt)
    launch(
        q,
        requests,
        keys,
        v_cache,
        with_enough_semaphores(
            memory_of(semaphores, "semaphores", query.device),
            scratch_of(workspace_buffer, query.device),
            rows=lengths.shape[0] * q_seq_len * query.shape[-2],
            stream=rt.memory.current_stream(q),
            device=query.device,
            runtime=rt,
        ),
        table,
        lengths,
        answers,
        runtime=rt,
        max_seq_len=table.shape[1] * page_size,
        q_len=q_seq_len,
        q_cu_seq_lens=q_cu_seq_lens,
        softmax_scale=scales[0],
        output_scale=scales[1],
        kv_layout=kv_layout,
        names=NAMES,
        sinks=sinks,
        enable_pdl=enable_pdl,
        mask=mask,
        window_left=sliding_win_size - 1,
        batch_invariant=batch_invariant,
    )


def xqa_batch_decode_with_kv_cache(
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
    sinks: Any = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Any = None,
    *,
    batch_invariant: bool = False,
) -> Any:
    """Decoding over a paged KV cache (GQA); parameters not named here are as in ``xqa``.

    Args:
        query: ``[tokens, q_heads, head_dim]``; tokens are batch x q_len_per_req, or what ``q_cu_seq_lens`` says.
        kv_cache: a pair of K and V, or ``[pages, 2, ...]``, or ``[pages, 1, ...]`` where both are the same.
        workspace_buffer: more than 8 MiB, any dtype: the first 8 MiB are semaphores (zero on first use, left so), the
            rest scratch of any contents. A stream's work must be done with it before another's.
        max_seq_len: bound on the lengths; what ``block_tables`` holds, if that is less.
        bmm1_scale, bmm2_scale: factors of scores and output: numbers, or one float32 on the device.
        window_left: keys before its own that a query sees; -1: all.
        out: like ``query``, bf16, fp16 or e4m3; None: made here, of ``query``'s dtype.
        q_len_per_req: query tokens of a request; with ``q_cu_seq_lens`` their bound.
        o_scale: an ``out`` that is not e4m3 is multiplied by it (``bmm2_scale`` has its inverse in it).
        kv_cache_sf: refused: there are no FP4 kernels.

    Returns:
        ``out``.
    """
    operator = "xqa_batch_decode_with_kv_cache"
    refuse(operator, {"kv_cache_sf": kv_cache_sf})
    if q_len_per_req is None:
        raise UsageError("q_len_per_req: None, expected the query tokens of a request, or their bound")
    rt = process_runtime()
    find_backend(operator, XQA, rt.driver.device(view_of(query, "query").device))
    return decode_batch(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        runtime=rt,
        q_len=integer("q_len_per_req", q_len_per_req),
        q_cu_seq_lens=q_cu_seq_lens,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        o_scale=o_scale,
        out=out,
        kv_layout=kv_layout,
        names={"max_q_len": "q_len_per_req"},
        sinks=sinks,
        enable_pdl=enable_pdl,
        mask=mask,
        window_left=window_left,
        batch_invariant=batch_invariant,
    )


def check_multiprocessors(sm_count: int | None, device: int, runtime: Runtime) -> None:
    """Raise ``UsageError`` unless ``sm_count`` is None or what the device has."""
    has = runtime.driver.device(device).multiprocessors
    if sm_count not in (None, has):
        raise UsageError(f"sm_count={sm_count}: the device has {has}, and kernels here run on all of them")


def _check_cache(cache: TensorView, kv_layout: str, num_kv_heads: int, page_size: int) -> None:
    if kv_layout not in LAYOUTS:
        raise UsageError(f"kv_layout={kv_layout!r}: expected NHD or HND")
    if len(cache.shape) != 4:
        raise UsageError(f"k_cache: shape {cache.shape}, expected 4 dimensions in layout {kv_layout}")
    tokens, heads = cache.shape[1:3] if kv_layout == "NHD" else cache.shape[2:0:-1]
    for name, given, has in (("num_kv_heads", num_kv_heads, heads), ("page_size", page_size, tokens)):
        if integer(name, given) != has:
            raise UsageError(f"{name}={given}: k_cache has {has} in layout {kv_layout}")


def _requests(view: TensorView, name: str, q_len: int, ragged: bool) -> TensorView:
    """``[batch, heads, head_dim]`` or ``[batch, q_len, ...]``: without the beam; ragged tokens as they are."""
    rank = len(view.shape)
    if q_len < 1:
        raise UsageError(f"q_seq_len={q_len}: expected 1 or more")
    if ragged:
        form, fits = "[tokens, heads, head_dim]", rank == 3
    elif q_len == 1:
        form, fits = "[batch, 1, heads, head_dim]", rank in (3, 4, 5) and set(view.shape[1 : rank - 2]) <= {1}
    else:
        form = f"[batch, 1, {q_len}, heads, head_dim]"
        fits = rank in (4, 5) and view.shape[1 : rank - 2] in ((q_len,), (1, q_len))
    if not fits:
        raise UsageError(f"{name}: shape {view.shape}, expected {form}")
    wanted = 4 if q_len > 1 and not ragged else 3
    while len(view.shape) > wanted:
        view = without(view, 1)
    return view


def scales_of_heads(
    q_scale: Any, kv_scale: Any, rcp_out_scale: float, q: TensorView, out: TensorView, runtime: Runtime
) -> tuple[ScaleProduct, ScaleProduct]:
    """Factors of scores and output: q_scale * kv_scale / sqrt(head_dim), and kv_scale * rcp_out_scale."""
    if rcp_out_scale != 1.0 and out.dtype != E4M3:
        raise UsageError(f"rcp_out_scale={rcp_out_scale}: output is {out.dtype}, expected 1.0 unless it is {E4M3}")
    of_q, of_kv = factor_of("q_scale", q_scale, q.device), factor_of("kv_scale", kv_scale, q.device)
    root = ScaleProduct(1 / math.sqrt(max(1, q.shape[-1])) if q.shape else 1.0)
    scores = times(times(of_q, of_kv, runtime), root, runtime)
    return scores, times(of_kv, factor_of("rcp_out_scale", rcp_out_scale, q.device), runtime)
