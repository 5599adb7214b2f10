"""What a plan of a context attention and its steps do with each tensor and option."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import (
    BackendError,
    ClampedInputError,
    ContextAttentionPlan,
    Runtime,
    TensorView,
    context_attention,
    plan_context_attention,
)
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.device_models import describe_device
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.context_calls import (
    BATCH,
    COLUMNS,
    DIM,
    HEADS,
    KV_HEADS,
    KV_TOKENS,
    PAGE,
    PAGES,
    TOKENS,
    even_call,
    paged_call,
    ragged_call,
    view,
)
from tests.attention.trtllm_calls import MadeUpMemory

LOG2_E = math.log2(math.e)
SCALE = view("float32", 1, pointer=0x7F0000007200)


def make_plan(runtime: Runtime, given: dict[str, Any] | None = None, **options: Any) -> ContextAttentionPlan:
    asked = {"max_seq_len": 300, "runtime": runtime}
    return plan_context_attention(**{**asked, **(given or ragged_call()), **options})


def values(planner: Runtime, given: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The parameters as planned for an H200."""
    return dict(make_plan(planner, given, device_facts=H200, **options).launch_plans()[0].values)


def sent(standin: StandIn, index: int = -1, layout: str = "ContextAttentionParams") -> dict[str, Any]:
    """The parameters of a launch, as they arrived."""
    return LAYOUTS[layout].unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_dtype_head_dim_and_soft_cap_reach_kernel_and_parameters(
    planner: Runtime, dtype: str, short: str, dim: int, cap: float
) -> None:
    plan = make_plan(planner, ragged_call(dtype, dim), logit_soft_cap=cap, device_facts=H200)
    traits, given = plan.selections[0].kernel.traits, plan.launch_plans()[0].values
    assert (traits["dtype"], traits["head_dim"], traits["soft_cap"]) == (short, dim, cap > 0)
    assert given["soft_cap"] == cap
    assert given["softmax_scale_log2"] == pytest.approx(LOG2_E / math.sqrt(dim))


def test_ragged_keys(planner: Runtime) -> None:
    given = values(planner)
    sizes = ("batch", "tokens", "q_len", "kv_tokens", "num_pages", "max_seq_len")
    assert [given[name] for name in sizes] == [BATCH, TOKENS, TOKENS, KV_TOKENS, 0, 300]
    assert given["k_map"].dims == (DIM, KV_TOKENS, KV_HEADS, 1)
    assert (given["out_token_stride"], given["out_head_stride"]) == (HEADS * DIM, DIM)


def test_paged_keys(planner: Runtime) -> None:
    given = values(planner, paged_call(), max_q_len=120)
    sizes = ("batch", "tokens", "q_len", "kv_tokens", "num_pages", "page_size_log2", "table_stride")
    assert [given[name] for name in sizes] == [BATCH, TOKENS, 120, 0, PAGES, 6, COLUMNS]
    assert given["k_map"].dims == (DIM, PAGE, KV_HEADS, PAGES)


def test_tables_of_keys_and_of_values(planner: Runtime) -> None:
    given = values(planner, paged_call(page_table=view("int32", BATCH, 2, COLUMNS)), max_q_len=120)
    assert [given[name] for name in ("table_stride", "v_table_offset")] == [2 * COLUMNS, COLUMNS]
    assert values(planner, paged_call(), max_q_len=120)["v_table_offset"] == 0


def test_requests_of_one_size(planner: Runtime) -> None:
    given = values(planner, even_call(lse=view("float32", BATCH, 100, HEADS)))
    sizes = ("batch", "tokens", "q_len", "kv_tokens")
    assert [given[name] for name in sizes] == [BATCH, 3 * 100, 100, 300]
    assert given["k_map"].dims == (DIM, 300, KV_HEADS, BATCH)
    assert (given["lse_token_stride"], given["lse_head_stride"]) == (HEADS, 1)


def test_both_layouts_of_pages_are_one(planner: Runtime) -> None:
    caches = {name: view("bfloat16", PAGES, KV_HEADS, PAGE, DIM) for name in ("k", "v")}
    spec = values(planner, paged_call(**caches), kv_layout="HND")["k_map"]
    assert (spec.dims, spec.strides) == ((DIM, PAGE, KV_HEADS, PAGES), (2 * DIM, 2 * PAGE * DIM, 4 * PAGE * DIM))


def test_requests_of_one_size_may_have_heads_in_front_of_tokens(planner: Runtime) -> None:
    keys = {name: view("bfloat16", BATCH, KV_HEADS, 300, DIM) for name in ("k", "v")}
    spec = values(planner, even_call(**keys), kv_layout="HND")["k_map"]
    assert (spec.dims, spec.strides) == ((DIM, 300, KV_HEADS, BATCH), (2 * DIM, 600 * DIM, 1200 * DIM))


def test_keys_and_values_may_be_views_of_one_tensor(planner: Runtime) -> None:
    wide = replace(paged_call()["k"], strides=(PAGE * KV_HEADS * 2 * DIM, KV_HEADS * 2 * DIM, 2 * DIM, 1))
    given = values(planner, paged_call(k=wide, v=replace(wide, pointer=wide.pointer + 2 * DIM)))
    assert given["k_map"].strides == given["v_map"].strides == (8 * DIM, 4 * DIM, 8 * PAGE * DIM)


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, 1 << 30, 0),
        ({"causal": False}, 1 << 30, 1 << 30),
        ({"window_left": 7}, 7, 0),
        ({"causal": False, "window_left": 7, "window_right": 3}, 7, 3),
        ({"window_left": 100_000}, 300, 0),  # more than the bound hides nothing
    ],
)
def test_masks_are_windows(planner: Runtime, options: dict[str, Any], left: int, right: int) -> None:
    given = values(planner, **options)
    assert (given["window_left"], given["window_right"]) == (left, right)


def test_the_log_sum_exp_is_as_asked_for(planner: Runtime) -> None:
    given = values(planner, lse_base="e", lse_sink=False)
    assert (given["lse_scale"], given["lse_sink"]) == (math.log(2), 0)
    assert (values(planner)["lse_scale"], values(planner)["lse_sink"]) == (1.0, 1)


CU = view("int32", BATCH + 1)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (ragged_call(dim=512), {}, "q: head dimension 512, expected 64, 128, 192 or 256"),
        (ragged_call("float8_e4m3fn"), {}, "q: dtype float8_e4m3fn, expected bfloat16 or float16 with float8_e4m3fn"),
        (ragged_call("float32"), {}, "k: dtype float32, expected bfloat16, float16 or float8_e4m3fn"),
        (
            ragged_call(kv_dtype="float8_e4m3fn", out=view("float16", TOKENS, HEADS, DIM)),
            {},
            "out: dtype float16, expected bfloat16, like q",
        ),
        (ragged_call(k_scale=SCALE), {}, "k_scale: a tensor with bfloat16 keys and values, expected a number or None"),
        (
            ragged_call(kv_dtype="float8_e4m3fn", v_scale=view("float32", HEADS)),
            {},
            r"v_scale: shape \(8,\), expected \(1,\) or \(2,\) or \(3, 2\)",
        ),
        (ragged_call(), {"k_scale": math.inf}, "k_scale=inf: expected a finite number"),
        (ragged_call(q=view("float16", TOKENS, HEADS, DIM)), {}, "q: dtype float16, expected bfloat16 with bfloat16"),
        (ragged_call(v=view("bfloat16", 5, KV_HEADS, DIM)), {}, r"v: shape \(5, 2, 128\), expected \(900, 2, 128\)"),
        (ragged_call(dim=192, v=view("bfloat16", KV_TOKENS, KV_HEADS, 192)), {}, r"v: .* expected \(900, 2, 128\)"),
        (
            ragged_call(q=view("bfloat16", TOKENS, 3, DIM)),
            {},
            "q: 3 heads over 2 KV heads, expected a multiple of 2",
        ),
        (ragged_call(out=view("bfloat16", 5, HEADS, DIM)), {}, "out: shape"),
        (ragged_call(kv_cu_seq_lens=None), {}, "k: shape .* with kv_cu_seq_lens, or"),
        (ragged_call(kv_cu_seq_lens=view("int32", 9)), {}, r"kv_cu_seq_lens: shape \(9,\), expected \(4,\)"),
        (ragged_call(q_cu_seq_lens=view("int32", 1)), {}, r"q_cu_seq_lens: shape \(1,\), expected \(batch \+ 1,\)"),
        (ragged_call(q_cu_seq_lens=None), {}, r"q: shape .* expected \[batch, q_len, q_heads, head_dim\], or"),
        (ragged_call(sinks=view("float32", 5)), {}, r"sinks: shape \(5,\), expected \(8,\) or \(2, 4\)"),
        (ragged_call(softmax_scale=view("float32", 2)), {}, r"softmax_scale: shape \(2,\), expected one element"),
        (paged_call(seq_lens=None), {}, "seq_lens: None with page_table"),
        (paged_call(kv_cu_seq_lens=CU), {}, "kv_cu_seq_lens: given with page_table"),
        (paged_call(page_table=view("int32")), {}, r"page_table: shape \(\), expected \[3, columns\] or"),
        (paged_call(page_table=view("int32", 5, 4)), {}, r"page_table: shape \(5, 4\), expected \[3, columns\] or"),
        (
            paged_call(k=view("bfloat16", PAGES, 24, KV_HEADS, DIM)),
            {},
            "k: page size 24, expected 16, 32, 64, 128, 256, 512 or 1024, or any",
        ),
        (paged_call(), {"max_seq_len": 1025}, "max_seq_len=1025: expected 0 to 1024"),
        (paged_call(), {"kv_layout": "HDN"}, "kv_layout='HDN': expected NHD or HND"),
        (ragged_call(), {"kv_layout": "HND"}, "k: shape .* expected 4 dimensions in layout HND"),
        (ragged_call(), {"max_seq_len": 901}, "max_seq_len=901: expected 0 to 900"),
        (ragged_call(), {"max_q_len": 0}, "max_q_len=0: expected 1 to"),
        (even_call(), {"max_q_len": 5}, "max_q_len=5: expected only with q_cu_seq_lens"),
        (even_call(k=view("bfloat16", 2, 300, KV_HEADS, DIM)), {}, r"k: shape \(2, 300"),
        (ragged_call(), {"window_left": -2}, r"window_left=-2: expected -1 \(none\) or more"),
        (ragged_call(), {"window_right": 3}, "window_right=3: expected -1 or 0 with causal=True"),
        (ragged_call(), {"lse_base": "10"}, "lse_base='10': expected '2' or 'e'"),
        (ragged_call(), {"logit_soft_cap": -1.0}, r"logit_soft_cap=-1.0: expected 0 \(none\) or 3.1e-05 to 32768"),
        (ragged_call(), {"logit_soft_cap": 1e-46}, "logit_soft_cap=1e-46: expected 0"),
        (ragged_call(), {"logit_soft_cap": 1e9}, "logit_soft_cap=1000000000.0: expected 0"),
        (ragged_call(), {"logit_soft_cap": math.nan}, "logit_soft_cap=nan: expected a finite number"),
        (ragged_call(out=replace(view("bfloat16", TOKENS, HEADS, DIM), pointer=0x7F0000900008)), {}, "out: address"),
    ],
)
def test_what_breaks_a_rule_is_named(
    planner: Runtime, given: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(planner, given, device_facts=H200, **options)


@pytest.mark.parametrize("name", ["causal", "lse_sink", "batch_invariant", "enable_pdl"])
def test_switches_are_true_or_false(stub_runtime: Runtime, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=2: expected True or False"):
        context_attention(**ragged_call(), max_seq_len=300, runtime=stub_runtime, **{name: 2})


def test_other_devices_are_refused(planner: Runtime) -> None:
    with pytest.raises(BackendError, match=r"context_attention on A100.* measured on 9\.0"):
        make_plan(planner, device_facts=describe_device(80))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_16_bit_queries_are_taken_over_e4m3_keys(planner: Runtime, dtype: str, dim: int) -> None:
    plan = make_plan(planner, ragged_call(dtype, dim, kv_dtype="float8_e4m3fn"), device_facts=H200)
    assert plan.selections[0].kernel.traits["kv_dtype"] == "e4m3"
    assert plan.launch_plans()[0].values["k_map"].dtype == "uint8"


def kv_scale(*shape: int, strides: tuple[int, ...] | None = None) -> TensorView:
    whole = view("float32", *shape, pointer=0x7F0000007300)
    return whole if strides is None else replace(whole, strides=strides)


@pytest.mark.parametrize(
    ("scale", "strides"),
    [
        (kv_scale(), (0, 0)),
        (kv_scale(1, 1), (0, 0)),
        (kv_scale(KV_HEADS), (0, 1)),
        (kv_scale(BATCH, KV_HEADS), (KV_HEADS, 1)),
        (kv_scale(BATCH, KV_HEADS, strides=(0, 0)), (0, 0)),  # one that was expanded
        (kv_scale(BATCH, KV_HEADS, strides=(1, BATCH)), (1, BATCH)),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_keys_and_values_are_read_with_their_strides(
    stub_runtime: Runtime, standin: StandIn, name: str, scale: TensorView, strides: tuple[int, int]
) -> None:
    context_attention(**paged_call("float8_e4m3fn"), **{name: scale}, max_seq_len=300, runtime=stub_runtime)
    seen = sent(standin, layout="ContextAttentionE4m3Params")
    assert seen[name] == scale.pointer
    assert (seen[f"{name}_request_stride"], seen[f"{name}_head_stride"]) == strides
    other = {"k_scale": "v_scale", "v_scale": "k_scale"}[name]
    assert [seen[f"{other}{part}"] for part in ("", "_request_stride", "_head_stride")] == [0, 0, 0]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_numbers_of_keys_and_values_are_parts_of_the_other_scales(
    stub_runtime: Runtime, standin: StandIn, kv_dtype: str
) -> None:
    layout = "ContextAttentionE4m3Params" if kv_dtype == "float8_e4m3fn" else "ContextAttentionParams"
    given, numbers = paged_call(kv_dtype), {"k_scale": 0.5, "v_scale": 4.0}
    for scale in (None, 2.0):  # the second time by the fast path, which a number more leads to
        for _ in range(2):
            context_attention(
                **given, **numbers, softmax_scale=scale, output_scale=3.0, max_seq_len=300, runtime=stub_runtime
            )
            seen = sent(standin, layout=layout)
            of_scores = (DIM**-0.5 if scale is None else scale) * 0.5 * LOG2_E
            assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(of_scores), 12.0)


def test_a_step_may_have_other_numbers_of_keys_and_values_than_its_plan(
    stub_runtime: Runtime, standin: StandIn
) -> None:
    given = paged_call()
    plan = make_plan(stub_runtime, given, softmax_scale=1.0, k_scale=0.5, v_scale=4.0)
    workspace = plan.prepare(0)
    seen = []
    for numbers in ({}, {"k_scale": 2.0}, {"softmax_scale": 3.0, "v_scale": 1.0}):
        plan.run(**given, **numbers, workspace=workspace)
        seen.append((sent(standin)["softmax_scale_log2"] / LOG2_E, sent(standin)["output_scale"]))
    assert seen == [pytest.approx(pair) for pair in ((0.5, 4.0), (2.0, 4.0), (1.5, 1.0))]


def test_scales_of_keys_and_values_may_be_bound(stub_runtime: Runtime, standin: StandIn) -> None:
    given = paged_call("float8_e4m3fn", k_scale=kv_scale(KV_HEADS))
    plan = make_plan(stub_runtime, given)
    with plan.bind(**given, v_scale=4.0) as layer:
        layer.step()
        layer.step()
    for index in range(2):
        seen = sent(standin, index, layout="ContextAttentionE4m3Params")
        assert (seen["k_scale"], seen["output_scale"]) == (given["k_scale"].pointer, 4.0)


def prompt_call(**more: Any) -> dict[str, Any]:
    """A prompt over an e4m3 cache that is converted before."""
    tokens, pages = 4096, 4096 // 64
    q = view("bfloat16", tokens, HEADS, DIM)
    cache = view("float8_e4m3fn", pages, 64, KV_HEADS, DIM)
    return {
        "q": q,
        "out": replace(q, pointer=0x7F0000200000),
        "k": replace(cache, pointer=0x7F0000300000),
        "v": replace(cache, pointer=0x7F0000400000),
        "page_table": view("int32", 1, pages),
        "seq_lens": view("int32", 1),
        "q_cu_seq_lens": view("int32", 2),
        **more,
    }


@pytest.mark.parametrize(
    ("scales", "fields"),
    [
        ({}, {"softmax_scale_device": 0, "output_scale_device": 0}),
        ({"k_scale": kv_scale(1, KV_HEADS, strides=(0, 0))}, {"softmax_scale_device": kv_scale().pointer}),
        ({"v_scale": kv_scale(), "softmax_scale": SCALE}, {"output_scale_device": kv_scale().pointer}),
    ],
)
def test_a_prompt_over_e4m3_is_converted_and_then_read_as_16_bits(
    stub_runtime: Runtime, standin: StandIn, scales: dict[str, Any], fields: dict[str, int]
) -> None:
    given = prompt_call(**scales)
    plan = make_plan(stub_runtime, given, max_seq_len=4096)
    assert [selection.kernel.operation for selection in plan.selections] == ["cache_conversion", "context_attention"]
    workspace = plan.prepare(0)
    plan.run(**given, workspace=workspace)
    conversion = sent(standin, layout="CacheConversionParams", index=-2)
    regions = workspace.regions(plan.regions)
    assert (conversion["k"], conversion["v"]) == (given["k"].pointer, given["v"].pointer)
    assert (conversion["converted_k"], conversion["converted_v"]) == (regions["converted_k"], regions["converted_v"])
    seen = sent(standin)
    assert {name: seen[name] for name in fields} == fields
    assert seen["page_table"] == 0


@pytest.mark.parametrize(
    ("scales", "options"),
    [
        ({"k_scale": kv_scale(KV_HEADS)}, {}),
        ({"v_scale": kv_scale(1, KV_HEADS, strides=(KV_HEADS, 1))}, {}),
        ({"k_scale": kv_scale(), "softmax_scale": SCALE}, {}),
        ({}, {"window_left": 1000}),
    ],
)
def test_scales_by_head_two_scales_and_windows_are_left_to_the_kernel_over_e4m3(
    planner: Runtime, scales: dict[str, Any], options: dict[str, Any]
) -> None:
    plan = make_plan(planner, prompt_call(**scales), device_facts=H200, max_seq_len=4096, **options)
    (only,) = plan.selections
    assert only.kernel.traits["kv_dtype"] == "e4m3"


@pytest.mark.parametrize("given", [ragged_call(), paged_call(), even_call()])
def test_every_tensor_reaches_its_field(stub_runtime: Runtime, standin: StandIn, given: dict[str, Any]) -> None:
    named = {**given, "sinks": view("float32", HEADS), "softmax_scale": SCALE, "output_scale": SCALE}
    named["lse"] = view("float32", *named["q"].shape[:-1], pointer=0x7F0000800000)
    plan = make_plan(stub_runtime, named)
    plan.run(**named, workspace=plan.prepare(0))
    seen = sent(standin)
    others = ("page_table", "seq_lens", "q_cu_seq_lens", "kv_cu_seq_lens", "out", "lse", "sinks")
    for name in others:
        assert seen[name] == (named[name].pointer if name in named else 0), name
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (SCALE.pointer, SCALE.pointer)
    maps = [call.seen for call in standin.calls("cuTensorMapEncodeTiled")]
    addresses = {str(seen["address"]) for seen in maps}
    assert addresses >= {hex(named[name].pointer) for name in ("q", "k", "v")}


def test_one_plan_serves_growing_bounds(stub_runtime: Runtime, standin: StandIn) -> None:
    for bound in (600, 700, 900):
        context_attention(**ragged_call(), max_seq_len=bound, runtime=stub_runtime)
    assert [sent(standin, i)["max_seq_len"] for i in range(3)] == [600, 700, 900]
    assert stub_runtime.stats().plans_made == 1


def test_an_output_is_made_like_q(stub_runtime: Runtime) -> None:
    stub_runtime.memory = MadeUpMemory()
    out = context_attention(**ragged_call(out=None), max_seq_len=300, runtime=stub_runtime)
    assert (out.shape, out.dtype) == ((TOKENS, HEADS, DIM), "bfloat16")


def test_a_bound_on_query_tokens_is_never_read_back(stub_runtime: Runtime, standin: StandIn) -> None:
    stub_runtime.memory = MadeUpMemory()
    context_attention(**ragged_call(), max_seq_len=300, runtime=stub_runtime)
    assert (sent(standin)["q_len"], stub_runtime.memory.reads) == (TOKENS, [])


def test_a_bound_step_takes_what_is_not_bound(stub_runtime: Runtime, standin: StandIn) -> None:
    given = paged_call()
    plan = make_plan(stub_runtime, given)
    with plan.bind(k=given["k"], v=given["v"], out=given["out"]) as layer:
        layer.step(given["q"], given["page_table"], given["seq_lens"], given["q_cu_seq_lens"])
        layer.step(given["q"], given["page_table"], given["seq_lens"], given["q_cu_seq_lens"])
    assert [sent(standin, i)["page_table"] for i in range(2)] == [given["page_table"].pointer] * 2


def test_what_was_clamped_is_told(stub_runtime: Runtime, standin: StandIn) -> None:
    given = ragged_call()
    plan = make_plan(stub_runtime, given)
    workspace = plan.prepare(0)
    plan.run(**given, workspace=workspace)
    stub_runtime.driver.fill_words(sent(standin)["status"], 1, 1, 0)
    with pytest.raises(ClampedInputError, match=r"context_attention by .* met a length over max_seq_len"):
        plan.check(workspace)
