"""SGLang's backend on our operators: its real base class, pools, layers and batches, launches on a recording driver.

Skipped where SGLang's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

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
from tests.integrations.sglang_steps import backend, batch, forward, layer_of, pool_of, server_flags  # noqa: E402

# isort: on
from sglang.srt.arg_groups import overrides  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import (  # noqa: E402  (which repeats them since they moved)
    ATTENTION_BACKEND_CHOICES,
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ServerArgs,
)

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.sglang import NAME  # noqa: E402
from cubin_runtime.integrations.sglang.steps import REFUSED_OPTIONS  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import has_segments, integers, launches  # noqa: E402
from tests.integrations.step_records import compare, written  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
NO_WINDOW = 1 << 30


@pytest.fixture(autouse=True)
def execution(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's server sets from its arguments."""
    return server_flags(monkeypatch)


def test_the_backend_can_be_chosen() -> None:
    assert ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.count(NAME) == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_inference(standin: StandIn, execution: SimpleNamespace, deterministic: bool) -> None:
    execution.enable_deterministic_inference = deterministic
    made = backend()
    for step in (batch(ForwardMode.DECODE, [2], [40]), batch(ForwardMode.EXTEND, [1], [20], [20])):
        made.init_forward_metadata(step)
        _kept = forward(made, step)
    assert [name for name, _ in launches(standin)] == ["decode", "context"]
    assert has_segments(standin.calls("cuLaunchKernelEx")[-1]) == deterministic


@pytest.mark.parametrize("chosen", ["attention_backend", "decode_attention_backend", "prefill_attention_backend"])
def test_a_page_size_that_the_user_leaves_out_has_kernels(chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    HookRegistry.apply_hooks()
    args = dict.fromkeys(("attention_backend", "decode_attention_backend", "prefill_attention_backend"))
    with caplog.at_level("INFO"):
        assert overrides._page_size_default(SimpleNamespace(**{**args, chosen: NAME}, page_size=None)) == {
            "page_size": 64
        }
    assert "page_size is 64" in caplog.text
    assert overrides._page_size_default(SimpleNamespace(**{**args, chosen: NAME}, page_size=16)) == {}
    assert overrides._page_size_default(SimpleNamespace(**{**args, chosen: "fa3"}, page_size=None)) == {"page_size": 1}


def test_the_page_size_reaches_where_sglang_resolves_its_arguments() -> None:
    HookRegistry.apply_hooks()
    args = SimpleNamespace(attention_backend=NAME, page_size=None, _resolved_overrides=[])
    overrides.run_post_process_pass(args, overrides._page_size_default)
    ((source, declared),) = args._resolved_overrides
    assert (source, declared) == ("_page_size_default", {"page_size": 64})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("enable_unified_cache_external_linker", True),
        ("disaggregation_mode", "prefill"),
        ("disaggregation_mode", "decode"),
        ("enable_pdmux", True),
    ],
)
def test_options_that_are_refused_at_start(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option}: p.* (not supported|never tried)"):
        backend(server_args=SimpleNamespace(**{option: value}))
    backend(server_args=SimpleNamespace(enable_hierarchical_cache=False, disaggregation_mode="null"))


def test_options_that_are_refused_are_sglang_s() -> None:
    missing = {name for name in REFUSED_OPTIONS if not hasattr(ServerArgs, name)}
    assert missing <= {"enable_unified_cache_external_linker"}, "which came after 0.5.19"


def test_decodes(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [2, 0, 1], [40, 1, 128])
    made.init_forward_metadata(step)
    q, out = forward(made, step)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"], sent["max_seq_len"]) == ("decode", 3, 1, MAX_LEN)
    assert integers(sent["seq_lens"], 3) == [40, 1, 128]
    table = [integers(sent["page_table"] + 4 * COLUMNS * row, COLUMNS) for row in range(3)]
    assert table == [[COLUMNS * request + column for column in reversed(range(COLUMNS))] for request in (2, 0, 1)]
    assert (sent["table_stride"], 1 << sent["page_size_log2"], sent["num_pages"]) == (COLUMNS, PAGE, 33)
    assert (sent["q"], sent["out"], sent["window_left"]) == (q.data_ptr(), out.data_ptr(), -1)
    assert sent["softmax_scale_log2"] == pytest.approx(0.125 * 1.4426950408889634)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_prompts(mode: ForwardMode, standin: StandIn) -> None:
    made, step = backend(), batch(mode, [1, 2, 0], [20, 50, 9], [20, 7, 1])
    made.init_forward_metadata(step)
    forward(made, step)
    ((name, sent),) = launches(standin)
    assert (name, sent["batch"], sent["q_len"], sent["tokens"], sent["max_seq_len"]) == ("context", 3, 20, 28, MAX_LEN)
    assert integers(sent["q_cu_seq_lens"], 4) == [0, 20, 27, 28]
    assert integers(sent["seq_lens"], 3) == [20, 50, 9]
    assert integers(sent["page_table"], 4) == [15, 14, 13, 12]
    assert sent["window_left"] == NO_WINDOW


def test_a_captured_step_reads_tables_that_stay_where_they_are(standin: StandIn) -> None:
    made = backend()
    made.init_cuda_graph_state(4, 4)
    step = batch(ForwardMode.DECODE, [0, 0, 0], [1, 1, 1])
    made.init_forward_metadata_out_graph(step, in_capture=True)
    made.init_forward_metadata_in_graph(step)
    forward(made, step)
    ((_, sent),) = launches(standin)
    # What a replay does: the runner's tensors change in place, and the recorded operations run again.
    step.req_pool_indices.copy_(torch.tensor([2, 1, 0]))
    step.seq_lens.copy_(torch.tensor([40, 128, 1]))
    made.init_forward_metadata_in_graph(step)
    assert integers(sent["seq_lens"], 3) == [40, 128, 1]
    assert integers(sent["page_table"], 17)[::8] == [23, 15, 7]
    assert (sent["max_seq_len"], made.get_cuda_graph_seq_len_fill_value()) == (MAX_LEN, 1)


def test_options_of_a_layer(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    sinks = torch.arange(HEADS, dtype=torch.float32)
    forward(made, step, layer_of(sliding_window_size=15), sinks=sinks)
    forward(made, step, layer_of(logit_cap=30.0))
    (_, first), (second, capped) = launches(standin)
    assert (first["window_left"], first["sinks"]) == (15, sinks.data_ptr())
    assert (second, capped["q_len"]) == ("context", 1)
    assert capped["soft_cap"] > 0


@pytest.mark.parametrize("asked", [{}, {"save_kv_cache": True}, {"save_kv_cache": False}])
@pytest.mark.parametrize("new", [None, [1, 1]])
def test_new_keys_and_values_go_to_their_slots(asked: dict[str, bool], new: list[int] | None) -> None:
    made, mode = backend(), ForwardMode.DECODE if new is None else ForwardMode.EXTEND
    step = batch(mode, [1, 2], [40, 3], new)
    written: list[Any] = []
    made.token_to_kv_pool.set_kv_buffer = lambda *given: written.append(given)
    made.init_forward_metadata(step)
    q, k, v = (
        torch.full((2, heads, DIM), value, dtype=BF16) for heads, value in ((HEADS, 0), (KV_HEADS, 1), (KV_HEADS, 2))
    )
    layer = layer_of()
    pass_of = made.forward_decode if new is None else made.forward_extend
    for keys in (k, None):  # keys of another layer are not written again
        pass_of(q.flatten(1), keys, v, layer, step, **asked)
    if asked.get("save_kv_cache", True):
        ((to, where, *states),) = written
        assert (to is layer, where.loc is step.out_cache_loc, states[0] is k, states[1] is v) == (True,) * 4
    else:
        assert written == []


def test_arguments_that_say_nothing_are_accepted() -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    forward(made, step, k_rope=None, cos_sin_cache=None, is_neox=False)


def test_steps_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("cubin_runtime.integrations.sglang.backend.attend", lambda *given: seen.append(written(*given)))
    sinks = torch.zeros(HEADS)
    for step, layer in (
        (batch(ForwardMode.DECODE, [2, 0, 1], [40, 1, 128]), layer_of()),
        (batch(ForwardMode.EXTEND, [1, 2, 0], [20, 50, 9], [20, 7, 1]), layer_of(sliding_window_size=15)),
        (batch(ForwardMode.DECODE, [1, 2], [90, 4]), layer_of(sliding_window_size=31)),
    ):
        made = backend()
        made.init_forward_metadata(step)
        forward(made, step, layer, sinks=sinks if layer.sliding_window_size > 0 else None)
    compare("sglang 0.5.23", dict(zip(["decodes", "prompts", "window and sinks"], seen, strict=True)))


def test_draft_tokens_of_different_number_are_refused() -> None:
    step = batch(ForwardMode.TARGET_VERIFY, [1, 2], [40, 20])
    step.spec_info = SimpleNamespace(ragged_verify_layout=object())
    with pytest.raises(UsageError, match="ragged_verify_layout"):
        backend().init_forward_metadata(step)
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    assert hasattr(DFlashVerifyInput, "ragged_verify_layout"), "SGLang's name"


@pytest.mark.parametrize("scaled", [False, True])
def test_e4m3_caches(standin: StandIn, scaled: bool) -> None:
    made, layer = backend(token_to_kv_pool=pool_of(dtype=torch.float8_e4m3fn)), layer_of()
    if scaled:
        layer.k_scale, layer.v_scale = torch.tensor(2.0), torch.tensor(4.0)
    for step in (batch(ForwardMode.DECODE, [1], [40]), batch(ForwardMode.EXTEND, [1], [20], [20])):
        made.init_forward_metadata(step)
        q, _ = forward(made, step, layer, save=True)
    assert q.dtype == BF16
    sent = launches(standin)
    assert [name for name, _ in sent] == ["decode", "context"]
    for _, fields in sent:
        scales = (layer.k_scale.data_ptr(), layer.v_scale.data_ptr()) if scaled else (0, 0)
        assert (fields["k_scale"], fields["v_scale"]) == scales
    k_cache, v_cache = (half.float() for half in made.token_to_kv_pool.get_kv_buffer(layer.layer_id))
    expected = (0.5, 0.25) if scaled else (1.0, 1.0)
    assert (k_cache[step.out_cache_loc].unique().tolist(), v_cache[step.out_cache_loc].unique().tolist()) == (
        [expected[0]],
        [expected[1]],
    )


def test_an_idle_step_launches_nothing(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.IDLE, [], [])
    made.init_forward_metadata(step)
    forward(made, step)
    assert launches(standin) == []


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.SPLIT_PREFILL])
def test_modes_that_are_refused(mode: ForwardMode) -> None:
    with pytest.raises(UsageError, match=f"forward_mode={mode.name}"):
        backend().init_forward_metadata(batch(mode, [1], [20], [20]))
    with pytest.raises(UsageError, match="captured, expected DECODE"):
        backend().init_forward_metadata_out_graph(batch(mode, [1], [20], [20]))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"page_size": 1}, "page_size=1"),
        ({"dtype": torch.float16}, "kv_cache_dtype: torch.bfloat16"),
        ({"token_to_kv_pool": SimpleNamespace()}, "token_to_kv_pool: a SimpleNamespace"),
        ({"token_to_kv_pool": pool_of(dtype=torch.float8_e5m2)}, "kv_cache_dtype: torch.float8_e5m2"),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "dcp_size=2"),
        ({"server_args": SimpleNamespace(enable_prefill_cp=True)}, "enable_prefill_cp"),
    ],
)
def test_runners_that_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        backend(**changed)


@pytest.mark.parametrize(
    ("changed", "given", "named"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "attn_type"),
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        ({"v_head_dim": 64}, {}, "head_size=128, values of 64"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}, "logit_capping_method='sigmoid'"),
        ({}, {"k_rope": torch.zeros(1)}, "k_rope"),
    ],
)
def test_layers_that_are_refused(changed: dict[str, Any], given: dict[str, Any], named: str) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    with pytest.raises(UsageError, match=named):
        forward(made, step, layer_of(**changed), **given)
