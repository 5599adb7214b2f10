"""vLLM's backend on our operators: its real base classes and metadata, and the launches on a recording driver.

Skipped where vLLM's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import BACKEND, BF16, BLOCK, BLOCKS, DIM, HEADS, KV_HEADS, MAX_LEN  # noqa: E402  (first: it imports vLLM)
from tests.integrations.vllm_steps import INT32, REGISTERED, AttentionBackendEnum, ParallelConfig, builder, cache  # noqa: E402
from tests.integrations.vllm_steps import chosen, layer, layouts, run, speculative, step  # noqa: E402

# isort: on
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType  # noqa: E402
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.paged_batch import LayerOptions  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import has_segments, integers, launches  # noqa: E402
from tests.integrations.step_records import compare, written  # noqa: E402

LBNHC, BLNHC = (0, 1, 3, 2, 4), (1, 0, 3, 2, 4)
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]


@pytest.fixture
def backend() -> Any:
    return BACKEND


def supported(backend: Any, **changed: Any) -> list[str]:
    given = {
        "head_size": DIM,
        "dtype": BF16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
    }
    reasons: list[str] = backend.validate_configuration(**{**given, **changed})
    return reasons


def test_what_is_supported(backend: Any) -> None:
    assert supported(backend) == []
    assert supported(backend, use_batch_invariant=True) == []
    assert backend.get_name() == REGISTERED
    assert builder(backend).get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    impl = backend.get_impl_cls()
    assert (impl.can_return_lse_for_decode, impl.supports_dcp, impl.supports_pcp) == (True, True, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_size": 96},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "float16"},
        {"block_size": 8},
        {"use_mla": True},
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"device_capability": DeviceCapability(8, 0)},
        {"device_capability": DeviceCapability(10, 0)},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"use_non_causal": True},
        {"use_pcp": True},
        {"use_adaptive_verification": True},
        {"use_rswa": True},
        {"use_kv_connector": True},
        {"head_size": 512},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"attn_type": AttentionType.ENCODER},
        {"use_per_head_quant_scales": True},
    ],
)
def test_what_is_not_supported(backend: Any, changed: dict[str, Any]) -> None:
    if not changed.keys() <= inspect.signature(backend.validate_configuration).parameters.keys():
        pytest.skip("this vLLM does not ask")
    assert len(supported(backend, **changed)) == 1


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("invariant", [False, True])
def test_e4m3_caches(
    backend: Any, standin: StandIn, monkeypatch: pytest.MonkeyPatch, dtype: str, invariant: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    assert supported(backend, kv_cache_dtype=dtype) == []
    metadata, made = step([1, 20], [40, 20]), layer(backend, kv_cache_dtype=dtype)
    assert made.supports_quant_query_input is False
    query, kv_cache = torch.zeros(21, HEADS, DIM, dtype=BF16), cache().to(torch.uint8)
    of_layer, out = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(())), torch.empty_like(query)
    made.forward(of_layer, query, None, None, kv_cache, builder(backend).build(0, metadata), out)
    sent = launches(standin)
    assert [name for name, _ in sent] == ["decode", "context"]
    for _, fields in sent:
        assert (fields["k_scale"], fields["v_scale"]) == (of_layer._k_scale.data_ptr(), of_layer._v_scale.data_ptr())
    assert sent[0][1]["q"] == query.data_ptr()
    assert has_segments(standin.calls("cuLaunchKernelEx")[-1]) == invariant


def test_decodes(backend: Any, standin: StandIn) -> None:
    metadata = step([1, 1, 1], [40, 1, 128])
    kept, _ = run(backend, metadata)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"]) == ("decode", 3, 1)
    assert integers(sent["seq_lens"], 3) == [40, 1, 128]
    assert sent["page_table"] == metadata.block_table_tensor.data_ptr()
    assert (sent["table_stride"], sent["num_pages"], 1 << sent["page_size_log2"]) == (8, BLOCKS, BLOCK)
    assert (sent["q"], sent["out"]) == (kept[0].data_ptr(), kept[1].data_ptr())
    assert sent["softmax_scale_log2"] == pytest.approx(0.125 * 1.4426950408889634)


@pytest.mark.parametrize("asked", [False, True])
def test_batch_invariance(backend: Any, standin: StandIn, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    _kept = run(backend, step([1, 20], [40, 20]))
    assert [name for name, _ in launches(standin)] == ["decode", "context"]
    assert has_segments(standin.calls("cuLaunchKernelEx")[-1]) == asked


def test_prompts_and_decodes_together(backend: Any, standin: StandIn) -> None:
    metadata = step([1, 1, 20, 7], [40, 1, 20, 50])
    (_, out, *_), _built = run(backend, metadata)
    (first, decode), (second, context) = launches(standin)
    assert (first, second) == ("decode", "context")
    assert (decode["batch"], integers(decode["seq_lens"], 2)) == (2, [40, 1])
    assert (context["batch"], context["q_len"], context["tokens"]) == (2, 20, 27)
    assert integers(context["q_cu_seq_lens"], 3) == [0, 20, 27]
    assert integers(context["seq_lens"], 2) == [20, 50]
    assert context["page_table"] == metadata.block_table_tensor[2:].data_ptr()
    assert context["out"] == out[2:].data_ptr()


def test_prompts_alone_use_the_metadata_as_it_is(backend: Any, standin: StandIn) -> None:
    metadata = step([20, 7], [20, 50])
    run(backend, metadata)
    ((_, context),) = launches(standin)
    assert context["q_cu_seq_lens"] == metadata.query_start_loc.data_ptr()
    assert context["max_seq_len"] == MAX_LEN


def test_a_bound_that_a_graph_can_be_replayed_with(backend: Any, standin: StandIn) -> None:
    run(backend, step([1, 1], [3, 4]))
    ((_, sent),) = launches(standin)
    assert sent["max_seq_len"] == MAX_LEN


def test_a_padded_step(backend: Any, standin: StandIn) -> None:
    _kept = run(backend, step([1, 1], [3, 4], padded=2))
    ((_, sent),) = launches(standin)
    assert (sent["batch"], integers(sent["seq_lens"], 4)) == (4, [3, 4, 0, 0])


def test_options_of_a_layer(backend: Any, standin: StandIn) -> None:
    sinks = torch.arange(HEADS, dtype=BF16)
    kept, _ = run(backend, step([1, 20], [40, 20]), sinks=sinks, sliding_window=16)
    made = kept[-1]
    converted = made._options.sinks
    assert (converted.dtype, converted.tolist()) == (torch.float32, list(range(HEADS)))
    for _, sent in launches(standin):
        assert (sent["window_left"], sent["sinks"]) == (15, converted.data_ptr())


def test_sinks_that_are_loaded_again_arrive_where_the_old_ones_were(backend: Any) -> None:
    sinks = torch.arange(HEADS, dtype=BF16)
    made = layer(backend, sinks=sinks)
    place = made._options.sinks.data_ptr()
    sinks.copy_(torch.arange(HEADS) + 8)
    made.process_weights_after_loading(BF16)
    assert (made._options.sinks.tolist(), made._options.sinks.data_ptr()) == (list(range(8, 8 + HEADS)), place)
    assert made.sinks is sinks


def test_the_pages_of_another_group_of_layers(backend: Any) -> None:
    first = builder(backend).build(0, step([1, 1, 20], [40, 1, 50]))
    table = torch.arange(12, dtype=INT32).view(3, 4)
    slots = torch.arange(22)
    second = builder(backend).update_block_table(first, table, slots)
    assert second.slot_mapping is slots
    assert (second.decodes.table.tolist(), second.prefills.table.tolist()) == (table[:2].tolist(), table[2:].tolist())
    assert (second.decodes.max_seq_len, second.prefills.max_seq_len) == (4 * BLOCK, 4 * BLOCK)
    assert (second.decodes.lengths is first.decodes.lengths, first.decodes.table.shape[1]) == (True, MAX_LEN // BLOCK)
    assert builder(backend).supports_update_block_table


def test_micro_batches_have_metadata_of_their_own(backend: Any) -> None:
    both = [UBatchSlice(slice(0, 1), slice(0, 20)), UBatchSlice(slice(1, 3), slice(20, 60))]
    lengths = torch.tensor([50, 30, 40], dtype=INT32)
    whole = step([20, 30, 10], lengths.tolist(), seq_lens_cpu_upper_bound=lengths)
    made, kept, seen = builder(backend, enable_dbo=True), {}, []
    for micro_batch in split_attn_metadata(both, whole):  # as vLLM's model runner does
        if made.supports_update_block_table and "first" in kept:
            table, slots = micro_batch.block_table_tensor, micro_batch.slot_mapping
            built = made.update_block_table(kept["first"], table, slots)
        else:
            built = kept["first"] = made.build(0, micro_batch)
        seen.append((built.prefills.lengths.tolist(), built.prefills.sums.tolist()))
    assert seen == [([50], [0, 20]), ([30, 40], [0, 30, 40])]


def test_values_of_another_size_than_keys_are_refused(backend: Any) -> None:
    with pytest.raises(UsageError, match="head_size_v=64"):
        builder(backend, value_size=64)


@pytest.mark.parametrize(
    ("window", "ranks", "drafts", "halves", "reasons"),
    [
        (16, 1, None, False, ["R-SWA not supported"]),
        (None, 2, None, False, ["sinks with DCP not supported"]),
        (None, 1, 4, True, ["drafts in micro-batches not supported"]),
        (None, 2, None, True, ["DCP in micro-batches not supported"]),
        (None, 1, 4, False, []),
        (None, 1, None, True, []),
    ],
)
def test_what_vllm_does_not_ask_for_is_refused_at_start(
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    ranks: int,
    drafts: int | None,
    halves: bool,
    reasons: list[str],
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(rswa_window=window),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks, use_ubatching=halves),
        speculative_config=speculative(drafts),
    )
    where = "cubin_runtime.integrations.vllm.backend.get_current_vllm_config_or_none"
    monkeypatch.setattr(where, lambda: config)
    assert supported(backend) == reasons


def test_what_vllm_would_ask_again_only_for_another_layer_is_refused_by_the_layer(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = ParallelConfig()
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, max_model_len=MAX_LEN, rswa_window=None),
        parallel_config=parallel,
        speculative_config=SimpleNamespace(**vars(speculative(4)), enable_adaptive_verification=False),
        attention_config=SimpleNamespace(
            backend=AttentionBackendEnum[REGISTERED], backend_per_kind=None, use_non_causal=False
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, user_specified_block_size=True, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=64),
        kv_transfer_config=None,
    )
    monkeypatch.setattr(importlib.import_module("vllm.config.vllm"), "_current_vllm_config", config)
    assert chosen(monkeypatch, head_size=DIM) is backend
    assert layer(backend).num_heads == HEADS
    parallel.enable_dbo = True
    assert chosen(monkeypatch, head_size=DIM) is backend, "from memory"
    with pytest.raises(UsageError, match="drafts in micro-batches not supported"):
        layer(backend)


def test_a_soft_cap_is_not_decoded(backend: Any, standin: StandIn) -> None:
    _kept = run(backend, step([1, 1, 20], [40, 3, 20]), logits_soft_cap=30.0)
    (first, even), (second, _) = launches(standin)
    assert (first, second) == ("context", "context")
    assert (even["batch"], even["q_len"], even["q_cu_seq_lens"], integers(even["seq_lens"], 2)) == (2, 1, 0, [40, 3])
    assert even["soft_cap"] > 0


@pytest.mark.parametrize("q_lens", [[1, 1], [21, 20]])
def test_layouts_of_the_cache(backend: Any, q_lens: list[int], standin: StandIn) -> None:
    orders = layouts(backend)
    assert orders.keys() == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
    for order in orders.values():
        kv_cache = cache(order)
        run(backend, step(q_lens, [40, 20]), kv_cache)
        seen = [call.seen["strides"] for call in standin.calls("cuTensorMapEncodeTiled")[-2:]]
        of_cache = {str(2 * kv_cache.stride(axis)) for axis in range(3)}
        assert [of_cache <= set(str(strides).strip("()[]").replace(" ", "").split(",")) for strides in seen] == [
            True
        ] * 2


def test_steps_are_as_recorded(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("cubin_runtime.integrations.vllm.backend.attend", lambda *given: seen.append(written(*given)))
    sinks = torch.zeros(HEADS, dtype=BF16)
    run(backend, step([1, 1, 1], [40, 1, 128]))
    run(backend, step([1, 1, 20, 7], [40, 1, 20, 50]), cache(BLNHC))
    run(backend, step([20, 7], [20, 50]), sinks=sinks, sliding_window=16)
    run(backend, step([1, 1], [90, 4], padded=2), cache(LBNHC), sinks=sinks, sliding_window=32)
    run(backend, step([1, 1, 20], [40, 3, 20]), logits_soft_cap=30.0)
    names = ["decodes", "prompts and decodes", "window and sinks", "padded decodes", "soft cap"]
    compare("vllm 0.33.0", dict(zip(names, seen, strict=True)))


def test_a_profiling_run_writes_zeros(backend: Any) -> None:
    out = torch.ones(4, HEADS, DIM, dtype=BF16)
    layer(backend).forward(None, out.clone(), None, None, cache(), None, out)
    assert out.count_nonzero() == 0


def test_new_keys_and_values_are_written_by_vllm(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm._custom_ops as ops

    seen: list[Any] = []
    monkeypatch.setattr(ops, "reshape_and_cache_flash", lambda *given: seen.append(given))
    kv_cache, slots = cache(LBNHC), torch.arange(3)
    key, value = (torch.zeros(3, KV_HEADS, DIM, dtype=BF16) for _ in range(2))
    scales = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    layer(backend).do_kv_cache_update(scales, key, value, kv_cache, slots)
    ((*states, k_cache, v_cache, where, dtype, _, _),) = seen
    assert states == [key, value]
    assert k_cache.shape == v_cache.shape == (BLOCKS, BLOCK, KV_HEADS, DIM)
    assert (k_cache.data_ptr(), v_cache.data_ptr()) == (kv_cache.data_ptr(), kv_cache[..., DIM:].data_ptr())
    assert (where is slots, dtype) == (True, "auto")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype='fp8_e5m2': expected one of auto, float16, bfloat16, fp8, fp8_e",
        ),
        ({"head_size": 96}, "head_size=96"),
        ({"num_heads": 130}, "num_heads=130"),
    ],
)
def test_layers_that_are_refused(backend: Any, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        layer(backend, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": False},
        {"causal": torch.ones(1, dtype=torch.bool)},
        {"mm_req_doc_ranges": {0: [(0, 3)]}},
        {"rswa_prefix_lens": torch.zeros(1)},
    ],
)
def test_steps_that_are_refused(backend: Any, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="mm_req_doc_ranges"):
        builder(backend).build(0, step([20], [20], **changed))


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_a_scaled_output_is_refused(backend: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        layer(backend).forward(None, None, None, None, None, None, None, **{name: torch.ones(())})


def test_a_layer_has_the_attributes_that_vllm_reads(backend: Any) -> None:
    made = backend.get_impl_cls()(HEADS, DIM, 0.125)
    assert (made.num_heads, made.head_size, made.scale, made.num_kv_heads) == (HEADS, DIM, 0.125, HEADS)
    assert (made.kv_cache_dtype, made.kv_sharing_target_layer_name, made.sinks) == ("auto", None, None)
    made.process_weights_after_loading(BF16)
    assert made._options == LayerOptions(0.125, -1, 0.0, None, False)
    given = {"kv_cache_dtype": "bfloat16", "kv_sharing_target_layer_name": "first", "sliding_window": 1}
    made = layer(backend, **given, logits_soft_cap=30.0)
    assert (made.kv_cache_dtype, made.kv_sharing_target_layer_name, made.num_kv_heads) == (
        "bfloat16",
        "first",
        KV_HEADS,
    )
    assert made._options == LayerOptions(0.125, 0, 30.0, None, False)


def test_what_the_backend_and_its_builder_say(backend: Any) -> None:
    assert backend.get_supported_kernel_block_sizes() == [16, 32, 64, 128, 256, 512, 1024]
    assert backend.get_supported_head_sizes() == [64, 128, 256]
    assert backend.forward_includes_kv_cache_update is False
    assert backend.supports_device_cpu_query_lens_mismatch() is False
    assert builder(backend).reorder_batch_threshold == 1


def test_short_prompts_are_launched_for_few_keys_and_decodes_for_those_of_the_model(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.integrations.scratch._SHORTER_BOUNDS", (64,))
    for longest, bound in ((1, 64), (64, 64), (65, MAX_LEN), (MAX_LEN, MAX_LEN)):
        built = builder(backend).build(0, step([1, 20], [40, 20], max_seq_len=longest))
        assert (built.decodes.max_seq_len, built.prefills.max_seq_len) == (MAX_LEN, bound)


def test_a_bound_within_the_pages_of_a_step(backend: Any) -> None:
    columns = torch.zeros(2, 3, dtype=INT32)
    built = builder(backend).build(0, step([1, 20], [40, 20], block_table_tensor=columns, max_seq_len=MAX_LEN))
    assert (built.decodes.max_seq_len, built.prefills.max_seq_len) == (3 * BLOCK, 3 * BLOCK)
    assert (built.decodes.max_q_len, built.decodes.first_row, built.prefills.first_row) == (1, 0, 1)


def test_a_step_without_tokens(backend: Any) -> None:
    built = builder(backend).build(0, step([0], [0]))
    assert (built.decodes, built.prefills) == (None, None)
