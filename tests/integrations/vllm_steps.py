"""Steps of vLLM for our backend: metadata, builders, layers and caches of its real classes.

Whoever imports this needs vLLM's Python files; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from absent_modules import in_place_of

# Of vLLM's server, which its configuration imports.
with in_place_of("llguidance", "openai_harmony", "opentelemetry", "uvloop", "xgrammar"):
    from vllm.config import ParallelConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

    from cubin_runtime.integrations.vllm import NAME, register

    register()
    register()  # as in a process that loads its plugins again
    BACKEND = AttentionBackendEnum[NAME].get_class()

BF16, INT32 = torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, MAX_LEN = 8, 2, 128, 16, 40, 128


def step(q_lens: list[int], kv_lens: list[int], padded: int = 0, **changed: Any) -> CommonAttentionMetadata:
    """The metadata of requests with these lengths, decodes first, then ``padded`` requests without a token."""
    q_lens, kv_lens = q_lens + [0] * padded, kv_lens + [0] * padded
    starts = torch.tensor([0, *q_lens], dtype=INT32).cumsum(0).to(INT32)
    columns = MAX_LEN // BLOCK
    given = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": torch.tensor(kv_lens, dtype=INT32),
        "num_reqs": len(q_lens),
        "num_actual_tokens": int(starts[-1]) + padded,
        "max_query_len": max(q_lens),
        "max_seq_len": max(kv_lens),
        "block_table_tensor": torch.arange(len(q_lens) * columns, dtype=INT32).view(-1, columns) % BLOCKS,
        "slot_mapping": torch.arange(int(starts[-1])),
    }
    return CommonAttentionMetadata(**{**given, **changed})


def builder(backend: Any, **configured: Any) -> Any:
    """The builder of a backend's metadata; ``configured`` are further parts of vLLM's configuration."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=BF16)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        speculative_config=None,
        parallel_config=ParallelConfig(),
        **configured,
    )
    return backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))


def layer(backend: Any, **changed: Any) -> Any:
    given = {"num_heads": HEADS, "head_size": DIM, "scale": 0.125, "num_kv_heads": KV_HEADS}
    made = backend.get_impl_cls()(**{**given, **changed})
    made.process_weights_after_loading(BF16)
    return made


def cache(layout: KVCacheLayout = KVCacheLayout.LBHNC) -> Any:
    """A layer's view ``[blocks, kv_heads, block_size, 2 * head_size]`` of a cache of two layers in a layout."""
    logical = (2, BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    physical = torch.zeros([logical[axis] for axis in layout.stride_order], dtype=BF16)
    inverse = [layout.stride_order.index(axis) for axis in range(5)]
    return physical.permute(inverse)[1]


def run(backend: Any, metadata: CommonAttentionMetadata, kv_cache: Any = None, **options: Any) -> tuple[Any, Any]:
    """A forward pass; its query and its metadata, which keep the tensors alive that the launches point to."""
    query = torch.zeros(metadata.num_actual_tokens, HEADS, DIM, dtype=BF16)
    built = builder(backend).build(0, metadata)
    kv_cache = cache() if kv_cache is None else kv_cache
    made, out = layer(backend, **options), torch.empty_like(query)
    assert made.forward(None, query, None, None, kv_cache, built, out) is out
    return (query, out, kv_cache, made), built
