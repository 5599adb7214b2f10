"""Steps of vLLM for our MLA backend: configurations, metadata builders, layers and caches of its real classes.

Whoever imports this needs vLLM's Python files; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.vllm_steps import (  # first: it imports vLLM
    BF16,
    REGISTERED,
    AttentionBackendEnum,
    ParallelConfig,
    step,
)

# isort: split
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MLAAttentionSpec

LATENT, ROPE, HEADS, BLOCK, BLOCKS, MAX_LEN = 512, 64, 16, 64, 12, 256
SCALE = 192**-0.5
__all__ = ["BF16", "step"]


def configuration(**changed: Any) -> Any:
    """What the backend reads of vLLM's configuration of a model with MLA."""
    dims = {"q_lora_rank": 64, "kv_lora_rank": LATENT, "qk_nope_head_dim": 128, "qk_rope_head_dim": ROPE}
    dims |= {"v_head_dim": 128} | {name: changed.pop(name) for name in [*dims] if name in changed}
    heads, drafts = changed.pop("heads", HEADS), changed.pop("drafts", None)
    lists = {name: changed.pop(name) for name in ["index_topk"] if name in changed}
    parallel = ParallelConfig()
    for name in ("decode_context_parallel_size", "cp_kv_cache_interleave_size"):
        setattr(parallel, name, changed.pop(name, 1))
    parallel.enable_dbo = changed.pop("enable_dbo", False)
    model = SimpleNamespace(
        max_model_len=changed.pop("max_model_len", MAX_LEN),
        use_mla=True,
        dtype=BF16,
        hf_text_config=SimpleNamespace(**dims, **lists),
        hf_config=SimpleNamespace(**lists),
        model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
        get_num_attention_heads=lambda _: heads,
        get_head_size=lambda: dims["kv_lora_rank"] + dims["qk_rope_head_dim"],
    )
    cache = {"cache_dtype": "auto", "block_size": BLOCK, "calculate_kv_scales": False}
    cache |= {name: changed.pop(name) for name in [*cache] if name in changed}
    layer = SimpleNamespace(prefill_backend=SimpleNamespace(clone=lambda: None), **dims)
    parts = {
        "model_config": model,
        "parallel_config": parallel,
        "cache_config": SimpleNamespace(**cache),
        "scheduler_config": SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=64),
        "compilation_config": SimpleNamespace(static_forward_context={"layer": layer}),
        "attention_config": SimpleNamespace(use_prefill_query_quantization=False, hisparse_config=None),
        "speculative_config": drafts and SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False),
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**{**parts, **changed})


def use(monkeypatch: Any, config: Any) -> Any:
    """Make ``config`` the current one, as while vLLM makes its layers; the class that it chooses for them."""
    monkeypatch.setattr(importlib.import_module("vllm.config.vllm"), "_current_vllm_config", config)
    return AttentionBackendEnum[REGISTERED].get_class()


def reasons(backend: Any, **changed: Any) -> list[str]:
    """What vLLM's own check says against a layer that the backend is made for, with what is changed of it."""
    given = {
        "head_size": LATENT + 64,
        "dtype": BF16,
        "kv_cache_dtype": "auto",
        "block_size": BLOCK,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": backend.is_sparse(),
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
    }
    found: list[str] = backend.validate_configuration(**{**given, **changed})
    return found


def builder(backend: Any, config: Any, device: str = "cpu") -> Any:
    size, block = config.model_config.get_head_size(), config.cache_config.block_size
    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=BF16)
    return backend.get_builder_cls()(spec, ["layer"], config, torch.device(device))


def layer_of(backend: Any, config: Any, device: str = "cpu", **changed: Any) -> Any:
    """A layer whose projection, which only prompts use, lies on the device."""
    dims = {name: value for name, value in vars(config.model_config.hf_text_config).items() if name != "index_topk"}
    given = {
        "num_heads": config.model_config.get_num_attention_heads(None),
        "head_size": config.model_config.get_head_size(),
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        **dims,
        "qk_head_dim": dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"],
        "kv_b_proj": torch.nn.Linear(8, 8, bias=False, device=device),
    }
    return backend.get_impl_cls()(**{**given, **changed})


def cache_of(config: Any) -> Any:
    """A layer's cache ``[blocks, block_size, columns]``, as the layer passes it on."""
    quantized, block = config.cache_config.cache_dtype.startswith("fp8"), config.cache_config.block_size
    cache = torch.zeros(BLOCKS, block, config.model_config.get_head_size(), dtype=torch.uint8 if quantized else BF16)
    return cache.view(torch.float8_e4m3fn) if quantized else cache


def queries(config: Any, tokens: int) -> Any:
    """Queries as the layer passes them on: a pair of which the first is transposed, or e4m3 ones in one piece."""
    heads = config.model_config.get_num_attention_heads(None) * config.parallel_config.decode_context_parallel_size
    latent = config.model_config.hf_text_config.kv_lora_rank
    if config.cache_config.cache_dtype.startswith("fp8"):
        return torch.zeros(tokens, heads, latent + ROPE).to(torch.float8_e4m3fn)
    if config.parallel_config.decode_context_parallel_size > 1:
        return torch.zeros(tokens, heads, latent + ROPE, dtype=BF16)
    return torch.zeros(heads, tokens, latent, dtype=BF16).transpose(0, 1), torch.zeros(tokens, heads, ROPE, dtype=BF16)


def run(monkeypatch: Any, config: Any, metadata: Any, scales: Any = None) -> tuple[Any, Any, Any]:
    """A forward pass of the decodes of a step: what it returned, its metadata, and the tensors to keep alive."""
    backend = use(monkeypatch, config)
    built = builder(backend, config).build(0, metadata)
    made, kv_cache, q = layer_of(backend, config), cache_of(config), queries(config, built.num_decode_tokens)
    scales = scales or SimpleNamespace(_k_scale_float=1.0, _q_scale_float=1.0)
    return made.forward_mqa(q, kv_cache, built, scales), built, (made, kv_cache, q)
