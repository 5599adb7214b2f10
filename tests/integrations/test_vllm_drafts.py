"""Draft tokens in vLLM: requests with as many tokens each run in full graphs, and all of them on the decode kernels."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import BACKEND, BF16, BLOCK, DIM, HEADS, MAX_LEN  # noqa: E402
from tests.integrations.vllm_steps import builder, cache, layer, speculative, step  # noqa: E402

# isort: on
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402

from cubin_runtime.integrations.vllm.backend import limits_of  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
DRAFTS = 4
WIDTH = 1 + DRAFTS


def run(metadata: Any, drafts: int = DRAFTS, **options: Any) -> Any:
    """The metadata that the builder made, after a forward pass; and what the launches point to."""
    query = torch.zeros(metadata.num_actual_tokens, HEADS, DIM, dtype=BF16)
    built, kept = builder(BACKEND, drafts=drafts).build(0, metadata), (query, cache(), torch.empty_like(query))
    layer(BACKEND, **options).forward(None, query, None, None, kept[1], built, kept[2])
    return built, kept


def test_full_graphs_stay_on_with_drafts() -> None:
    made = builder(BACKEND, drafts=DRAFTS)
    assert made.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert made.reorder_batch_threshold == WIDTH


def test_as_many_tokens_of_each_request_are_one_even_decode(standin: StandIn) -> None:
    metadata = step([WIDTH] * 3, [40, WIDTH, 128])
    _, kept = run(metadata)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"], sent["q_cu_seq_lens"]) == ("decode", 3, WIDTH, 0)
    assert integers(sent["seq_lens"], 3) == [40, WIDTH, 128]
    assert (sent["q"], sent["out"], sent["max_seq_len"]) == (kept[0].data_ptr(), kept[2].data_ptr(), MAX_LEN)


@pytest.mark.parametrize("tokens_of_padding", [0, WIDTH])
def test_requests_without_a_token_pad_an_even_decode(tokens_of_padding: int) -> None:
    metadata = step([WIDTH, WIDTH], [40, 50], padded=2)
    metadata.num_actual_tokens = 2 * WIDTH + 2 * tokens_of_padding
    part = builder(BACKEND, drafts=DRAFTS).build(0, metadata).decodes
    assert (part.sums, part.max_q_len) == (None, WIDTH)
    requests = 4 if tokens_of_padding else 2
    assert (part.rows, part.table.shape[0], part.lengths.tolist()) == (
        requests * WIDTH,
        requests,
        [40, 50, 0, 0][:requests],
    )


def test_rows_behind_the_requests_are_left_out() -> None:
    metadata = step([WIDTH, WIDTH], [40, 50])
    metadata.num_actual_tokens += 3
    part = builder(BACKEND, drafts=DRAFTS).build(0, metadata).decodes
    assert (part.rows, part.table.shape[0]) == (2 * WIDTH, 2)


def test_a_drafter_decodes_single_tokens() -> None:
    part = builder(BACKEND, drafts=DRAFTS).build(0, step([1, 1], [40, 50])).decodes
    assert (part.sums, part.max_q_len, part.rows) == (None, 1, 2)


def test_other_numbers_of_drafts_are_a_ragged_decode(standin: StandIn) -> None:
    metadata = step([WIDTH, 1, 3], [40, 7, 128])
    _kept = run(metadata)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"]) == ("decode", 3, WIDTH)
    assert sent["q_cu_seq_lens"] == metadata.query_start_loc.data_ptr()
    assert integers(sent["q_cu_seq_lens"], 4) == [0, 5, 6, 9]


def test_prompts_behind_drafts(standin: StandIn) -> None:
    _built, _kept = run(step([WIDTH, WIDTH, 20], [40, 50, 60]))
    (first, decode), (second, context) = launches(standin)
    assert (first, decode["batch"], decode["q_len"], decode["q_cu_seq_lens"]) == ("decode", 2, WIDTH, 0)
    assert (second, context["batch"], integers(context["q_cu_seq_lens"], 2)) == ("context", 1, [0, 20])


def test_without_drafts_short_prompts_are_no_decodes() -> None:
    built = builder(BACKEND).build(0, step([1, 3], [40, 50]))
    assert (built.decodes.rows, built.prefills.rows) == (1, 3)


def test_a_soft_cap_verifies_drafts_on_the_kernels_of_prompts(standin: StandIn) -> None:
    _built, _kept = run(step([WIDTH, WIDTH], [40, 50]), logits_soft_cap=30.0)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"], sent["q_cu_seq_lens"]) == ("context", 2, WIDTH, 0)


def test_the_pages_of_another_group_of_layers_serve_drafts() -> None:
    made = builder(BACKEND, drafts=DRAFTS)
    first = made.build(0, step([WIDTH, WIDTH], [40, 50]))
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    second = made.update_block_table(first, table, None)
    assert (second.decodes.table.tolist(), second.decodes.max_q_len) == (table.tolist(), WIDTH)
    made.update_draft_decode_metadata(first)


@pytest.mark.parametrize(("drafts", "tokens"), [(None, 1), (4, 5), (63, 64), (64, 1)])
def test_the_most_tokens_of_a_decode(drafts: int | None, tokens: int) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=128),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        cache_config=SimpleNamespace(block_size=BLOCK),
        speculative_config=speculative(drafts),
    )
    assert limits_of(config).decode_tokens == tokens
    assert builder(BACKEND, drafts=drafts).reorder_batch_threshold == tokens
