"""FlashInfer's lowest MLA operator on our own kernels."""

from __future__ import annotations

from typing import Any

from ..attention.backends import XQA, find_backend
from ..attention.checks import check_dtype, integer
from ..attention.latent_cache import latent_view
from ..errors import UsageError
from ..tensor import TensorView, view_of
from .arguments import process_runtime, without
from .latent import launch_latent, like
from .pages import lengths_of, memory_of, scratch_of
from .semaphores import with_enough_semaphores
from .xqa import NAMES, check_multiprocessors, scales_of_heads


def xqa_mla(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    output: Any,
    workspace_buffer: Any,
    semaphores: Any,
    page_size: int,
    q_scale: Any = 1.0,
    kv_scale: Any = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """MLA decoding of one token a request over a paged latent cache into ``output``.

    Args:
        q: ``[batch, 1, heads, latent + 64]`` or without the 1; bf16, or e4m3 where a kernel takes it. latent is 512
            or 256, heads 1 to 128.
        k_cache: ``[pages, page_size, latent + 64]``, or with a 1 for the one head before or behind page_size; bf16
            or e4m3.
        v_cache: the same memory, whole or its first latent columns.
        page_table: int32 ``[batch, columns]``; its columns are the bound on the lengths.
        seq_lens: uint32 or int32 ``[batch, 1]`` or ``[batch]``.
        output: ``[batch, 1, heads, latent]`` or without the 1; bf16, fp16 or e4m3.
        workspace_buffer: scratch, any dtype and contents; like ``semaphores`` contiguous and 16-byte aligned.
        semaphores: zero on first use, left so; as in ``xqa``.
        page_size: as ``k_cache`` has it: 32, 64 or 128.
        q_scale, kv_scale: numbers, or one float32 on the device. Scores are multiplied by
            q_scale * kv_scale / sqrt(latent + 64), the output by kv_scale.
        sm_count: None, or the device's.
        enable_pdl: None: on.
        batch_invariant: a request's bits do not depend on its neighbours or on any bound.
    """
    rt = process_runtime()
    query, out, table = view_of(q, "q"), view_of(output, "output"), view_of(page_table, "page_table")
    check_multiprocessors(sm_count, query.device, rt)
    cache = _one_cache(view_of(k_cache, "k_cache"), view_of(v_cache, "v_cache"), page_size)
    if len(query.shape) == 4 and query.shape[1] == 1:
        query = without(query, 1)
    if len(query.shape) != 3:
        raise UsageError(f"q: shape {query.shape}, expected [batch, 1, heads, latent + 64]")
    if len(table.shape) != 2:
        raise UsageError(f"page_table: shape {table.shape}, expected [batch, columns]")
    lengths = lengths_of(seq_lens)
    check_dtype("output", out, ("bfloat16", "float16", "float8_e4m3fn"))
    find_backend("xqa_mla", XQA, rt.driver.device(query.device))
    scales = scales_of_heads(q_scale, kv_scale, 1.0, query, out, rt)
    launch_latent(
        q,
        query,
        cache,
        with_enough_semaphores(
            memory_of(semaphores, "semaphores", query.device),
            scratch_of(workspace_buffer, query.device),
            rows=lengths.shape[0] * query.shape[-2],
            stream=rt.memory.current_stream(q),
            device=query.device,
            runtime=rt,
        ),
        table,
        lengths,
        like(query, out, "output", 1),
        runtime=rt,
        max_seq_len=table.shape[1] * page_size,
        softmax_scale=scales[0],
        output_scale=scales[1],
        names={**NAMES, "kv_cache": "k_cache", "output_scale": "kv_scale"},
        enable_pdl=enable_pdl,
        batch_invariant=batch_invariant,
    )


def _one_cache(keys: TensorView, values: TensorView, page_size: int) -> TensorView:
    """The latent cache that both arguments are views of, as ``[pages, page_size, width]``."""
    keys, values = _without_head(keys, page_size), _without_head(values, page_size)
    rows = latent_view(keys, "k_cache")
    if rows.shape[1] != integer("page_size", page_size):
        raise UsageError(f"page_size={page_size}: k_cache has {rows.shape[1]}")
    columns = {rows.shape[3], rows.shape[3] - 64}
    same = (values.pointer, values.dtype, values.device) == (keys.pointer, keys.dtype, keys.device)
    same = same and values.strides == keys.strides and values.shape[:-1] == keys.shape[:-1]
    if not same or values.shape[-1] not in columns:
        raise UsageError("v_cache: other memory than k_cache, expected the same latent cache or its first columns")
    return keys


def _without_head(view: TensorView, page_size: int) -> TensorView:
    if len(view.shape) == 4 and view.shape[2] == 1 and view.shape[1] == page_size:
        return without(view, 2)
    return without(view, 1) if len(view.shape) == 4 and view.shape[1] == 1 else view
