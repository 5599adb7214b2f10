"""Every causal model of transformers, and every decoder of an image-text model, with a small random configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()

HEADS, HEAD_DIM, WINDOW, VOCABULARY = 4, 64, 16, 128
HIDDEN = HEADS * HEAD_DIM
MOST_PARAMETERS = 6e7
_QUERIES_AND_KEYS = ("q_proj", "k_proj", "query", "key", "c_attn", "qkv", "Wqkv", "q_b_proj", "kv_b_proj")

# What a configuration is given where it has an attribute of the name. All experts are active, so that bf16 changes no
# choice of experts, whose effect on the logits is larger than that of attention.
_TEXT: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "n_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "d_kv": HEAD_DIM,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rotary_dim": HEAD_DIM,
    "block_size": WINDOW,
    "num_random_blocks": 2,
    "attention_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "depth": 2,
    "embed_dim": 64,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
}
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "width", "out_hidden_size", "output_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1),
    **dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 64),
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_EVEN_IF_NONE = ("pad_token_id", "num_experts_per_tok")
# Configurations whose own rules ask for other values.
_WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}  # sections of rotary embeddings for 128 columns
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS = {
    **_WIDE,
    "head_dim": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
}
_OWN: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "ernie4_5_vl_moe": {"text_config": {**_WIDE, "head_dim": 128, "moe_intermediate_size": [64, 64]}},
    "hunyuan_vl": {"text_config": {"head_dim": HEAD_DIM}},
    "longcat_flash": {"ffn_hidden_size": 128, "expert_ffn_hidden_size": 64, "zero_expert_num": 0},
    "mamba2": {"num_heads": 2 * HEADS},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "glm4v_moe": {"text_config": {**_WIDE, "head_dim": 128, "partial_rotary_factor": 0.5}},
    "qwen2_vl": {"text_config": _WIDE},
    "qwen2_5_vl": {"text_config": _WIDE},
    "qwen2_5_omni_thinker": {"text_config": _WIDE},
    "paddleocr_vl": {"text_config": {**_WIDE, "head_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 4},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}


def names() -> dict[str, str]:
    """Type of model -> its class: all causal models, then the image-text models that are none of these."""
    causal, image = (
        dict(mapping)
        for mapping in (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
    )
    both = {**{kind: name for kind, name in image.items() if kind not in causal}, **causal}
    both = {kind: both[kind] for kind in (*causal, *(kind for kind in image if kind not in causal))}
    return {kind: name if isinstance(name, str) else name[0] for kind, name in both.items()}


def configuration(kind: str) -> Any:
    """A small configuration of a type of model: the first whose rules, and those of its model, allow it.

    Raises:
        Exception: of whatever kind transformers has for the last attempt.
    """
    error: Exception | None = None
    for dropped in _attempts():
        try:
            config = _configuration(kind, dropped)
            count = _parameters(kind, config)
        except Exception as failure:
            error = error or failure
            continue
        if count <= MOST_PARAMETERS:
            return config
        error = error or ValueError(f"{count} parameters with a small configuration")
    assert error is not None
    raise error


def model_of(kind: str) -> Any:
    """The model in float32, in eval mode; weights large enough that attention is far from uniform.

    Raises:
        Exception: as ``configuration``.
    """
    config = configuration(kind)
    torch.manual_seed(0)
    model = getattr(transformers, names()[kind])(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and any(part in key for part in _QUERIES_AND_KEYS):
                weight.mul_(6)
            elif "sinks" in key:
                weight.normal_(0, 2)
    return model


def _configuration(kind: str, dropped: tuple[str, ...]) -> Any:
    config = _smaller(CONFIG_MAPPING[kind], _TEXT, _OWN.get(kind, {}), dropped)
    wanted = getattr(transformers, names()[kind]).config_class
    if not isinstance(config, wanted) and isinstance(config.get_text_config(), wanted):
        config = config.get_text_config()  # as AutoModelForCausalLM does
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    config._attn_implementation = "eager"
    return config


def _parameters(kind: str, config: Any) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in getattr(transformers, names()[kind])(config).parameters())


def _smaller(cls: Any, values: dict[str, Any], own: dict[str, Any], dropped: tuple[str, ...]) -> Any:
    probe = cls()
    parts = {}
    for name in getattr(cls, "sub_configs", {}):
        part = getattr(probe, name, None)
        if part is not None and name not in own.get("whole", ()):
            language = any(word in name for word in ("text", "decoder", "llm", "language", "thinker"))
            parts[name] = _smaller(type(part), _TEXT if language else _VISION, own.get(name, {}), dropped)
    changed = {name: value for name, value in values.items() if _has(probe, name)}
    if values is _TEXT:
        changed |= _layers(probe)
        if "kv_lora_rank" in changed and "num_key_value_heads" in changed:
            changed["num_key_value_heads"] = HEADS  # latent attention: keys of every head
        if "mrope_section" in str(getattr(probe, "rope_parameters", "")):  # sections of 128 columns
            changed |= _WIDE | ({"head_dim": 128} if _has(probe, "head_dim") else {})
    kept = {name: value for name, value in changed.items() if name not in dropped}
    return cls(**{**kept, **{name: value for name, value in own.items() if name != "whole"}, **parts})


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None or (name in _EVEN_IF_NONE and hasattr(config, name))
    except Exception:  # an attribute that differs by layer
        return True


def _layers(config: Any) -> dict[str, Any]:
    """One layer of each kind that the configuration has, two at least."""
    try:
        kinds = list(dict.fromkeys(config.layer_types))
    except Exception:
        return {}
    kinds = kinds * math.ceil(2 / max(len(kinds), 1))
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)} if kinds else {}


def _attempts() -> Iterator[tuple[str, ...]]:
    """Names that keep their own value: none, then a few together, then each alone."""
    yield ()
    yield from (("head_dim",), ("num_key_value_heads",), ("layer_types",), ("num_hidden_layers", "layer_types"))
    yield ("head_dim", "num_key_value_heads", "layer_types")
    yield ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
    yield from ((name,) for name in dict.fromkeys((*_TEXT, *_VISION)))
