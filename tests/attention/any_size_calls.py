"""Calls of the operators that have one path for all sizes, with the sizes of a step drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from cubin_runtime.attention import Runtime, TensorView, append_kv, context_attention, mla_decode, paged_decode
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from tests.attention.fast_path_calls import Call
from tests.attention.trtllm_calls import MadeUpMemory

BUFFERS = SemaphoreWorkspace(semaphores=(0x7F_F100_0000_00, 8 << 20), scratch=(0x7F_F200_0000_00, 1 << 30))
Arguments = dict[str, Any]


class Tensors:
    """Tensors at addresses that follow from their names."""

    def __init__(self, memory: MadeUpMemory) -> None:
        self._memory, self._known = memory, dict[str, int]()

    def __call__(self, name: str, dtype: str, *shape: int) -> TensorView:
        address = self._known.setdefault(name, self._memory.tensor(dtype, 1).pointer)
        return TensorView.contiguous(address, dtype, shape)


def _lengths(tensor: Tensors, batch: int) -> Arguments:
    return {"page_table": tensor("table", "int32", batch, 16), "seq_lens": tensor("lens", "int32", batch)}


def _caches(tensor: Tensors, first: str, second: str) -> Arguments:
    return {name: tensor(name, "bfloat16", 100, 64, 8, 128) for name in (first, second)}


def _rows(tensor: Tensors, *shape: int) -> Arguments:
    return {name: tensor(name, "bfloat16", *shape) for name in ("q", "out")}


def paged_context(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """Chunks of prompts over pages, with their log-sum-exp."""
    more = {"lse": tensor("lse", "float32", tokens, 64), "q_cu_seq_lens": tensor("sums", "int32", batch + 1)}
    given = {**_rows(tensor, tokens, 64, 128), **_caches(tensor, "k", "v"), **_lengths(tensor, batch), **more}
    return {**given, "max_seq_len": 1000, "max_q_len": bound}


def scaled_context(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """The same over an e4m3 cache with scales of each request."""
    caches = {name: tensor(f"{name}_e4m3", "float8_e4m3fn", 100, 64, 8, 128) for name in ("k", "v")}
    scales = {name: tensor(name, "float32", batch, 8) for name in ("k_scale", "v_scale")}
    return {**paged_context(tensor, tokens, batch, bound), **caches, **scales}


def ragged_context(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """Prompts over ragged keys, without a bound."""
    sums = {name: tensor(name, "int32", batch + 1) for name in ("q_cu_seq_lens", "kv_cu_seq_lens")}
    keys = {name: tensor(name, "bfloat16", tokens + bound, 8, 128) for name in ("k", "v")}
    return {**_rows(tensor, tokens, 64, 128), **keys, **sums, "max_seq_len": min(20, tokens + bound)}


def even_context(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """As many tokens of each request."""
    given = {**_rows(tensor, batch, 7, 64, 128), **_caches(tensor, "k", "v"), **_lengths(tensor, batch)}
    return {**given, "max_seq_len": 1000}


def append(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """New tokens by prefix sums."""
    new = {name: tensor(name, "bfloat16", tokens, 8, 128) for name in ("k", "v")}
    given = {**new, **_caches(tensor, "k_cache", "v_cache"), **_lengths(tensor, batch)}
    return {**given, "q_cu_seq_lens": tensor("sums", "int32", batch + 1)}


def append_by_position(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """New tokens by positions, and page ids in one row."""
    given = append(tensor, tokens, batch, bound)
    places = {name: tensor(name, "int32", tokens) for name in ("positions", "batch_indices")}
    ids = {"page_table": tensor("ids", "int32", 3 * batch + bound), "page_indptr": tensor("sums", "int32", batch + 1)}
    return {**given, **places, **ids, "seq_lens": None, "q_cu_seq_lens": None}


def even_append(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """As many new tokens of each request."""
    new = {name: tensor(name, "bfloat16", batch, 3, 8, 128) for name in ("k", "v")}
    return {**new, **_caches(tensor, "k_cache", "v_cache"), **_lengths(tensor, batch)}


def scaled_append(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """New tokens by positions into an e4m3 cache, with scales of each request."""
    caches = {name: tensor(f"{name}_e4m3", "float8_e4m3fn", 100, 64, 8, 128) for name in ("k_cache", "v_cache")}
    scales = {name: tensor(name, "float32", batch, 8) for name in ("k_scale", "v_scale")}
    return {**append_by_position(tensor, tokens, batch, bound), **caches, **scales}


def decode(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """One token of each request."""
    given = {**_rows(tensor, batch, 64, 128), **_caches(tensor, "k_cache", "v_cache"), **_lengths(tensor, batch)}
    return {**given, "max_seq_len": 1000}


def ragged_decode(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """Draft tokens of different number, with masks."""
    more = {"q_cu_seq_lens": tensor("sums", "int32", batch + 1), "mask": tensor("mask", "uint16", tokens, 2)}
    return {**decode(tensor, tokens, batch, bound), **_rows(tensor, tokens, 64, 128), **more, "max_q_len": bound}


def invariant_decode(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """The same with bits that depend on no other request."""
    return {**ragged_decode(tensor, tokens, batch, bound), "batch_invariant": True}


def even_drafts(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """As many draft tokens of each request, with masks and their log-sum-exp."""
    more = {"mask": tensor("mask", "uint16", batch, 5, 2), "lse": tensor("lse", "float32", batch, 5, 64)}
    return {**decode(tensor, tokens, batch, bound), **_rows(tensor, batch, 5, 64, 128), **more}


def scaled_decode(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """Ragged queries over an e4m3 cache of one of two ranks, with scales of each request."""
    caches = {name: tensor(f"{name}_e4m3", "float8_e4m3fn", 100, 64, 8, 128) for name in ("k_cache", "v_cache")}
    scales = {name: tensor(name, "float32", batch, 8) for name in ("k_scale", "v_scale")}
    ranks = {"global_seq_lens": tensor("all lens", "int32", batch), "cp_world": 2, "cp_rank": 1}
    return {**ragged_decode(tensor, tokens, batch, bound), **caches, **scales, **ranks, "mask": None}


def latent(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """MLA of draft tokens of different number."""
    rows = {"q": tensor("q", "bfloat16", tokens, 16, 576), "out": tensor("out", "bfloat16", tokens, 16, 512)}
    cache = {"kv_cache": tensor("kv_cache", "bfloat16", 100, 64, 576), "softmax_scale": 0.1}
    more = {"q_cu_seq_lens": tensor("sums", "int32", batch + 1), "max_q_len": bound, "max_seq_len": 1000}
    return {**rows, **cache, **_lengths(tensor, batch), **more}


def latent_parts(tensor: Tensors, tokens: int, batch: int, bound: int) -> Arguments:
    """The same with the rope columns of the queries in memory of their own."""
    parts = {"q": tensor("q", "bfloat16", tokens, 16, 512), "q_rope": tensor("q_rope", "bfloat16", tokens, 16, 64)}
    return {**latent(tensor, tokens, batch, bound), **parts}


OPERATORS: Mapping[str, tuple[Callable[..., Any], Callable[..., Arguments]]] = {
    "context_attention over pages": (context_attention, paged_context),
    "context_attention over scaled pages": (context_attention, scaled_context),
    "context_attention over ragged keys": (context_attention, ragged_context),
    "context_attention of even requests": (context_attention, even_context),
    "append_kv": (append_kv, append),
    "append_kv by positions": (append_kv, append_by_position),
    "append_kv of even requests": (append_kv, even_append),
    "append_kv with scales of each request": (append_kv, scaled_append),
    "paged_decode": (paged_decode, decode),
    "paged_decode of ragged queries": (paged_decode, ragged_decode),
    "paged_decode of ragged queries, batch invariant": (paged_decode, invariant_decode),
    "paged_decode of even drafts": (paged_decode, even_drafts),
    "paged_decode over scaled pages": (paged_decode, scaled_decode),
    "mla_decode of ragged queries": (mla_decode, latent),
    "mla_decode of rope columns elsewhere": (mla_decode, latent_parts),
}


def call_of(name: str, tensor: Tensors, runtime: Runtime, tokens: int, batch: int, bound: int) -> Call:
    """A call of so many tokens and requests, with a bound on the tokens of one."""
    function, make = OPERATORS[name]
    return Call.of(function, {**make(tensor, tokens, batch, bound), "workspace": BUFFERS, "runtime": runtime})


def calls_of(name: str, memory: MadeUpMemory, runtime: Runtime, count: int) -> list[Call]:
    """Calls of sizes that are all different."""
    drawn, tensor = random.Random(name), Tensors(memory)
    sizes = dict.fromkeys((drawn.randint(1, 1 << drawn.randint(1, 12)), drawn.randint(1, 80)) for _ in range(4 * count))
    batches = {batch: (max(tokens, batch), batch, drawn.randint(1, 16)) for tokens, batch in sizes}
    return [call_of(name, tensor, runtime, *each) for each in list(batches.values())[:count]]
