"""Models with random weights, in the shape of known ones, and one forward pass that can run again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

COMMON: dict[str, Any] = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
# The layers of the models that give the names; gpt-oss with fewer experts.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": (
        "LlamaConfig",
        {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"hidden_size": 4096, "intermediate_size": 14336},
    ),
    "Qwen3 32B": (
        "Qwen3Config",
        {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
        | {"hidden_size": 5120, "intermediate_size": 25600},
    ),
    "gpt-oss 20B": (
        "GptOssConfig",
        {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
        | {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Gemma 3 12B": (
        "Gemma3TextConfig",
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024}
        | {"hidden_size": 3840, "intermediate_size": 15360},
    ),
}
SMALL: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SMALL |= {"hidden_size": 128, "intermediate_size": 128}


@dataclass(frozen=True)
class Step:
    """One forward pass: ``batch`` requests, ``tokens`` new tokens behind ``past`` ones, in a cache of that kind.

    A dynamic cache grows from pass to pass, as it does in use, and goes back to ``past`` after ``GROWTH`` tokens.
    """

    batch: int
    tokens: int
    past: int
    cache: str


GROWTH = 64
STEPS = (
    Step(1, 4096, 0, "none"),
    Step(1, 1, 4096, "static"),
    Step(32, 1, 4096, "static"),
    Step(1, 1, 4095, "dynamic"),
    Step(32, 1, 4095, "dynamic"),
    Step(1, 512, 0, "none"),
    Step(8, 1024, 0, "none"),
    Step(1, 512, 7680, "static"),
)
SMALL_STEPS = (Step(2, 20, 0, "none"), Step(2, 1, 32, "static"), Step(2, 1, 31, "dynamic"))


def model_of(name: str, layers: int, device: str, small: bool) -> Any:
    """The model, made on the device, where random weights take no time."""
    config_name, shape = SHAPES[name]
    windows = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    config = getattr(transformers, config_name)(
        **COMMON,
        **(shape | SMALL if small else shape),
        **(windows if "sliding_window" in shape else {}),
        num_hidden_layers=layers,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def step_of(model: Any, step: Step) -> Callable[[], torch.Tensor]:
    """A call that runs the step, again and again over the same past, or one that grows."""
    random = torch.Generator(model.device).manual_seed(1)
    new = torch.randint(1, 1024, (step.batch, step.tokens), generator=random, device=model.device)
    if step.cache == "none":
        return lambda: model(new, use_cache=False, logits_to_keep=1).logits
    static = step.cache == "static"
    length = -(-(step.past + step.tokens) // 256) * 256
    # Of a DynamicCache without the configuration every layer keeps all keys.
    cache = StaticCache(config=model.config, max_cache_len=length) if static else DynamicCache()
    shape = (step.batch, model.config.num_key_value_heads, step.past, model.config.head_dim)
    for layer in range(model.config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=random, dtype=model.dtype, device=model.device) for _ in range(2))
        cache.update(keys, values, layer)
    return lambda: _again(model, new, cache, step.past, static)


def _again(model: Any, tokens: Any, cache: Any, past: int, static: bool) -> torch.Tensor:
    if not static:
        grown = cache.get_seq_length() - past
        if grown >= GROWTH:
            cache.crop(-grown)
        return model(tokens, past_key_values=cache, logits_to_keep=1).logits
    for layer in cache.layers:
        # Back to the past: the next step writes its keys where the last one did.
        layer.cumulative_length.fill_(past)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = past
    return model(tokens, past_key_values=cache, logits_to_keep=1).logits
