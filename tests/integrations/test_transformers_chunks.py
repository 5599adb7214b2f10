"""Chunked attention (Llama 4): a token sees the tokens of its own chunk, up to itself."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed (make test-torch)")
from transformers import DynamicCache, Llama4ForCausalLM, Llama4TextConfig, StaticCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    chunked_causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
)

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers import register  # noqa: E402
from cubin_runtime.integrations.transformers.masks import mask, read  # noqa: E402
from tests.integrations.attention_stand_in import StandIn  # noqa: E402
from tests.integrations.small_models import SHAPE, assert_near, prompts, steps  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "cubin_runtime_stand_in"
CHUNK = 7
NO_PADDING = torch.zeros(1, dtype=torch.long)
CUTS = [18, 30, 31, 32, 33, 34, 35, 36, 37]


@pytest.fixture(scope="module")
def model() -> Any:
    register(NAME, StandIn().operators)
    torch.manual_seed(0)
    layers = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": CHUNK}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "moe_layers": []}
    model = Llama4ForCausalLM(Llama4TextConfig(**{**SHAPE, **layers, **experts})).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                weight.mul_(6)
    return model


@pytest.mark.parametrize("padding", [0, 3, 20])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_a_piece_and_single_tokens(model: Any, static: bool, padding: int) -> None:
    tokens, valid = prompts(2, CUTS[-1]), torch.ones(2, CUTS[-1], dtype=torch.long)
    valid[0, :padding] = 0
    results = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        cache = StaticCache(model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
        found = torch.cat(steps(model, tokens, CUTS, cache, valid if padding else None), dim=1)
        results.append(found[valid.bool()])
    assert_near(*results, 1e-4)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 40])
def test_prompts_around_whole_chunks(model: Any, length: int) -> None:
    results = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(prompts(2, length), use_cache=False).logits)
    assert_near(*results, 1e-4)


def test_the_places_of_keys_and_queries() -> None:
    form = mask(1, 3, 10, q_offset=6, mask_function=chunked_causal_mask_function(4, NO_PADDING))
    found = read(form, 3, 10)
    assert found.chunks == 2
    # Keys 0 to 3 are of an earlier chunk, key 9 is behind the last query.
    assert found.places.tolist() == [[2, 2, 2, 2, 0, 0, 0, 0, 1, 2, 0, 0, 1]]


@pytest.mark.parametrize(
    "function",
    [
        chunked_overlay(4, NO_PADDING),
        and_masks(chunked_causal_mask_function(4, NO_PADDING), packed_sequence_mask_function(torch.arange(8)[None])),
    ],
)
def test_chunks_that_are_not_causal_or_packed_are_refused(function: Any) -> None:
    with pytest.raises(UsageError, match=r"the pattern (chunked_overlay|packed_sequence)"):
        mask(1, 8, 8, mask_function=function)
