"""transformers' models on our attention, its operators the float64 references: every step against sdpa or eager."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed (make test-torch)")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_transformers  # noqa: E402  (they need transformers)
from decode import client_pages  # noqa: E402
from model_steps.steps import SHAPES, model_of  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers import register  # noqa: E402
from cubin_runtime.integrations.transformers.masks import mask  # noqa: E402
from tests.integrations.attention_stand_in import StandIn  # noqa: E402
from tests.integrations.small_models import (  # noqa: E402
    MODELS,
    PEERS,
    VOCABULARY,
    WINDOW,
    assert_near,
    generated_continuously,
    made,
    prompts,
    steps,
)

pytestmark = pytest.mark.torch
NAME = "cubin_runtime_stand_in"
TOLERANCE = 1e-4  # float32 models; measured: at most 1e-5 of the largest logit
# A prompt longer than the window, a chunk, then single tokens.
CUTS = [20, 29, *range(30, 36)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For models as small as these, threads that wait for one another take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    made_up = StandIn()
    register(NAME, made_up.operators)
    return made_up


def both(name: str, run: Any) -> tuple[Any, Any]:
    """What ``run`` returns for the model on the peer's attention, and on ours."""
    model = made(name)
    results = []
    for implementation in (PEERS[name], NAME):
        model.set_attn_implementation(implementation)
        results.append(run(model))
    return results[1], results[0]


def check_steps(name: str, batch: int, cache: Any, mask: Any = None, cuts: list[int] = CUTS) -> None:
    tokens = prompts(batch, cuts[-1])
    ours, theirs = both(name, lambda model: steps(model, tokens, cuts, cache(model), mask))
    start = 0
    for end, one, other in zip(cuts, ours, theirs, strict=True):
        kept = torch.ones(one.shape[:2], dtype=torch.bool) if mask is None else mask[:, start:end].bool()
        assert_near(one[kept], other[kept], TOLERANCE)
        start = end


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(length: int) -> Any:
    return lambda model: StaticCache(config=model.config, max_cache_len=length)


def left_padded() -> Any:
    mask = torch.ones(3, CUTS[-1], dtype=torch.long)
    mask[0, :7] = mask[2, :18] = 0
    return mask


@pytest.mark.parametrize("name", MODELS)
def test_a_dynamic_cache(name: str, stand_in: StandIn) -> None:
    check_steps(name, 2, dynamic)
    assert set(stand_in.calls) == {"even"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [45, 64])
def test_a_static_cache(name: str, room: int, stand_in: StandIn) -> None:
    check_steps(name, 2, static(room))
    assert {"cached"} <= set(stand_in.calls) <= {"cached", "even"}  # the latter for windows, whose caches roll


@pytest.mark.parametrize("cache", [dynamic, static(64)], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left(name: str, cache: Any, stand_in: StandIn) -> None:
    check_steps(name, 3, cache, left_padded())
    assert set(stand_in.calls) == {"ragged"}


def test_padding_on_the_right(stand_in: StandIn) -> None:
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 11:] = mask[2, 1:] = 0
    check_steps("gpt_oss", 3, dynamic, mask, [20])
    assert set(stand_in.calls) == {"ragged"}


def padded_between(start: int, end: int) -> Any:
    mask = torch.ones(2, CUTS[-1], dtype=torch.long)
    mask[0, start:end] = 0
    return mask


@pytest.mark.parametrize("cache", [dynamic, static(64)], ids=["dynamic", "static"])
@pytest.mark.parametrize(("name", "padding"), [("llama", (5, 12)), ("gemma3", (20, 29))])
def test_padding_between_tokens_that_moves_no_key_into_a_window(
    name: str, padding: tuple[int, int], cache: Any, stand_in: StandIn
) -> None:
    check_steps(name, 2, cache, padded_between(*padding))
    assert "ragged" in stand_in.calls


@pytest.mark.parametrize("cache", [dynamic, static(64)], ids=["dynamic", "static"])
@pytest.mark.parametrize(("padding", "cuts"), [((5, 12), [30]), ((20, 24), [20, 30])])
def test_padding_between_tokens_that_a_window_would_not_count_is_refused(
    padding: tuple[int, int], cuts: list[int], cache: Any, stand_in: StandIn
) -> None:
    with pytest.raises(UsageError, match="attention_mask: padding among the last 16 positions, behind other tokens"):
        check_steps("gemma3", 2, cache, padded_between(*padding), cuts)


def test_a_mask_without_padding_costs_nothing(stand_in: StandIn) -> None:
    check_steps("qwen3", 2, dynamic, torch.ones(2, CUTS[-1], dtype=torch.long))
    assert set(stand_in.calls) == {"even"}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_sequences_that_restart_their_positions(name: str, stand_in: StandIn) -> None:
    tokens = prompts(1, 40)
    positions = torch.cat([torch.arange(22), torch.arange(1), torch.arange(17)])[None]

    def run(model: Any) -> Any:
        with torch.no_grad():
            return model(tokens, position_ids=positions, use_cache=False).logits

    ours, theirs = both(name, run)
    assert_near(ours, theirs, TOLERANCE)
    assert set(stand_in.calls) == {"ragged"}


def test_running_sums_that_the_caller_gives(stand_in: StandIn) -> None:
    tokens, model = prompts(1, 40), made("llama")
    positions = torch.cat([torch.arange(22), torch.arange(18)])[None]
    sums = torch.tensor([0, 22, 40], dtype=torch.int32)
    given = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": 22, "max_length_k": 22}
    with torch.no_grad():
        theirs = model(tokens, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation(NAME)
        ours = model(tokens, position_ids=positions, use_cache=False, **given).logits
    assert_near(ours, theirs, TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_generate_finds_the_same_tokens(name: str, stand_in: StandIn) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    chosen = {"max_new_tokens": 12, "do_sample": False}
    ours, theirs = both(name, lambda model: model.generate(prompts(2, 20), attention_mask=mask, **chosen))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma3"])
def test_continuous_batching_of_ragged_requests(name: str, stand_in: StandIn) -> None:
    requests = [prompts(1, length)[0].tolist() for length in (3, 40, 1, 17, 33, 8)]
    model = made(name)
    ours = generated_continuously(model, f"paged|{NAME}", requests)
    assert stand_in.calls["decode"] > 0
    model.set_attn_implementation(PEERS[name])
    for request, found in zip(requests, ours, strict=True):
        whole = torch.tensor([request + found])
        with torch.no_grad():
            logits = model(whole).logits[0, len(request) - 1 : -1].float()
        first, second = logits.topk(2).values.unbind(-1)
        decided = first - second > 2 * TOLERANCE * float(logits.abs().max())
        assert (logits.argmax(-1) == torch.tensor(found))[decided].all()


def test_rows_of_padding_are_zero(stand_in: StandIn) -> None:
    form = mask(1, 3, 3, attention_mask=torch.tensor([[False, False, True]]))
    out, _ = call(query=torch.ones(1, 4, 3, 64), attention_mask=form)
    assert out[0, :2].count_nonzero() == 0


def test_a_window_of_a_cache_has_no_more_keys_than_it_holds() -> None:
    lengths = mask(2, 1, 16, q_offset=torch.tensor([40]), kv_offset=torch.tensor(25))
    assert lengths.plain[:, 0, 0, 0].tolist() == [16, 16]


def call(**changed: Any) -> Any:
    from cubin_runtime.integrations.transformers.attention import attention

    class Layer:
        is_causal = True
        layer_idx = 0

    q, k = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 3, 64)
    given = {"query": q, "key": k, "value": k, "attention_mask": mask(1, 3, 3), "scaling": 0.1, **changed}
    return attention(StandIn().operators, Layer(), **given)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3, dtype=torch.int32)}, "attention_mask: int32 of shape"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.bool)}, "attention_mask: bool of shape"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"is_causal": False, "sliding_window": 4}, "sliding_window=4"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q, cu_seq_lens_k"),
        ({"cache": object(), "attention_mask": torch.zeros(1)}, "attention_mask: given with a paged cache"),
        ({"cache": object(), "attention_mask": None}, "cache: a object without"),
        ({"cache": object(), "attention_mask": None, "block_table": torch.zeros(1)}, "block_table"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        call(**changed)


def test_what_means_nothing_is_accepted() -> None:
    out, probabilities = call(position_ids=torch.arange(3), use_cache=True, output_attentions=False, softcap=None)
    assert out.shape == (1, 3, 4, 64)
    assert probabilities is None


def test_a_pattern_without_a_kernel_is_refused_by_name() -> None:
    from transformers.masking_utils import sliding_window_bidirectional_mask_function

    with pytest.raises(UsageError, match="the pattern sliding_window_bidirectional_overlay"):
        mask(1, 8, 8, mask_function=sliding_window_bidirectional_mask_function(4))
    with pytest.raises(UsageError, match="or_mask_function"):
        mask(1, 8, 8, use_vmap=True)


def test_a_model_that_adds_a_pattern_is_refused(stand_in: StandIn) -> None:
    from transformers.masking_utils import create_causal_mask

    model = made("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(UsageError, match="or_mask_function"):
        create_causal_mask(model.config, torch.zeros(1, 4, 8), None, None, or_mask_function=lambda *at: at[2] >= 0)


@pytest.mark.parametrize("name", ["", "sdpa", "my_flash", "paged|ours", "org/kernel"])
def test_a_name_that_transformers_reads_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="name="):
        register(name)


def test_the_benchmark_runs_on_small_models(stand_in: StandIn) -> None:
    kept: list[int] = []
    found = gpu_transformers.measured(
        NAME, "cpu", 2, ["Llama 3 8B", "gpt-oss 20B"], lambda report: kept.append(len(report["steps"]))
    )
    times = [row["times"][implementation]["us"] for row in found["steps"] for implementation in (NAME, "eager")]
    assert min(times) > 0
    assert max(row["largest_difference"] for row in found["steps"]) < TOLERANCE
    assert min(row["ratios"]["eager"]["us"] for row in found["steps"]) > 0
    assert {row["times"]["flash_attention_3"][:5] for row in found["steps"][:3]} == {"Impor"}
    speeds = [row["tokens_per_s"][NAME] for row in found["continuous_batching"]]
    refused = [speed for speed in speeds if "not supported for continuous batching" in str(speed)]  # from 5.23 on
    assert refused == speeds or [type(speed) for speed in speeds] == [float] * 4
    assert kept == [1, 2, 3, 3, 3, 4, 5, 6, 6, 6, 6]
    environment = {"gpu": {"name": "CPU"}, "packages": {}, "date": ""}
    assert "eager, ratio" in client_pages.transformers({"environment": environment, "rounds": 1, **found})


def test_the_benchmark_lists_what_it_had_no_time_for(stand_in: StandIn) -> None:
    found = gpu_transformers.measured(NAME, "cpu", 2, ["Llama 3 8B"], until=0.0)
    assert found["steps"] == []
    assert len(found["not_measured"]) == 5


def test_the_models_of_the_benchmark_are_made_on_their_device() -> None:
    for name in SHAPES:
        model = model_of(name, 2, "meta", small=False)
        assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_the_window_of_the_models_is_smaller_than_their_prompts() -> None:
    assert WINDOW < CUTS[0] < VOCABULARY
