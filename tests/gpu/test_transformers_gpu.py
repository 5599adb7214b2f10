"""transformers' models on our kernels, in bf16: every step against float32 sdpa or eager, beside their own bf16."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
from transformers import DynamicCache, StaticCache  # noqa: E402

from cubin_runtime import Runtime  # noqa: E402
from cubin_runtime.attention.growing_cache import decode_growing  # noqa: E402
from cubin_runtime.attention.hook import installed  # noqa: E402
from cubin_runtime.integrations.transformers import register  # noqa: E402
from tests.integrations.small_models import (  # noqa: E402  (they need transformers)
    MODELS,
    PEERS,
    generated_continuously,
    made,
    prompts,
    steps,
)

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# Of the largest logit. A model's own bf16 differs from its float32 by 0.01 to 0.03.
TOLERANCE = 0.05
BESIDE = 2.0  # our largest error, by that of the peer in bf16
CUTS = [300, 429, *range(430, 440)]


@pytest.fixture(autouse=True)
def name(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    return register("cubin_runtime_gpu")


def near(model: str, ours: Any, peer: Any, truth: Any) -> None:
    """Our logits near the truth, no further than twice the peer's; the greedy token wherever its margin allows."""
    scale = float(truth.abs().max())
    assert torch.isfinite(ours).all()
    error, beside = (float((logits - truth).abs().max()) / scale for logits in (ours, peer))
    print(f"{model}: error {error:.4f} of the largest logit, {PEERS[model]} in bf16 {beside:.4f}")
    assert error <= TOLERANCE
    assert error <= BESIDE * beside + 0.002
    first, second = truth.topk(2, dim=-1).values.unbind(-1)
    decided = first - second > 2 * error * scale
    assert (ours.argmax(-1) == truth.argmax(-1))[decided].all()


def check_steps(model: str, name: str, cache: Any, mask: Any = None) -> None:
    tokens = prompts(3, CUTS[-1], DEVICE)
    found = {}
    for key, implementation, dtype in (
        ("ours", name, torch.bfloat16),
        ("peer", PEERS[model], torch.bfloat16),
        ("truth", PEERS[model], torch.float32),
    ):
        # The weights of all three are the same bf16 numbers.
        run = made(model, DEVICE, torch.bfloat16).to(dtype)
        run.set_attn_implementation(implementation)
        found[key] = torch.cat(steps(run, tokens, CUTS, cache(run), mask), dim=1)
    kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    near(model, *(found[key][kept] for key in ("ours", "peer", "truth")))


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(length: int) -> Any:
    return lambda model: StaticCache(config=model.config, max_cache_len=length)


def left_padded() -> Any:
    mask = torch.ones(3, CUTS[-1], dtype=torch.long, device=DEVICE)
    mask[0, :7] = mask[2, :180] = 0
    return mask


@pytest.mark.parametrize("model", MODELS)
def test_a_dynamic_cache(model: str, name: str) -> None:
    check_steps(model, name, dynamic)


@pytest.mark.parametrize("length", [512, 450])
@pytest.mark.parametrize("model", MODELS)
def test_a_static_cache(model: str, length: int, name: str) -> None:
    check_steps(model, name, static(length))


@pytest.mark.parametrize("cache", [dynamic, static(512)], ids=["dynamic", "static"])
@pytest.mark.parametrize("model", MODELS)
def test_padding_on_the_left(model: str, cache: Any, name: str) -> None:
    check_steps(model, name, cache, left_padded())


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_packed_sequences(model: str, name: str) -> None:
    tokens = prompts(1, 300, DEVICE)
    positions = torch.cat([torch.arange(222), torch.arange(1), torch.arange(77)])[None].to(DEVICE)
    found = []
    for implementation, dtype in (
        (name, torch.bfloat16),
        (PEERS[model], torch.bfloat16),
        (PEERS[model], torch.float32),
    ):
        run = made(model, DEVICE, torch.bfloat16).to(dtype)
        run.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(run(tokens, position_ids=positions, use_cache=False).logits.float())
    near(model, *found)


@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt_oss", "gemma3"])
def test_continuous_batching_of_ragged_requests(model: str, name: str) -> None:
    requests = [prompts(1, length)[0].tolist() for length in (3, 200, 1, 117, 33, 80)]
    run = made(model, DEVICE, torch.bfloat16)
    batching = {"block_size": 64, "num_blocks": 128, "max_batch_tokens": 128, "use_cuda_graph": False}
    ours = generated_continuously(run, f"paged|{name}", requests, **batching)
    run = run.float()
    run.set_attn_implementation(PEERS[model])
    for request, found in zip(requests, ours, strict=True):
        with torch.no_grad():
            logits = run(torch.tensor([request + found], device=DEVICE)).logits[0, len(request) - 1 : -1]
        taken = logits.gather(1, torch.tensor(found, device=DEVICE)[:, None])[:, 0]
        # A greedy token of ours may be any that float32 has within the tolerance of its best.
        assert (logits.max(-1).values - taken <= 2 * TOLERANCE * logits.abs().max()).all()


@pytest.mark.parametrize("model", MODELS)
def test_generate_takes_greedy_tokens(model: str, name: str) -> None:
    mask = torch.ones(2, 100, dtype=torch.long, device=DEVICE)
    mask[0, :60] = 0
    run = made(model, DEVICE, torch.bfloat16)
    run.set_attn_implementation(name)
    tokens = run.generate(prompts(2, 100, DEVICE), attention_mask=mask, max_new_tokens=16, do_sample=False)
    mask = torch.nn.functional.pad(mask, (0, 16), value=1)
    run = run.float()
    run.set_attn_implementation(PEERS[model])
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = run(tokens, attention_mask=mask, position_ids=positions).logits[:, 99:-1]
    taken = logits.gather(2, tokens[:, 100:, None])[..., 0]
    assert (logits.max(-1).values - taken <= 2 * TOLERANCE * logits.abs().max()).all()


@pytest.mark.parametrize(("batch", "window", "sinks"), [(1, -1, False), (3, -1, True), (3, 100, False)])
def test_new_tokens_over_caches_that_grow(batch: int, window: int, sinks: bool, name: str) -> None:
    heads, kv_heads, dim, most = 32, 8, 128, 2051
    generator = torch.Generator(DEVICE).manual_seed(4)
    q, keys, values = (
        torch.randn(batch, count, length, dim, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for count, length in ((heads, 1), (kv_heads, most), (kv_heads, most))
    )
    logits = torch.randn(heads, generator=generator, device=DEVICE) if sinks else None
    for length in [*range(1, 5), *range(1022, 1027), *range(2046, most + 1)]:
        k, v = keys[:, :, :length].clone(), values[:, :, :length].clone()
        out = decode_growing(*(t.transpose(1, 2) for t in (q, k, v)), window_left=window, sinks=logits)
        assert out is not None, f"{length} keys, compiling: {torch.compiler.is_compiling()}, hook: {installed.hook}"
        seen = slice(max(0, length - 1 - window) if window >= 0 else 0, length)
        k, v = (t[:, :, seen].double().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = (q.double() @ k.mT * dim**-0.5)[:, :, 0]
        if logits is not None:
            scores = torch.cat((scores, logits.double().expand(batch, -1)[..., None]), -1)
        weights = scores.softmax(-1)[..., : v.shape[2]]
        truth = (weights[:, :, None] @ v)[:, :, 0]
        assert (out[:, 0].double() - truth).norm() <= 0.005 * truth.norm()
