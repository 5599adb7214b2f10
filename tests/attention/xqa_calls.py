"""Calls of the XQA operators: 4 requests, 64 heads over 8 KV heads of 128, 100 pages of 64 tokens, bf16; and MLA."""

from __future__ import annotations

from typing import Any

from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA, PAGED_DECODE_TMA_E4M3
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory, mla_arguments

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES, COLUMNS = 64, 8, 128, 64, 100, 16
CACHE = (PAGES, PAGE, KV_HEADS, HEAD_DIM)
SEMAPHORE_BYTES = 8 << 20


def xqa_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``xqa``, with more semaphores than any kernel of ours needs."""
    given = {
        "q": memory.tensor("bfloat16", 4, 1, HEADS, HEAD_DIM),
        "k_cache": memory.tensor("bfloat16", *CACHE),
        "v_cache": memory.tensor("bfloat16", *CACHE),
        "page_table": memory.tensor("int32", 4, COLUMNS),
        "seq_lens": memory.tensor("uint32", 4, 1),
        "output": memory.tensor("bfloat16", 4, 1, HEADS, HEAD_DIM),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "semaphores": memory.tensor("uint32", 2 << 20),
        "num_kv_heads": KV_HEADS,
        "page_size": PAGE,
    }
    return {**given, **changes}


def xqa_batch_arguments(memory: MadeUpMemory, tokens: int = 4, **changes: Any) -> dict[str, Any]:
    """Of ``xqa_batch_decode_with_kv_cache``, in its default layout."""
    given = {
        "query": memory.tensor("bfloat16", tokens, HEADS, HEAD_DIM),
        "kv_cache": memory.tensor("bfloat16", PAGES, 2, *CACHE[1:]),
        "workspace_buffer": memory.tensor("uint8", 128 << 20),
        "block_tables": memory.tensor("int32", 4, COLUMNS),
        "seq_lens": memory.tensor("uint32", 4),
        "max_seq_len": 1000,
    }
    return {**given, **changes}


def trtllm_arguments(memory: MadeUpMemory, tokens: int = 4, **changes: Any) -> dict[str, Any]:
    """Of ``trtllm_batch_decode_with_kv_cache``, in its default layout."""
    hnd = memory.tensor("bfloat16", PAGES, 2, KV_HEADS, PAGE, HEAD_DIM)
    given = xqa_batch_arguments(memory, tokens, kv_cache=hnd, seq_lens=memory.tensor("int32", 4))
    return {**given, **changes}


def xqa_mla_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``xqa_mla``: 4 requests, 128 heads, 1024 pages of 64 tokens."""
    cache = memory.tensor("bfloat16", 1024, 64, 576)
    given = {
        "q": memory.tensor("bfloat16", 4, 1, 128, 576),
        "k_cache": cache,
        "v_cache": cache,
        "page_table": memory.tensor("int32", 4, 256),
        "seq_lens": memory.tensor("uint32", 4, 1),
        "output": memory.tensor("bfloat16", 4, 1, 128, 512),
        "workspace_buffer": memory.tensor("uint8", 256 << 20),
        "semaphores": memory.tensor("uint32", 2 << 20),
        "page_size": 64,
    }
    return {**given, **changes}


def mla_batch_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``xqa_batch_decode_with_kv_cache_mla`` and, with one token per request, of the other MLA operator."""
    return {**mla_arguments(memory, query=memory.tensor("bfloat16", 4, 1, 128, 576)), **changes}


def mla_list_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``trtllm_batch_decode_with_kv_cache_mla`` over lists: 4 requests of 2 tokens, 256 entries each."""
    given = {"block_tables": memory.tensor("int32", 4, 2, 256), "sparse_mla_top_k": 256}
    return mla_arguments(memory, 16, **{**given, **changes})


def mla_list_arguments_of_656_bytes(memory: MadeUpMemory, requests: int = 4, heads: int = 16) -> dict[str, Any]:
    """Of the same with one token per request, an output and the sizes of lists."""
    return mla_list_arguments(
        memory,
        query=memory.tensor("bfloat16", requests, 1, heads, 576),
        kv_cache=memory.tensor("uint8", 1024, 1, 64, 656),
        block_tables=memory.tensor("int32", requests, 1, 256),
        seq_lens=memory.tensor("int32", requests),
        out=memory.tensor("bfloat16", requests, 1, heads, 512),
        lse=memory.tensor("float32", requests, 1, heads),
        sinks=[memory.tensor("float32", heads)],
        kv_scale_format="arbitrary_fp32",
    )


def mla_list_arguments_of_ragged_queries(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of the same with 7 tokens of 4 requests."""
    given = {
        "query": memory.tensor("bfloat16", 7, 16, 576),
        "block_tables": memory.tensor("int32", 7, 256),
        "cum_seq_lens_q": memory.tensor("int32", 5),
        "max_q_len": 3,
    }
    return mla_list_arguments(memory, **{**given, **changes})


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch, as they arrived."""
    params = bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"])
    over_e4m3 = len(params) == PAGED_DECODE_TMA_E4M3.size
    return (PAGED_DECODE_TMA_E4M3 if over_e4m3 else PAGED_DECODE_TMA).unpack(params)
