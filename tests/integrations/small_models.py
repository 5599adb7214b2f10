"""Models of known shapes with random weights, a few layers deep, and comparisons of their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

VOCABULARY = 128
WINDOW = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SHAPE, **LAYERS, num_local_experts=4, num_experts_per_tok=4)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, "head_dim": 128}, **LAYERS)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, **LAYERS, attn_logit_softcapping=5.0)),
}
# What each is compared with: sdpa has neither sinks nor a soft cap.
PEERS = {"llama": "sdpa", "qwen3": "sdpa", "gpt_oss": "eager", "gemma3": "sdpa", "gemma2": "eager"}


def made(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The model in eval mode; weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                weight.mul_(6)
            elif "sinks" in key:
                weight.normal_(0, 2)
    return model.to(device=device, dtype=dtype).eval()


def prompts(batch: int, length: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator).to(device)


def steps(model: Any, tokens: torch.Tensor, cuts: list[int], cache: Any, mask: Any = None) -> list[torch.Tensor]:
    """Teacher-forced logits of the pieces of ``tokens`` that end at ``cuts``, one call each."""
    found, start = [], 0
    for end in cuts:
        seen = None if mask is None else mask[:, :end]
        positions = None if mask is None else (seen.cumsum(1) - 1).clamp(min=0)[:, start:end]
        with torch.no_grad():
            result = model(tokens[:, start:end], past_key_values=cache, attention_mask=seen, position_ids=positions)
        found.append(result.logits.float())
        start = end
    return found


def generated_continuously(
    model: Any, implementation: str, requests: list[list[int]], count: int = 20, **changed: Any
) -> list[list[int]]:
    """Tokens of each request from ``generate_batch``; prompts are cut into chunks, and mixed with decoding."""
    model.set_attn_implementation(implementation)
    batching = {"block_size": 16, "num_blocks": 64, "max_batch_tokens": 24, **changed}
    try:
        results = model.generate_batch(
            requests,
            generation_config=GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**batching),
            progress_bar=False,
        )
    except ValueError as error:
        if "not supported for continuous batching" in str(error):
            pytest.skip(f"this transformers has continuous batching for its own names alone: {error}")
        raise
    found = sorted(results.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
    return [result.generated_tokens for result in found]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Logits within ``tolerance`` of the largest, and the same greedy token wherever its margin is larger than that."""
    scale = float(theirs.abs().max())
    assert torch.isfinite(ours).all()
    error = float((ours - theirs).abs().max()) / scale
    assert error <= tolerance, f"logits differ by {error:.2e} of the largest, expected {tolerance:.2e}"
    first, second = theirs.topk(2, dim=-1).values.unbind(-1)
    decided = first - second > 2 * tolerance * scale
    assert (ours.argmax(-1) == theirs.argmax(-1))[decided].all()
