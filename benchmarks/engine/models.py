"""Models of real shapes with random weights: ``python models.py FOLDER NAME...``.

A name with ``-shape`` writes the configuration alone, of more layers, for vLLM's ``load_format="dummy"``; one with
``-eagle`` a drafter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 32000
SHAPE, EAGLE = "-shape", "-eagle"
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 32768}

LLAMA = COMMON | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"rope_theta": 500000.0, "tie_word_embeddings": False}
# A rank of eight of the 70B model.
LLAMA_RANK = LLAMA | {"hidden_size": 8192, "intermediate_size": 3584, "num_attention_heads": 8}
LLAMA_RANK |= {"num_key_value_heads": 1, "head_dim": 128}
GEMMA = COMMON | {"head_dim": 256, "query_pre_attn_scalar": 256}
GEMMA_4B = GEMMA | {"hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 8, "num_key_value_heads": 4}
# A cap that scores of random weights come near.
GEMMA2 = GEMMA_4B | {"attn_logit_softcapping": 2.0, "sliding_window": 512, "num_hidden_layers": 6}
GEMMA_12B = GEMMA | {"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16}
GEMMA_12B |= {"num_key_value_heads": 8}
QWEN = COMMON | {"hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 768, "head_dim": 128}
QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 4}
GPT_OSS = COMMON | {"hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "sliding_window": 128}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4}
DEEPSEEK = COMMON | {"num_key_value_heads": 128, "num_attention_heads": 128, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"hidden_size": 7168, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
DEEPSEEK |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}  # which vLLM or SGLang asks for
DEEPSEEK_SMALL = DEEPSEEK | {"hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 768}
DEEPSEEK_SMALL |= {"num_key_value_heads": 16, "num_attention_heads": 16, "q_lora_rank": 768}
# V3.2: an indexer chooses the keys of each token, and so few that prompts of the benchmarks are longer.
DEEPSEEK_LISTS = DEEPSEEK_SMALL | {"num_key_value_heads": 64, "num_attention_heads": 64, "index_topk": 512}
DEEPSEEK_LISTS |= {"index_n_heads": 64, "index_head_dim": 128, "num_experts": DEEPSEEK["n_routed_experts"]}
# Lists of the published model's length, and as many heads as ranks of it have; one with a layer that drafts (MTP).
LISTS_OF_2048 = {
    f"deepseek-lists-{name}": DEEPSEEK_LISTS
    | {"index_topk": 2048, "num_attention_heads": heads, "num_key_value_heads": heads, **more}
    for name, heads, more in (
        *((str(heads), heads, {"num_hidden_layers": 4}) for heads in (8, 16, 64, 128)),
        *((f"{heads}-shape", heads, {"num_hidden_layers": 16}) for heads in (8, 16, 64, 128)),
        ("mtp", 16, {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}),
    )
}
# The class of the configuration in transformers, and what it is made from.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA | {"num_hidden_layers": 4}),
    "llama-shape": ("LlamaConfig", LLAMA | {"num_hidden_layers": 32}),
    "llama-half-shape": ("LlamaConfig", LLAMA | {"num_hidden_layers": 16}),
    "llama-rank-shape": ("LlamaConfig", LLAMA_RANK | {"num_hidden_layers": 32}),
    "llama-eagle": ("LlamaConfig", LLAMA | {"num_hidden_layers": 1}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma3": ("Gemma3TextConfig", GEMMA_4B | {"num_hidden_layers": 6, "sliding_window": 512}),
    "gemma3-shape": ("Gemma3TextConfig", GEMMA_12B | {"num_hidden_layers": 48, "sliding_window": 1024}),
    "qwen3moe": ("Qwen3MoeConfig", QWEN | {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}),
    "qwen3moe-shape": (
        "Qwen3MoeConfig",
        QWEN | {"num_hidden_layers": 32, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "gptoss": ("GptOssConfig", GPT_OSS | {"num_hidden_layers": 4, "num_local_experts": 8}),
    "deepseek": ("DeepseekV3Config", DEEPSEEK_SMALL | {"num_hidden_layers": 4}),
    "deepseek-lists": ("DeepseekV32Config", DEEPSEEK_LISTS | {"num_hidden_layers": 4}),
    **{name: ("DeepseekV32Config", sizes) for name, sizes in LISTS_OF_2048.items()},
    "deepseek-shape": ("DeepseekV3Config", DEEPSEEK | {"num_hidden_layers": 16}),
    # Of whose keys a rank has as many as the others.
    "one-kv-head": ("LlamaConfig", LLAMA | {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "one-kv-head-shape": ("LlamaConfig", LLAMA | {"num_hidden_layers": 16, "num_key_value_heads": 1}),
    "alibi-shape": ("BloomConfig", {"hidden_size": 1024, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY}),
    "wide-shape": ("LlamaConfig", LLAMA | {"num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 512}),
    "gptoss-shape": ("GptOssConfig", GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
}


def main() -> None:
    """Write the models, or without arguments print the names of all."""
    if len(sys.argv) == 1:
        print(*CONFIGURATIONS)
    for name in sys.argv[2:]:
        write(Path(sys.argv[1], name), name)


def write(where: Path, name: str) -> None:
    """Write one; its tokenizer is of bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    kind, given = CONFIGURATIONS[name]
    config = getattr(transformers, kind)(**given)
    config.architectures = [kind.removesuffix("Config").removesuffix("Text") + "ForCausalLM"]
    if name.endswith(SHAPE):
        config.dtype = torch.bfloat16
        config.save_pretrained(where)
        return
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter, values in model.named_parameters():
        if "sinks" in parameter:
            torch.nn.init.normal_(values, 0, 1)
    model.generation_config.eos_token_id = None
    if name.endswith(EAGLE):
        model.config.save_pretrained(where)
        save_file(_drafter(model), where / "model.safetensors")
        return
    model.save_pretrained(where)
    if getattr(config, "num_nextn_predict_layers", None) and name.endswith("-mtp"):
        save_file(_mtp_layer(where, config), where / "mtp.safetensors")
    _tokenizer().save_pretrained(where)


def _drafter(model: Any) -> dict[str, Any]:
    """An EAGLE drafter's weights: a layer without its first norm, and what joins embeddings and hidden states."""
    import torch

    hidden = model.config.hidden_size
    weights = {
        name.removeprefix("model."): values.contiguous()
        for name, values in model.state_dict().items()
        if name.startswith("model.layers.") and "layers.0.input_layernorm" not in name
    }
    joined = torch.randn(hidden, 2 * hidden, dtype=torch.bfloat16, device="cuda") * 0.02
    return {**weights, "fc.weight": joined}


def _mtp_layer(where: Path, config: Any) -> dict[str, Any]:
    """Weights of a layer that drafts (MTP): those of the last layer, and what joins embeddings and hidden states."""
    import torch
    from safetensors.torch import load_file

    weights, last = load_file(where / "model.safetensors"), f"model.layers.{config.num_hidden_layers - 1}."
    layer, hidden = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
    copied = {name.replace(last, layer): values for name, values in weights.items() if name.startswith(last)}
    copied |= {
        f"{layer}{name}.weight": torch.ones(hidden).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")
    }
    copied[f"{layer}eh_proj.weight"] = (torch.randn(hidden, 2 * hidden) * 0.02).bfloat16()
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return copied | {f"{layer}{name}.weight": weights[f"{of}.weight"].clone() for name, of in shared.items()}


def _tokenizer() -> Any:
    """A token per byte, then names that no text has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: number for number, character in enumerate(alphabet)}
    tokens |= {f"<{number}>": number for number in range(len(alphabet), VOCABULARY)}
    made = Tokenizer(models.BPE(tokens, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<300>")


if __name__ == "__main__":
    main()
