"""Calls of flash-attention's functions: 3 requests, 8 query heads over 2 KV heads of 128, bf16."""

from __future__ import annotations

from typing import Any

from cubin_runtime.kernels.native.prefill.params import CONTEXT_ATTENTION
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory

BATCH, HEADS, KV_HEADS, DIM = 3, 8, 2, 128
TOKENS, KV_TOKENS, PAGES, PAGE, COLUMNS = 300, 900, 100, 64, 16


def even_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``flash_attn_func``: 100 query tokens and 300 keys of each request."""
    given = {
        "q": memory.tensor("bfloat16", BATCH, 100, HEADS, DIM),
        "k": memory.tensor("bfloat16", BATCH, 300, KV_HEADS, DIM),
        "v": memory.tensor("bfloat16", BATCH, 300, KV_HEADS, DIM),
    }
    return {**given, **changes}


def varlen_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``flash_attn_varlen_func``."""
    given = {
        "q": memory.tensor("bfloat16", TOKENS, HEADS, DIM),
        "k": memory.tensor("bfloat16", KV_TOKENS, KV_HEADS, DIM),
        "v": memory.tensor("bfloat16", KV_TOKENS, KV_HEADS, DIM),
        "cu_seqlens_q": memory.tensor("int32", BATCH + 1),
        "cu_seqlens_k": memory.tensor("int32", BATCH + 1),
        "max_seqlen_q": 128,
        "max_seqlen_k": 512,
    }
    return {**given, **changes}


def paged_varlen_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``flash_attn_varlen_func`` over pages, with lengths that are there."""
    given = {
        "k": memory.tensor("bfloat16", PAGES, PAGE, KV_HEADS, DIM),
        "v": memory.tensor("bfloat16", PAGES, PAGE, KV_HEADS, DIM),
        "cu_seqlens_k": None,
        "seqused_k": memory.tensor("int32", BATCH),
        "block_table": memory.tensor("int32", BATCH, COLUMNS),
    }
    return varlen_arguments(memory, **{**given, **changes})


def cache_arguments(memory: MadeUpMemory, q_len: int = 1, **changes: Any) -> dict[str, Any]:
    """Of ``flash_attn_with_kvcache`` over pages."""
    given = {
        "q": memory.tensor("bfloat16", BATCH, q_len, HEADS, DIM),
        "k_cache": memory.tensor("bfloat16", PAGES, PAGE, KV_HEADS, DIM),
        "v_cache": memory.tensor("bfloat16", PAGES, PAGE, KV_HEADS, DIM),
        "cache_seqlens": memory.tensor("int32", BATCH),
        "block_table": memory.tensor("int32", BATCH, COLUMNS),
    }
    return {**given, **changes}


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the only launch, a context attention."""
    (launch,) = standin.calls("cuLaunchKernelEx")
    return CONTEXT_ATTENTION.unpack(bytes.fromhex(launch.seen["parameter0"]))
