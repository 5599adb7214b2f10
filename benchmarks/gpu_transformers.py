"""transformers' models on our attention beside sdpa, eager and flash-attention: steps and continuous batching.

Run: ``python benchmarks/gpu_transformers.py --out DIR`` on a machine with a Hopper GPU and transformers 5. The models
have the attention shapes of known models, a few layers and random weights; all implementations run one model in one
process, interleaved. A step is timed as transformers runs it (``us``), and replayed from a CUDA graph where it can be
captured (``graph_us``), which leaves out the host. An implementation that is not installed or not able gives its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, set_default_runtime
from cubin_runtime.integrations.transformers import register

ROUNDS, CALLS = 5, 10  # without a GPU: 1
COMMON: dict[str, Any] = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
# Attention as in the models that give the names; the rest is narrow, so that attention is seen.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("LlamaConfig", {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}),
    "Qwen3 32B": ("Qwen3Config", {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}),
    "gpt-oss 20B": (
        "GptOssConfig",
        {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
        | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Gemma 3 12B": (
        "Gemma3TextConfig",
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024},
    ),
}
PEERS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Step:
    """One forward pass: ``batch`` requests, ``tokens`` new tokens behind ``past`` ones, in a cache of that kind."""

    batch: int
    tokens: int
    past: int
    cache: str


STEPS = (
    Step(1, 4096, 0, "none"),
    Step(8, 1024, 0, "none"),
    Step(1, 512, 8192, "static"),
    Step(1, 1, 8192, "static"),
    Step(32, 1, 4096, "static"),
    Step(1, 1, 8191, "dynamic"),
    Step(32, 1, 4095, "dynamic"),
)
SMALL_STEPS = (Step(2, 20, 0, "none"), Step(2, 1, 32, "static"), Step(2, 1, 31, "dynamic"))


def model_of(name: str, layers: int, device: str, small: bool) -> Any:
    config_name, shape = SHAPES[name]
    if small:
        shape = {**shape, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    windows = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    config = getattr(transformers, config_name)(
        **COMMON,
        **shape,
        **(windows if "sliding_window" in shape else {}),
        hidden_size=128 if small else 1024,
        intermediate_size=128 if small else 1024,
        num_hidden_layers=layers,
        max_position_embeddings=16384,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def step_of(model: Any, step: Step) -> Callable[[], torch.Tensor]:
    """A call that runs the step, again and again over the same past."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 1024, (step.batch, step.past + step.tokens), generator=generator).to(model.device)
    old, new = tokens[:, : step.past], tokens[:, step.past :]
    if step.cache == "none":
        return lambda: model(new, use_cache=False, logits_to_keep=1).logits
    static = step.cache == "static"
    length = -(-(step.past + step.tokens) // 256) * 256
    cache = StaticCache(config=model.config, max_cache_len=length) if static else DynamicCache()
    # In pieces, for eager's mask: of a DynamicCache without the configuration every layer keeps all keys.
    for piece in old.split(1024, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return lambda: _again(model, new, cache, step.past, static)


def _again(model: Any, tokens: Any, cache: Any, past: int, static: bool) -> torch.Tensor:
    if not static:
        cache.crop(past - cache.get_seq_length())
        return model(tokens, past_key_values=cache, logits_to_keep=1).logits
    for layer in cache.layers:
        # Back to the past: the next step writes its keys where the last one did.
        layer.cumulative_length.fill_(past)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = past
    return model(tokens, past_key_values=cache, logits_to_keep=1).logits


def timed_us(call: Callable[[], Any], device: str) -> float:
    """The median over rounds of the time of one call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    repeats, calls = (ROUNDS, CALLS) if device == "cuda" else (1, 1)
    call()
    rounds = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        rounds.append((time.perf_counter() - begin) / calls)
    return 1e6 * statistics.median(rounds)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def outcome(measure: Callable[[], Any]) -> Any:
    """What was measured, or the error of an implementation that is not there or not able."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else type(error).__name__


def step_times(model: Any, step: Step, implementation: str, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """The last logits of the step, and its times."""
    model.set_attn_implementation(implementation)
    call = step_of(model, step)
    logits, times = call().float(), {"us": timed_us(call, device)}
    if device == "cuda" and step.cache != "dynamic":
        times["graph_us"] = outcome(lambda: timed_us(captured(step_of(model, step)), device))
    return logits, times


def step_row(model: Any, name: str, step: Step, implementations: tuple[str, ...], device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "layers": model.config.num_hidden_layers, **asdict(step)}
    found = {each: outcome(partial(step_times, model, step, each, device)) for each in implementations}
    logits = [result[0] for result in found.values() if isinstance(result, tuple)]
    if isinstance(found[implementations[0]], tuple) and len(logits) > 1:
        ours, peer = logits[:2]
        row["largest_difference"] = float((ours - peer).abs().max() / peer.abs().max())
    return {
        **row,
        "times": {each: result[1] if isinstance(result, tuple) else result for each, result in found.items()},
    }


def batching_row(model: Any, name: str, implementations: tuple[str, ...], small: bool) -> dict[str, Any]:
    """``generate_batch`` of ragged requests: tokens made per second."""
    generator = torch.Generator().manual_seed(2)
    count, longest, new = (4, 40, 8) if small else (64, 2048, 128)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    requests = [torch.randint(1, 1024, (length,), generator=generator).tolist() for length in lengths]
    blocks = {"block_size": 16 if small else 256, "num_blocks": 64 if small else 1024}
    batching = {**blocks, "max_batch_tokens": 64 if small else 2048, "use_cuda_graph": False}

    def run(implementation: str) -> float:
        model.set_attn_implementation(f"paged|{implementation}")
        options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        results = model.generate_batch(
            requests,
            generation_config=options,
            continuous_batching_config=ContinuousBatchingConfig(**batching),
            progress_bar=False,
        )
        made = sum(len(result.generated_tokens) for result in results.values())
        if made != count * new:
            raise RuntimeError(f"{made} tokens, expected {count * new}")
        return made / (time.perf_counter() - begin)

    # The second run: the first loads kernels.
    found = {each: outcome(lambda each=each: [run(each), run(each)][1]) for each in implementations}
    return {"model": name, "requests": count, "longest_prompt": longest, "new": new, "tokens_per_s": found}


@torch.no_grad()
def measured(ours: str, device: str = "cuda", layers: int = 8, names: Iterable[str] = SHAPES) -> dict[str, Any]:
    """Both measurements; small ones, without a GPU, where ``device`` is "cpu"."""
    small = device == "cpu"
    steps, batches = [], []
    for name in names:
        model = model_of(name, layers, device, small)
        implementations = (ours, *(PEERS[:2] if small else PEERS))
        steps += [step_row(model, name, step, implementations, device) for step in (SMALL_STEPS if small else STEPS)]
        batches.append(batching_row(model, name, (ours, *PEERS[:2]), small))
        print(json.dumps([steps[-1], batches[-1]]), flush=True)
    return {"transformers": transformers.__version__, "steps": steps, "continuous_batching": batches}


def main() -> None:
    from gpu_environment import built_sources, gpu_environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", given.out / "store"))
    set_default_runtime(Runtime(Config(store=store, sources=built_sources(), offline=True)))
    found = measured(register(), layers=given.layers)
    target = given.out / "transformers.json"
    target.write_text(json.dumps({"schema": 1, "environment": gpu_environment(), **found}, indent=1) + "\n")
    print(target)


if __name__ == "__main__":
    main()
