"""SGLang's backend at the edges of what it takes: pools, pages, bounds of a step, layers, captured steps."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.sglang_steps import BF16, COLUMNS, DIM, HEADS, KV_HEADS, MAX_LEN, PAGE  # noqa: E402  (first: it imports SGLang)
from tests.integrations.sglang_steps import INT32, backend, batch, branching, forward, layer_of, pool_of  # noqa: E402
from tests.integrations.sglang_steps import runner, server_flags  # noqa: E402

# isort: on
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.paged_batch import LayerOptions  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
BACKEND = "cubin_runtime.integrations.sglang.backend"


@pytest.fixture(autouse=True)
def execution(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's server sets from its arguments."""
    return server_flags(monkeypatch)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of ``attend``, which does nothing."""
    calls: list[Any] = []
    monkeypatch.setattr(f"{BACKEND}.attend", lambda *given: calls.append(given))
    return calls


def planned(step: Any, **changed: Any) -> Any:
    made = backend(**changed)
    made.init_forward_metadata(step)
    return made.forward_metadata


class Subclass(MHATokenToKVPool):  # type: ignore[misc]
    """Another pool, whose slots may lie elsewhere."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_the_dtypes_with_kernels(dtype: Any) -> None:
    backend(token_to_kv_pool=pool_of(dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (BF16, torch.float16), (torch.float16, BF16)])
def test_pools_of_other_dtypes_are_refused(dtypes: Any) -> None:
    with pytest.raises(UsageError, match=f"kv_cache_dtype: {dtypes[0]}, expected the model's"):
        backend(token_to_kv_pool=pool_of(dtype=dtypes[0]), dtype=dtypes[1])


def test_pools_of_another_class_or_layout_are_refused() -> None:
    other = pool_of()
    other.__class__ = Subclass
    with pytest.raises(UsageError, match="token_to_kv_pool: a Subclass with layout 'nhd'"):
        backend(token_to_kv_pool=other)
    pool = pool_of()
    pool.kv_cache_layout = "hnd"
    with pytest.raises(UsageError, match="token_to_kv_pool: a MHATokenToKVPool with layout 'hnd'"):
        backend(token_to_kv_pool=pool)


def test_a_decode_is_bounded_by_the_model() -> None:
    metadata = planned(batch(ForwardMode.DECODE, [1, 2], [33, 7]))
    part = metadata.decodes
    assert metadata.prefills is None
    assert (part.table.shape, part.max_seq_len, part.rows, part.first_row) == ((2, COLUMNS), MAX_LEN, 2, 0)
    assert (part.lengths.dtype, part.lengths.tolist(), part.table.dtype) == (INT32, [33, 7], INT32)
    assert (part.sums, part.max_q_len) == (None, 1)
    short = SimpleNamespace(context_len=40)
    assert planned(batch(ForwardMode.DECODE, [1], [35]), model_config=short).decodes.max_seq_len == 40


def test_short_prompts_are_launched_for_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.integrations.scratch._SHORTER_BOUNDS", (16,))
    for longest, bound in ((16, 16), (17, MAX_LEN)):
        step = batch(ForwardMode.EXTEND, [1, 2], [3, longest], [3, 5])
        assert planned(step).prefills.max_seq_len == bound
        step.seq_lens_cpu = None
        assert planned(step).prefills.max_seq_len == MAX_LEN, "the lengths are on the device alone"


def test_a_prompt_is_bounded_by_the_model() -> None:
    metadata = planned(batch(ForwardMode.EXTEND, [1, 2], [33, 16], [3, 16]))
    part = metadata.prefills
    assert metadata.decodes is None
    assert (part.first_row, part.rows, part.max_q_len, part.max_seq_len) == (0, 19, 16, MAX_LEN)
    assert (part.sums.tolist(), part.sums.dtype, part.table.shape, part.lengths.tolist()) == (
        [0, 3, 19],
        INT32,
        (2, COLUMNS),
        [33, 16],
    )


def test_a_captured_step_has_the_bound_of_the_model(attended: list[Any]) -> None:
    made = backend()
    made.init_cuda_graph_state(4, 4)
    step = batch(ForwardMode.DECODE, [2, 1], [33, 7])
    made.init_forward_metadata_out_graph(step)
    made.init_forward_metadata_in_graph(step)
    part = made.forward_metadata.decodes
    assert made.forward_metadata.prefills is None
    assert (part.first_row, part.rows, part.max_q_len, part.max_seq_len, part.sums) == (0, 2, 1, MAX_LEN, None)
    assert (part.table.shape, part.table.dtype) == ((2, COLUMNS), INT32)
    assert part.table[:, 0].tolist() == [2 * COLUMNS + COLUMNS - 1, COLUMNS + COLUMNS - 1]
    assert (part.lengths.tolist(), part.lengths.dtype) == ([33, 7], INT32)


def test_an_idle_step_is_captured(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.IDLE, [], [])
    made.init_cuda_graph_state(2, 2)
    made.init_forward_metadata_out_graph(step)
    forward(made, step)
    assert launches(standin) == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_attention_gets(attended: list[Any], execution: SimpleNamespace, deterministic: bool) -> None:
    execution.enable_deterministic_inference = deterministic
    made, step = backend(), batch(ForwardMode.DECODE, [1, 2], [40, 3])
    made.init_forward_metadata(step)
    layer = layer_of(sliding_window_size=15, logit_cap=30.0, scaling=0.25)
    query, out = forward(made, step, layer, sinks=torch.arange(HEADS, dtype=BF16))
    ((q, k_cache, v_cache, kv_layout, metadata, options, result),) = attended
    assert (q.shape, q.data_ptr(), result.data_ptr()) == ((2, HEADS, DIM), query.data_ptr(), out.data_ptr())
    keys, values = made.token_to_kv_pool.get_kv_buffer(1)
    assert (k_cache.data_ptr(), v_cache.data_ptr(), kv_layout) == (keys.data_ptr(), values.data_ptr(), "NHD")
    assert k_cache.shape == v_cache.shape == (keys.shape[0] // PAGE, PAGE, KV_HEADS, DIM)
    assert metadata is made.forward_metadata
    assert (options.sinks.dtype, options.sinks.tolist()) == (torch.float32, list(range(HEADS)))
    assert options._replace(sinks=None) == LayerOptions(0.25, 15, 30.0, None, deterministic)
    forward(made, step, layer_of())
    assert attended[1][5] == LayerOptions(0.125, -1, 0.0, None, deterministic)


@pytest.mark.parametrize("changed", [{"attn_type": AttentionType.ENCODER_ONLY}, {"is_cross_attention": True}, {}])
def test_a_layer_that_is_not_a_plain_decoder_is_refused(attended: list[Any], changed: Any) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    layer = layer_of(**changed)
    if not changed:
        layer.xai_temperature_len = 1
    with pytest.raises(UsageError, match="expected a causal decoder layer"):
        forward(made, step, layer)
    assert attended == []


def test_layers_that_see_the_keys_of_a_chunk_alone_are_refused_at_start() -> None:
    layers = torch.nn.ModuleList([layer_of(), layer_of(use_irope=True)])
    assert backend(model=layers).max_context_len == MAX_LEN
    with pytest.raises(UsageError, match="use_irope=True, attention_chunk_size=32"):
        backend(model=layers, attention_chunk_size=32)


BOTH_WAYS = AttentionType.DECODER_BIDIRECTIONAL
UNLIKE = [{"is_multimodal": True}, {"hf_text_config": SimpleNamespace(use_bidirectional_attention=True)}]


def test_text_of_a_model_whose_images_look_both_ways_is_causal(attended: list[Any]) -> None:
    text = SimpleNamespace(context_len=MAX_LEN, hf_text_config=SimpleNamespace(use_bidirectional_attention=False))
    made, step = backend(model_config=text), batch(ForwardMode.EXTEND, [1], [40], [8])
    made.init_forward_metadata(step)
    forward(made, step, layer_of(attn_type=BOTH_WAYS))
    assert len(attended) == 1


@pytest.mark.parametrize("unlike", UNLIKE)
def test_images_and_embeddings_that_look_both_ways_are_refused_at_start(unlike: dict[str, Any]) -> None:
    layers = torch.nn.ModuleList([layer_of(attn_type=BOTH_WAYS)])
    with pytest.raises(UsageError, match="attn_type=DECODER_BIDIRECTIONAL"):
        backend(model=layers, model_config=SimpleNamespace(context_len=MAX_LEN, **unlike))


def test_the_runner_of_the_tests_has_pages_in_reverse() -> None:
    assert runner().req_to_token_pool.req_to_token[1, :2].tolist() == [15 * PAGE, 15 * PAGE + 1]


@pytest.mark.parametrize("captured", [False, True])
def test_draft_tokens_are_verified_as_several_tokens_of_a_request(
    attended: list[Any], execution: SimpleNamespace, captured: bool
) -> None:
    execution.speculative_algorithm = "EAGLE"
    execution.speculative_num_draft_tokens, execution.speculative_eagle_topk = 4, 1
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [2, 1], [33, 7], [4, 4])
    assert not made.needs_cpu_seq_lens
    step.seq_lens_cpu = step.seq_lens_sum = None  # so SGLang leaves them on the device alone
    if captured:
        made.init_cuda_graph_state(4, 16)
        made.init_forward_metadata_out_graph(step, in_capture=True)
        made.init_forward_metadata_in_graph(step)
    else:
        made.init_forward_metadata(step)
    part = made.forward_metadata.decodes
    assert made.forward_metadata.prefills is None
    assert (part.rows, part.max_q_len, part.lengths.tolist(), part.sums.tolist()) == (8, 4, [37, 11], [0, 4, 8])
    assert part.table[:, 0].tolist() == [2 * COLUMNS + COLUMNS - 1, COLUMNS + COLUMNS - 1]
    assert part.max_seq_len >= part.lengths.max()


# Two continuations of what was written before, as n-grams of two lengths have them, a token each in turn.
TREE = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def with_ngrams(execution: SimpleNamespace) -> None:
    execution.speculative_algorithm = "NGRAM"
    execution.speculative_num_draft_tokens, execution.speculative_eagle_topk = 4, 1


def test_ngrams_are_verified_as_the_branches_that_they_are(attended: list[Any], execution: SimpleNamespace) -> None:
    with_ngrams(execution)
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [2, 1], [33, 7], [4, 4])
    bits = branching(step, TREE)
    made.init_forward_metadata(step)
    part = made.forward_metadata.decodes
    assert (part.mask.shape, part.mask.dtype, part.mask.flatten().tolist()) == ((8, 1), torch.uint32, bits)
    made.init_forward_metadata(batch(ForwardMode.DECODE, [1], [7]))
    assert made.forward_metadata.decodes.mask is None


def test_captured_ngrams_have_the_mask_of_each_replay(attended: list[Any], execution: SimpleNamespace) -> None:
    with_ngrams(execution)
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [0, 0, 0], [1, 1, 1], [4, 4, 4])
    step.spec_info = SimpleNamespace(custom_mask=torch.ones(60, dtype=torch.bool))
    made.init_cuda_graph_state(4, 16)
    made.init_forward_metadata_out_graph(step, in_capture=True)
    captured = made.forward_metadata.decodes.mask
    bits = branching(batch(ForwardMode.TARGET_VERIFY, [2, 1], [33, 7], [4, 4]), TREE)
    replayed = batch(ForwardMode.TARGET_VERIFY, [2, 1], [33, 7], [4, 4])
    branching(replayed, TREE)
    replayed.batch_size, replayed.seq_lens = 3, torch.tensor([33, 7, 1])  # the third pads the step
    made.init_forward_metadata_out_graph(replayed)
    assert captured.flatten().tolist()[:8] == bits
    assert captured.data_ptr() == made.forward_metadata.decodes.mask.data_ptr()


def test_branches_reach_the_kernel(standin: StandIn, execution: SimpleNamespace) -> None:
    with_ngrams(execution)
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [2, 1], [33, 7], [4, 4])
    bits = branching(step, TREE)
    made.init_forward_metadata(step)
    _kept = forward(made, step)
    ((name, sent),) = launches(standin)
    assert (name, sent["q_len"], integers(sent["mask"], 8)) == ("decode", 4, bits)


@pytest.mark.parametrize("changed", [{"logit_cap": 30.0}, {"num_heads": 66, "num_kv_heads": 2}])
def test_branches_on_kernels_without_masks_are_refused_at_start(execution: SimpleNamespace, changed: Any) -> None:
    layers = torch.nn.ModuleList([layer_of(**changed)])
    backend(model=layers, token_to_kv_pool=pool_of(head_num=2))
    with_ngrams(execution)
    with pytest.raises(UsageError, match="speculative_algorithm=NGRAM"):
        backend(model=layers, token_to_kv_pool=pool_of(head_num=2))


@pytest.mark.parametrize(("tokens", "topk"), [(17, 1), (4, 2)])
def test_drafts_that_are_refused_at_start(execution: SimpleNamespace, tokens: int, topk: int) -> None:
    execution.speculative_algorithm = "EAGLE"
    execution.speculative_num_draft_tokens, execution.speculative_eagle_topk = tokens, topk
    with pytest.raises(UsageError, match=f"speculative_num_draft_tokens={tokens}, speculative_eagle_topk={topk}"):
        backend()
