"""Preparation of layers with a latent cache before the first request: kernels, scratch and fast paths of decodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ..attention.operator_plan import OperatorPlan
from ..attention.operators.context_attention import plan_context_attention
from ..attention.operators.mla_decode import plan_mla_decode
from ..attention.operators.sparse_mla_decode import plan_sparse_mla_decode
from ..kernels.native.sparse_mla.select import ROW_FORMS
from ..tensor import TensorView
from .latent_batch import LISTED_LATENT, LISTED_ROPE, PAGE_SIZE, LatentDecodes, LatentOptions, attend_latent
from .scratch import Limits, SharedScratch, load, scratch_of_layers, shared_scratch

_SIZES = 4  # of steps that write a fast path for any size
_ADDRESS = 256  # of tensors that a plan is made for, which reads none
_FULL_GRID = 256  # query tokens that occupy all multiprocessors of any GPU with these kernels


class LatentKind(NamedTuple):
    """The common values of layers of one kind; dtypes are those of a ``TensorView``.

    ``latent`` and ``rope`` are columns of a key; ``q_len`` bounds the query tokens of a request. Requests with more are
    cut into chunks of ``chunk``; 0: there are none.
    """

    heads: int
    latent: int
    rope: int
    q_dtype: str
    cache_dtype: str
    q_len: int
    device: int
    chunk: int = 0


def reserve_latent(kind: LatentKind, options: LatentOptions, limits: Limits, log: logging.Logger) -> LatentOptions:
    """Load all kernels that a layer's decodes may use, and reserve their scratch; the options with it.

    Args:
        limits: the most that a step has.
        log: gets a line that names the kernels of each kind of layer.
    """
    scratch = scratch_of_layers(kind.device)
    done = ("latent", kind, options._replace(scratch=None), limits)
    if done not in scratch.ready:
        plans = list(_plans(kind, options, limits))
        scratch.cover(plans, limits._replace(requests=_most_requests(kind, limits)))
        scratch.ready.add(done)
        named = f"MLA with {kind.latent} + {kind.rope} columns, {kind.heads} heads, a cache of {kind.cache_dtype}"
        log.info("cubin_runtime: decodes of layers of %s run on %s", named, ", ".join(load(plans)))
    return options._replace(scratch=scratch)


def warm_up_latent(kind: LatentKind, kv_cache: Any, options: LatentOptions, limits: Limits, columns: int) -> None:
    """Run decodes over the engine's cache ``[pages, page_size, latent + rope]``, so that later ones find fast paths.

    The stream has to be one with shared scratch: without it, steps have other paths.
    They read page 0 and write nothing but an output of their own; ``columns`` are those of the engine's page tables.
    """
    scratch = shared_scratch(kind.device)
    done = ("latent", kind, options._replace(scratch=None), kv_cache.shape, kv_cache.stride(), limits, columns)
    if done in scratch.ready:
        return
    scratch.ready.add(done)
    device, most, dealt = kv_cache.device, min(limits.requests, _SIZES), options.dealing.world > 1
    table = torch.zeros(most, columns, dtype=torch.int32, device=device)
    lengths = torch.ones(most, dtype=torch.int32, device=device)
    sums = torch.arange(most + 1, dtype=torch.int32, device=device)
    shape = (most * kind.q_len, kind.heads, kind.latent + kind.rope)
    q = torch.zeros(shape, device=device).to(getattr(torch, kind.q_dtype))
    out = torch.empty(*q.shape[:2], kind.latent, dtype=torch.bfloat16, device=device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device) if dealt else None
    for requests in range(1, most + 1):
        for q_len, ragged in dict.fromkeys((*_forms(kind.q_len), *_chunk_forms(kind))):
            rows = requests if ragged else requests * q_len
            here = slice(0, requests)
            decodes = LatentDecodes(
                table[here],
                lengths[here],
                sums[: requests + 1] if ragged else None,
                q_len,
                min(limits.keys, columns * kv_cache.shape[1]),
                lengths[here] if dealt else None,
            )
            attend_latent(q[:rows], kv_cache, decodes, options, out[:rows], None if lse is None else lse[:rows])


def _tensor(device: int, dtype: Any, *shape: int) -> TensorView:
    return TensorView.contiguous(_ADDRESS, dtype, shape, device)


def _forms(q_len: int) -> list[tuple[int, bool]]:
    """Query tokens of a request, and whether their number differs, of all steps of decodes."""
    return [(1, False)] if q_len == 1 else [(1, False), (q_len, False), (q_len, True)]


def _chunk_forms(kind: LatentKind) -> list[tuple[int, bool]]:
    """The same of steps whose requests are cut into chunks."""
    return [(kind.chunk, kind.chunk > 1)] if kind.chunk else []


def _most_requests(kind: LatentKind, limits: Limits) -> int:
    """The most requests of a launch, where each chunk is one."""
    if not kind.chunk:
        return limits.requests
    return max(limits.requests, min(limits.tokens, limits.tokens // kind.chunk + limits.requests))


def _counts(most: int) -> set[int]:
    """Numbers of requests whose launches have the kernels and the most scratch of all up to ``most``."""
    return {*range(1, min(most, _FULL_GRID) + 1), most}


def _plans(kind: LatentKind, options: LatentOptions, limits: Limits) -> Iterator[OperatorPlan]:
    """Plans like those of all steps, on a cache of one page."""
    width, columns = kind.latent + kind.rope, -(-limits.keys // PAGE_SIZE)
    dealt, tensor = options.dealing.world > 1, partial(_tensor, kind.device)
    cache = tensor(kind.cache_dtype, 1, PAGE_SIZE, width)
    most = _most_requests(kind, limits)
    sizes = {(requests, *form) for requests in _counts(limits.requests) for form in _forms(kind.q_len)}
    sizes |= {(chunks, *form) for chunks in _counts(most) for form in _chunk_forms(kind)}
    for requests, q_len, ragged in sorted(sizes):
        rows = requests * q_len
        lead = (rows,) if ragged or q_len == 1 else (requests, q_len)
        yield plan_mla_decode(
            tensor(kind.q_dtype, *lead, kind.heads, width),
            cache,
            tensor("int32", requests, columns),
            tensor("int32", requests),
            tensor("bfloat16", *lead, kind.heads, kind.latent),
            tensor("float32", *lead, kind.heads) if dealt else None,
            max_seq_len=limits.keys,
            softmax_scale=1.0,
            q_cu_seq_lens=tensor("int32", requests + 1) if ragged else None,
            max_q_len=q_len if ragged else None,
            global_seq_lens=tensor("int32", requests) if dealt else None,
            cp_world=options.dealing.world,
            cp_rank=options.dealing.rank,
            cp_interleave=options.dealing.interleave,
            batch_invariant=options.batch_invariant,
        )


def reserve_prompts(
    sizes: tuple[int, int, int], softmax_scale: float, limits: Limits, device: int, log: logging.Logger
) -> None:
    """Load the kernels of prompts whose keys and values are projected from the latent space, and reserve scratch.

    Args:
        sizes: heads, columns of a key, and of a value.
        limits: the most that a step has.
        log: gets a line that names the kernels of each kind of layer.
    """
    scratch = scratch_of_layers(device)
    done = ("prompts", sizes, softmax_scale, limits)
    if done in scratch.ready:
        return
    scratch.ready.add(done)
    heads, size, value_size = sizes
    tensor = partial(_tensor, device)
    rows = max(limits.tokens, limits.keys)  # of keys, cached ones among them
    bounds = {min(limits.keys, 1 << power) for power in range(limits.keys.bit_length() + 1)}
    plans = [
        plan_context_attention(
            tensor("bfloat16", tokens, heads, size),
            tensor("bfloat16", rows, heads, size),
            tensor("bfloat16", rows, heads, value_size),
            tensor("bfloat16", tokens, heads, value_size),
            tensor("float32", tokens, heads) if with_lse else None,
            max_seq_len=keys,
            q_cu_seq_lens=tensor("int32", requests + 1),
            kv_cu_seq_lens=tensor("int32", requests + 1),
            max_q_len=tokens,
            causal=causal,
            softmax_scale=softmax_scale,
            lse_base="e",
        )
        for tokens, requests in sorted(limits.prompt_sizes)
        for keys in sorted(bounds)
        for causal, with_lse in ((True, False), (True, True), (False, True))
    ]
    scratch.cover(plans, limits)
    named = f"MLA with {heads} heads of {size} and {value_size} columns"
    log.info("cubin_runtime: prompts of layers of %s run on %s", named, ", ".join(load(plans)))


class ListKind(NamedTuple):
    """The common values of layers of one kind in which each query token has a list of rows (sparse MLA).

    ``rows`` is the form of a row of the cache, one of ``ROW_FORMS``; ``width`` are the entries of a list.
    """

    heads: int
    rows: str
    width: int
    device: int


def reserve_lists(kind: ListKind, batch_invariant: bool, limits: Limits, log: logging.Logger) -> SharedScratch:
    """Load all kernels that a layer may use, and reserve their scratch; the scratch.

    Args:
        limits: the most that a step has, all of whose query tokens may have lists.
        log: gets a line that names the kernels of each kind of layer.
    """
    scratch = scratch_of_layers(kind.device)
    done = ("lists", kind, batch_invariant, limits)
    if done in scratch.ready:
        return scratch
    scratch.ready.add(done)
    tensor, (columns, row_bytes) = partial(_tensor, kind.device), ROW_FORMS[kind.rows]
    packed = kind.rows == "scaled_e4m3"
    cache = tensor(*(("uint8", 1, PAGE_SIZE, row_bytes) if packed else ("bfloat16", 1, PAGE_SIZE, columns)))
    plans = [
        plan_sparse_mla_decode(
            tensor("bfloat16", tokens, kind.heads, columns),
            cache,
            tensor("int32", tokens, kind.width),
            tensor("bfloat16", tokens, kind.heads, LISTED_LATENT),
            softmax_scale=1.0,
            batch_invariant=batch_invariant,
        )
        for tokens in sorted(_counts(limits.tokens))
    ]
    scratch.cover(plans, limits)
    named = f"sparse MLA with {LISTED_LATENT} + {LISTED_ROPE} columns, {kind.heads} heads, rows of {row_bytes} bytes"
    log.info("cubin_runtime: layers of %s run on %s", named, ", ".join(load(plans)))
    return scratch
