"""Steps of vLLM for our backend: metadata, builders, layers and caches of its real classes.

Whoever imports this needs vLLM's Python files; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.absent_modules import in_place_of

# Packages of vLLM's server, which its configuration imports.
OF_THE_SERVER = ("llguidance", "openai_harmony", "opentelemetry", "uvloop", "xgrammar")
with in_place_of(*OF_THE_SERVER):
    import vllm.v1.utils  # noqa: F401  (builders of old versions import it late)
    from vllm.config import ParallelConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from cubin_runtime.integrations.vllm import NAME, register

    register()
    register()  # as in a process that loads its plugins again
    # Before 0.32 the registry takes no new names.
    REGISTERED = NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"
    BACKEND = AttentionBackendEnum[REGISTERED].get_class()

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


def speculative(drafts: int | None) -> Any:
    """vLLM's configuration of a drafter of so many tokens; None: there is none."""
    if drafts is None:
        return None
    return SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, method="eagle")


def chosen(monkeypatch: Any, **sizes: Any) -> Any:
    """The class that vLLM's selector has for a layer of the current configuration, once more from its memory."""
    from vllm import platforms
    from vllm.v1.attention import selector

    def get_attn_backend_cls(backend: Any, attn_selector_config: Any, num_heads: Any) -> str:
        given = attn_selector_config._asdict()
        reasons = backend.get_class().validate_configuration(device_capability=DeviceCapability(9, 0), **given)
        if reasons:
            raise ValueError(reasons)
        return str(backend.get_path())

    monkeypatch.setattr(platforms, "_current_platform", SimpleNamespace(get_attn_backend_cls=get_attn_backend_cls))
    return selector.get_attn_backend(dtype=BF16, kv_cache_dtype="auto", **sizes)


def builder(
    backend: Any, value_size: int = DIM, drafts: int | None = None, enable_dbo: bool = False, **configured: Any
) -> Any:
    """The builder of a backend's metadata; ``configured`` are further parts of vLLM's configuration."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, head_size_v=value_size, dtype=BF16)
    parallel = ParallelConfig()
    parallel.enable_dbo = enable_dbo
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        speculative_config=speculative(drafts),
        parallel_config=parallel,
        **configured,
    )
    return backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))


def layer(backend: Any, **changed: Any) -> Any:
    given = {"num_heads": HEADS, "head_size": DIM, "scale": 0.125, "num_kv_heads": KV_HEADS}
    made = backend.get_impl_cls()(**{**given, **changed})
    made.process_weights_after_loading(BF16)
    return made


def layouts(backend: Any) -> dict[str, tuple[int, ...]]:
    """Layouts of the cache by name, as the order of layers, blocks, KV heads, tokens and content in memory."""
    if hasattr(backend, "supported_kv_cache_layouts"):
        return {layout.name: layout.stride_order for layout in backend.supported_kv_cache_layouts()}
    from vllm.v1.attention.backends.utils import set_kv_cache_layout

    orders = {}
    for asked, name in (("HND", "HNC"), ("NHD", "NHC")):
        set_kv_cache_layout(asked)
        order = backend.get_kv_cache_stride_order()
        orders[f"LB{name}"] = (0, *(1 + axis for axis in order))
        orders[f"BL{name}"] = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    set_kv_cache_layout(None)
    return orders


def cache(order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Any:
    """A layer's view ``[blocks, kv_heads, block_size, 2 * head_size]`` of a cache of two layers, in ``layouts``."""
    logical = (2, BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    physical = torch.zeros([logical[axis] for axis in order], dtype=BF16)
    return physical.permute([order.index(axis) for axis in range(5)])[1]


def run(backend: Any, metadata: CommonAttentionMetadata, kv_cache: Any = None, **options: Any) -> tuple[Any, Any]:
    """A forward pass; its query and its metadata, which keep the tensors alive that the launches point to."""
    query = torch.zeros(metadata.num_actual_tokens, HEADS, DIM, dtype=BF16)
    built = builder(backend).build(0, metadata)
    kv_cache = cache() if kv_cache is None else kv_cache
    made, out = layer(backend, **options), torch.empty_like(query)
    assert made.forward(None, query, None, None, kv_cache, built, out) is out
    return (query, out, kv_cache, made), built
