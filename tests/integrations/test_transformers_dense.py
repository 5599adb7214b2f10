"""Dense masks of a few tokens: right where all earlier keys are seen, otherwise a UsageError."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed (make test-torch)")
from transformers import DynamicCache, StaticCache  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers import register  # noqa: E402
from cubin_runtime.integrations.transformers.attention import attention  # noqa: E402
from cubin_runtime.integrations.transformers.dense import drafts_of  # noqa: E402
from tests.integrations.attention_stand_in import StandIn  # noqa: E402
from tests.integrations.small_models import assert_near, made, prompts  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "cubin_runtime_stand_in"
PAST, NEW = 9, 5
TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()


@pytest.fixture
def stand_in() -> StandIn:
    found = StandIn()
    register(NAME, found.operators)
    return found


def tree(keys: int, batch: int = 2) -> Any:
    """All past keys and, of the draft tokens, each one's ancestors; ``keys`` behind the drafts are room."""
    seen = torch.zeros(batch, 1, NEW, keys, dtype=torch.bool)
    seen[..., :PAST] = True
    seen[..., PAST : PAST + NEW] = TREE
    return seen


def added(seen: Any, masked: float = torch.finfo(torch.float32).min) -> Any:
    return torch.zeros(seen.shape).masked_fill(~seen, masked)


def decoded(model: Any, implementation: str, cache: Any, dense: Any) -> Any:
    model.set_attn_implementation(implementation)
    tokens = prompts(2, PAST + NEW)
    with torch.no_grad():
        model(tokens[:, :PAST], past_key_values=cache)
        return model(tokens[:, PAST:], past_key_values=cache, attention_mask=dense).logits


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize("static", [False, True])
def test_draft_tokens_of_a_tree(stand_in: StandIn, static: bool, masked: float) -> None:
    model = made("llama")
    results = []
    for implementation in (NAME, "eager"):
        cache = StaticCache(model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
        results.append(decoded(model, implementation, cache, added(tree(32 if static else PAST + NEW), masked)))
    assert_near(*results, 1e-4)
    assert stand_in.calls["masked"] == 2


def test_a_prompt_of_a_few_tokens_with_any_mask(stand_in: StandIn) -> None:
    model, seen = made("llama"), torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(3)) < 0.5
    seen |= torch.eye(20, dtype=torch.bool)
    results = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(prompts(2, 20), attention_mask=added(seen), use_cache=False).logits)
    assert_near(*results, 1e-4)
    assert stand_in.calls["masked"] == 2


def test_bits_of_more_than_32_tokens() -> None:
    seen = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    drafts = drafts_of(seen, 3)
    assert drafts.lengths.tolist() == [40] * 3
    words = drafts.bits.to(torch.int64)
    assert words.shape == (3, 40, 2)
    assert words[2, 39].tolist() == [2**32 - 1, 2**8 - 1]
    assert words[0, 31].tolist() == [2**32 - 1, 0]


def call(dense: Any, **changed: Any) -> Any:
    q, k = torch.zeros(2, 4, dense.shape[2], 64), torch.zeros(2, 2, dense.shape[3], 64)
    given = {"query": q, "key": k, "value": k, "attention_mask": dense, "scaling": 0.1, **changed}
    return attention(StandIn().operators, object(), **given)


@pytest.mark.parametrize(
    ("dense", "changed", "words"),
    [
        (added(tree(PAST + NEW), -3.0), {}, "other values than 0 and -inf"),
        (tree(PAST + NEW).roll(1, 3), {}, "hides keys before the last 5"),
        (tree(PAST + NEW)[..., PAST:-1], {}, "hides keys before the last 5"),
        (torch.rand(2, 4, 5, 14) < 0.5, {}, "differs between heads"),
        (tree(PAST + NEW), {"sliding_window": 4}, "dense, with packed sequences or a sliding window"),
        (torch.ones(2, 1, 65, 65, dtype=torch.bool), {}, "a kernel only for at most 64 queries"),
        (torch.ones(2, 1, 5, 4, dtype=torch.bool), {}, "hides keys before the last 5"),
    ],
)
def test_a_dense_mask_without_a_kernel_is_refused(dense: Any, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(dense, **changed)
