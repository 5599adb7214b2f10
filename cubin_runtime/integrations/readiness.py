"""Preparation of an engine's layers before the first request: kernels loaded, scratch reserved, fast paths written."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from itertools import product
from typing import Any

import torch

from ..attention.operator_plan import OperatorPlan
from ..attention.operators.context_attention import plan_context_attention
from ..attention.operators.merge_states import plan_merge_states
from ..attention.operators.paged_decode import plan_paged_decode
from ..attention.runtime import default_runtime
from ..kernels.native.prefill.select import most_copy_bytes
from .paged_batch import LayerOptions, PagedBatch, Part, attend, decodes_directly, few_tokens, is_decoded
from .scratch import Limits, load, scratch_of_layers, shared_scratch

_SIZES = 4  # a fast path for any size is written at the second size that is new, or a little later


def reserve(
    q: Any,
    kv_heads: int,
    page_size: int,
    kv_layout: str,
    options: LayerOptions,
    limits: Limits,
    log: logging.Logger,
    cache_dtype: torch.dtype | None = None,
    world: int = 1,
) -> LayerOptions:
    """Load all kernels that a layer's steps may use, and reserve their scratch; the options with it.

    Args:
        q: ``[tokens, heads, head_dim]`` like the layer's queries, of at least one token; its values are not used.
        limits: the most that a step has.
        log: gets a line that names the kernels of each kind of layer.
        cache_dtype: of keys and values; None: that of the queries.
        world: ranks that the keys are dealt to; ``limits.keys`` are those of one.
    """
    scratch, cache_dtype = scratch_of_layers(q.device.index or 0), cache_dtype or q.dtype
    kind = (*_form(q, options), kv_heads, page_size, kv_layout, limits, cache_dtype, world)
    if kind in scratch.ready:
        return options._replace(scratch=scratch)
    arguments = (q, kv_heads, page_size, kv_layout, options, limits, cache_dtype)
    plans = list(_plans(*arguments) if world == 1 else _dealt_plans(*arguments, world))
    scratch.cover(plans, limits)
    if any(region.lent for plan in plans for region in plan.regions):
        keys_and_values = 2 * limits.keys * kv_heads * q.shape[2] * q.element_size()
        lent = most_copy_bytes(min(limits.requests, limits.tokens), keys_and_values)
        scratch.lent = max(scratch.lent, lent)
    scratch.ready.add(kind)
    kinds = (f"head_dim {q.shape[2]}, {q.shape[1]} heads on {kv_heads}", f"window {options.window_left + 1}")
    named = kinds if options.window_left >= 0 else kinds[:1]
    log.info("cubin_runtime: layers of %s run on %s", ", ".join(named), ", ".join(load(plans)))
    return options._replace(scratch=scratch)


def warm_up(
    q: Any, k_cache: Any, v_cache: Any, kv_layout: str, options: LayerOptions, limits: Limits, columns: int
) -> None:
    """Run steps of decodes and of prompts over the engine's cache, so that later ones find their fast paths.

    The stream has to be one with shared scratch: without it, steps have other paths.

    They read page 0 and write nothing but an output of their own; ``columns`` are those of the engine's page tables.
    ``q`` has the strides of the queries to come, which are often a part of the rows that a projection wrote.
    """
    scratch = shared_scratch(q.device.index or 0)
    done = (*_form(q, options), q.stride(), k_cache.shape, k_cache.stride(), k_cache.dtype, limits, columns)
    if done in scratch.ready:
        return
    scratch.ready.add(done)
    rows = min(limits.requests * limits.decode_tokens, limits.tokens)
    table = torch.zeros(rows, columns, dtype=torch.int32, device=q.device)
    lengths = torch.ones(rows, dtype=torch.int32, device=q.device)
    sums = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    projected = q.new_zeros(rows, q.stride(0))[:, : q.shape[1] * q.shape[2]]
    out = q.new_empty(rows, *q.shape[1:])
    kv_heads = k_cache.shape[1 if kv_layout == "HND" else 2]
    few = few_tokens(q.shape[1], kv_heads, q.shape[2], options)
    # Prompts behind decodes: their lengths begin at any of the four places that an int32 has in 16 bytes.
    for first in range(min(4, rows)):
        for count in range(1 + _SIZES * first, min(1 + _SIZES * (first + 1), rows - first + 1)):
            behind, query_sums = slice(first, first + count), sums[: count + 1]
            arguments = (table[behind], lengths[behind])
            prompts = [
                Part(0, count, *arguments, query_sums, tokens, bound)
                for bound in limits.prompt_bounds
                for tokens in sorted({few or limits.tokens, limits.tokens})
                if tokens == limits.tokens or is_decoded(count, kv_heads, bound, options.window_left)
            ]
            steps = [(part, PagedBatch(None, part)) for part in prompts]
            if first == 0:
                decodes = [Part(0, count, *arguments, None, 1, limits.keys)]
                decodes += _with_drafts(*arguments, query_sums, rows, limits) if limits.decode_tokens > 1 else ()
                steps += [(part, PagedBatch(part, None)) for part in decodes]
            for part, batch in steps:
                queries = projected[: part.rows].view(part.rows, *q.shape[1:])
                attend(queries, k_cache, v_cache, kv_layout, batch, options, out[: part.rows])


def _with_drafts(table: Any, lengths: Any, sums: Any, rows: int, limits: Limits) -> Iterator[Part]:
    """Decodes of a token and its drafts within so many rows: the same number in each request, and not."""
    count, tokens = len(table), limits.decode_tokens
    yield Part(0, count, table, lengths, sums, tokens, limits.keys)
    if count * tokens <= rows:
        yield Part(0, count * tokens, table, lengths, None, tokens, limits.keys)


def _counts(most: int) -> list[int]:
    """Numbers of requests whose launches have the kernels and the most scratch of all up to ``most``.

    Scratch grows with the CTAs, which are most beside a power of two, and with the requests.
    """
    powers = [1 << power for power in range(most.bit_length())]
    beside = {number + more for number in powers for more in (-1, 0, 1, number // 2, number // 2 + 1)}
    return sorted(number for number in {*beside, *range(1, 17), most - 1, most} if 1 <= number <= most)


def _form(q: Any, options: LayerOptions) -> tuple[Hashable, ...]:
    """The common values of layers of one kind."""
    scales = {"k_scale": _scale_form(options.k_scale), "v_scale": _scale_form(options.v_scale)}
    return (
        q.shape[1:],
        q.dtype,
        *(options._asdict() | {"sinks": options.sinks is not None, "scratch": None} | scales).values(),
    )


def _scale_form(scale: Any) -> Hashable:
    """The values that plans depend on: of a tensor, how its elements lie."""
    return scale if scale is None or isinstance(scale, float) else (scale.shape, scale.stride())


def _plans(
    q: Any,
    kv_heads: int,
    page_size: int,
    kv_layout: str,
    options: LayerOptions,
    limits: Limits,
    cache_dtype: torch.dtype,
) -> Iterator[OperatorPlan]:
    """Plans like those of all steps, on a cache of one page."""
    heads, size = q.shape[1:]
    k_cache, v_cache = _page(q, kv_heads, page_size, kv_layout, cache_dtype)
    table, lengths = _tables(q, page_size, limits)
    most = max(limits.requests, limits.tokens)
    queries = q.new_empty(most, heads, size)
    shared = {
        "max_seq_len": limits.keys,
        "softmax_scale": options.softmax_scale,
        "k_scale": options.k_scale,
        "v_scale": options.v_scale,
        "window_left": options.window_left,
        "sinks": options.sinks,
        "kv_layout": kv_layout,
        "batch_invariant": options.batch_invariant,
    }
    if decodes_directly(heads, kv_heads, size, options):
        for tokens in sorted({1, limits.decode_tokens}):
            for requests in _counts(min(limits.requests, limits.tokens // tokens)):
                even = queries[: requests * tokens]
                even = even.unflatten(0, (requests, tokens)) if tokens > 1 else even
                yield plan_paged_decode(even, k_cache, v_cache, table[:requests], lengths[:requests], even, **shared)
        for rows, requests, tokens, keys in _ragged_decodes(q, kv_heads, options, limits):
            arguments = (k_cache, v_cache, table[:requests], lengths[:requests], queries[:rows])
            ragged = {"q_cu_seq_lens": lengths[: requests + 1], "max_q_len": tokens, "max_seq_len": keys}
            yield plan_paged_decode(queries[:rows], *arguments, **{**shared, **ragged})
    prompts = {(*sizes, bound) for sizes in limits.prompt_sizes for bound in limits.prompt_bounds}
    if cache_dtype != q.dtype:  # converted before for some numbers of keys, by other kernels
        prompts |= {(limits.tokens, 1, 1 << power) for power in range(limits.keys.bit_length())}
    for tokens, requests, keys in sorted(prompts):
        yield plan_context_attention(
            queries[:tokens],
            k_cache,
            v_cache,
            queries[:tokens],
            page_table=table[:requests],
            seq_lens=lengths[:requests],
            q_cu_seq_lens=lengths[: requests + 1],
            max_q_len=tokens,
            logit_soft_cap=options.soft_cap,
            **{**shared, "max_seq_len": keys},
        )


def _ragged_decodes(
    q: Any, kv_heads: int, options: LayerOptions, limits: Limits
) -> Iterator[tuple[int, int, int, int]]:
    """Rows, requests, most tokens of a request and bound on keys of decodes with drafts, and of prompts that are
    launched as decodes, where the number of their rows counts too."""
    if limits.decode_tokens > 1:
        for requests in _counts(min(limits.requests, limits.tokens // limits.decode_tokens)):
            yield requests * limits.decode_tokens, requests, limits.decode_tokens, limits.keys
    few, most = few_tokens(q.shape[1], kv_heads, q.shape[2], options), min(limits.requests, limits.tokens)
    if few == 0:
        return
    # Of more KV heads than multiprocessors, requests of one token may have a kernel that no other number of them has.
    full = default_runtime().driver.device(q.device.index or 0).multiprocessors // kv_heads
    for requests, keys in product({*_counts(most), min(most, full + 1)}, limits.prompt_bounds):
        if is_decoded(requests, kv_heads, keys, options.window_left):
            for rows in sorted({min(requests * each, limits.tokens) for each in (1, min(2, few), few)}):
                yield rows, requests, few, keys


def _page(q: Any, kv_heads: int, page_size: int, kv_layout: str, cache_dtype: torch.dtype) -> Any:
    """Keys and values of a cache of one page."""
    size = q.shape[2]
    shape = (1, kv_heads, page_size, 2 * size) if kv_layout == "HND" else (1, page_size, kv_heads, 2 * size)
    return q.new_zeros(shape).to(cache_dtype).split(size, dim=-1)


def _tables(q: Any, page_size: int, limits: Limits) -> tuple[Any, Any]:
    """A page table of the most requests, and as many lengths or running sums."""
    table = torch.zeros(limits.requests, -(-limits.keys // page_size), dtype=torch.int32, device=q.device)
    return table, torch.zeros(limits.requests + 1, dtype=torch.int32, device=q.device)


def _dealt_plans(
    q: Any,
    kv_heads: int,
    page_size: int,
    kv_layout: str,
    options: LayerOptions,
    limits: Limits,
    cache_dtype: torch.dtype,
    world: int,
) -> Iterator[OperatorPlan]:
    """Plans like those of all steps over keys that are dealt to ranks, on a cache of one page."""
    heads, size = q.shape[1:]
    k_cache, v_cache = _page(q, kv_heads, page_size, kv_layout, cache_dtype)
    table, lengths = _tables(q, page_size, limits)
    queries, rank_queries, new_keys = (
        q.new_empty(limits.tokens, count, size) for count in (world * heads, heads, kv_heads)
    )
    sums, own_sums = (
        torch.empty(part.shape[:2], dtype=torch.float32, device=q.device) for part in (queries, rank_queries)
    )
    shared: dict[str, Any] = {"max_seq_len": limits.keys, "softmax_scale": options.softmax_scale}
    shared |= {"k_scale": options.k_scale, "v_scale": options.v_scale, "kv_layout": kv_layout}
    most = min(limits.requests, limits.tokens)
    soft_cap: dict[str, Any] = {"logit_soft_cap": options.soft_cap}
    direct = decodes_directly(world * heads, kv_heads, size, options)
    for requests in _counts(most):
        pages = table[:requests], lengths[:requests]
        if direct:
            rows = queries[:requests]
            yield plan_paged_decode(rows, k_cache, v_cache, *pages, rows, sums[:requests], **shared)
        else:
            rows, lse = queries[:requests, None], sums[:requests, None]
            of_pages = {"page_table": pages[0], "seq_lens": pages[1], **soft_cap, **shared}
            yield plan_context_attention(rows, k_cache, v_cache, rows, lse, **of_pages)
    for count, requests in sorted(limits.prompt_sizes):
        tokens = {"q_cu_seq_lens": lengths[: requests + 1], "max_q_len": count, **soft_cap}
        context = {"page_table": table[:requests], "seq_lens": lengths[:requests], "causal": False, **tokens, **shared}
        yield plan_context_attention(queries[:count], k_cache, v_cache, queries[:count], sums[:count], **context)
        new = {**tokens, "kv_cu_seq_lens": lengths[: requests + 1], "max_seq_len": limits.tokens}
        new["softmax_scale"], rows = options.softmax_scale, rank_queries[:count]
        for lse in (None, own_sums[:count]):
            yield plan_context_attention(rows, new_keys, new_keys, rows, lse, **new)
    yield plan_merge_states(rank_queries, own_sums, rank_queries, other=rank_queries, other_lse=own_sums)
