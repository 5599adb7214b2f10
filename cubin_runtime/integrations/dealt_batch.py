"""A step of an engine over keys that are dealt to several ranks: decode context parallelism of models with GQA.

Each rank has the queries of its own heads, and of every request a part of the keys in its cache. Queries are gathered
over the ranks, every rank attends with all heads to its own keys, and the parts are combined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..attention.operators.context_attention import context_attention
from ..attention.operators.merge_states import merge_states
from ..attention.operators.paged_decode import paged_decode
from ..errors import UsageError
from .paged_batch import DealtBatch, LayerOptions, Part, decodes_directly, launch_part


class Ranks(NamedTuple):
    """The ranks that keys are dealt to: what each of them does at the same time as the others.

    ``gather``: queries ``[rows, heads, head_dim]`` -> ``[rows, world * heads, head_dim]``, contiguous. ``combine``:
    outputs ``[rows, world * heads, head_dim]`` over a rank's keys and their log-sum-exp in base 2, float32 ``[rows,
    world * heads]``, which it may overwrite -> those of the rank's own heads over all keys.
    """

    gather: Callable[[Any], Any]
    combine: Callable[[Any, Any], tuple[Any, Any]]


def attend_dealt(
    q: Any,
    new_keys: Any,
    new_values: Any,
    k_cache: Any,
    v_cache: Any,
    kv_layout: str,
    batch: DealtBatch,
    options: LayerOptions,
    ranks: Ranks,
    out: Any,
) -> None:
    """Attention of all parts of a step, whose keys and values are in the ranks' caches already.

    Args:
        q: ``[rows, heads, head_dim]`` of this rank's heads; rows of no part are left out. ``out`` alike.
        new_keys, new_values: ``[rows, kv_heads, head_dim]`` of this step's tokens, which prompts read.
        k_cache, v_cache: as for ``attend``.
        options: without windows and sinks.

    Raises:
        as ``paged_decode``, ``context_attention`` and ``merge_states``.
    """
    decodes, prompts = batch.decodes, batch.prefills
    cached = [part for part in (decodes, prompts if batch.has_context else None) if part is not None and part.rows]
    cached_states: Any = None
    if cached:
        end = cached[-1].where.stop
        cached_states = ranks.combine(
            *_over_own_keys(ranks.gather(q[:end]), k_cache, v_cache, kv_layout, batch, cached, options)
        )
    if decodes is not None and decodes.rows:
        out[decodes.where].copy_(cached_states[0][decodes.where])
    if prompts is not None and prompts.rows:
        rows = prompts.where
        context = None if not batch.has_context else (cached_states[0][rows], cached_states[1][rows])
        _over_new_keys(q[rows], new_keys[rows], new_values[rows], prompts, context, options, out[rows])


def _over_own_keys(
    queries: Any,
    k_cache: Any,
    v_cache: Any,
    kv_layout: str,
    batch: DealtBatch,
    parts: list[Part],
    options: LayerOptions,
) -> tuple[Any, Any]:
    """Outputs and log-sum-exp of the parts' rows over the keys in this rank's cache, as gathered queries see them."""
    import torch

    out = torch.empty_like(queries)
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    kv_heads = k_cache.shape[1 if kv_layout == "HND" else 2]
    for part in parts:
        shared = {
            "max_seq_len": part.max_seq_len,
            "softmax_scale": options.softmax_scale,
            "k_scale": options.k_scale,
            "v_scale": options.v_scale,
            "kv_layout": kv_layout,
        }
        pages = {"page_table": part.table, "seq_lens": part.lengths, "logit_soft_cap": options.soft_cap}
        q, result, sums = queries[part.where], out[part.where], lse[part.where]
        operator: Callable[..., Any] = context_attention
        states: tuple[Any, ...]
        if part is not batch.decodes:
            of_prompts = {"q_cu_seq_lens": part.sums, "max_q_len": part.max_q_len, "causal": False}
            states, more = (q, k_cache, v_cache), {**pages, **of_prompts}
        elif decodes_directly(q.shape[1], kv_heads, q.shape[2], options):
            operator, states, more = paged_decode, (q, k_cache, v_cache, part.table, part.lengths), {}
        else:
            q, result, sums = (rows.unsqueeze(1) for rows in (q, result, sums))
            states, more = (q, k_cache, v_cache), pages
        launch_part(operator, states, {**shared, **more, "out": result, "lse": sums}, part, options)
    return out, lse


def _over_new_keys(
    q: Any, k: Any, v: Any, part: Part, context: tuple[Any, Any] | None, options: LayerOptions, out: Any
) -> None:
    """Attention of new tokens among themselves, merged with that over their requests' context, if there is any."""
    import torch

    lse: Any = None if context is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    arguments = {
        "q_cu_seq_lens": part.sums,
        "kv_cu_seq_lens": part.sums,
        "max_q_len": part.max_q_len,
        "max_seq_len": part.max_q_len,
        "softmax_scale": options.softmax_scale,
        "logit_soft_cap": options.soft_cap,
        "out": out,
        "lse": lse,
    }
    launch_part(context_attention, (q, k, v), arguments, part, options)
    if context is not None:
        others = {"other": context[0], "other_lse": context[1], "out": out}
        launch_part(merge_states, (out, lse), others, part, options)


def hold_a_dealt_step(q: Any, world: int) -> None:
    """Allocate and free what a step with such queries holds at once, for an engine that measures its memory."""
    # The queries of all ranks' heads as they arrive and in order, the outputs, and these as they are sent.
    q.new_empty(4, q.shape[0], world * q.shape[1], q.shape[2])


def check_dealt_layer(window: int | None, sinks: bool, shares_keys: bool) -> None:
    """Refuse a layer whose keys cannot be dealt to ranks.

    Raises:
        UsageError: the options; the message names them.
    """
    features = {"sliding_window": window is not None, "sinks": sinks, "kv_sharing_target_layer_name": shares_keys}
    refused = [name for name, is_asked in features.items() if is_asked]
    if refused:
        raise UsageError(f"{', '.join(refused)}: expected None with decode context parallelism")
