"""The operator ``append_kv``: what it sends, what it refuses, what it reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import BackendError, ClampedInputError, Runtime, append_kv, plan_append_kv
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.append.params import APPEND_KV, APPEND_KV_QUANTISE
from cubin_runtime.kernels.native.append.plan import reciprocal
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.copying_examples import (
    BATCH,
    COLUMNS,
    DIM,
    KV_HEADS,
    PAGE,
    PAGES,
    TOKENS,
    quantised_call,
    token_call,
    view,
)
from tests.attention.copying_examples import append_call as call

LATENT = view("bfloat16", PAGES, PAGE, 576, at=0x7F0030000000)


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch."""
    seen = standin.calls("cuLaunchKernelEx")[-1].seen
    layout = APPEND_KV if seen["symbol"] == "append_kv_copy" else APPEND_KV_QUANTISE
    return layout.unpack(bytes.fromhex(seen["parameter0"]))


def plan_of(runtime: Runtime, given: dict[str, Any], **options: Any) -> Any:
    return plan_append_kv(**given, **{"runtime": runtime, "device_facts": H200, **options})


def test_tensors_and_strides_in_bytes_arrive(stub_runtime: Runtime, standin: StandIn) -> None:
    given = call()
    append_kv(**given, runtime=stub_runtime)
    seen = sent(standin)
    fields = {"k": "key", "v": "value", "q_cu_seq_lens": "cum_seq_lens"}
    assert {name: seen[fields.get(name, name)] for name in given} == {name: x.pointer for name, x in given.items()}
    assert (seen["positions"], seen["page_indptr"], seen["lengths_include_new"]) == (0, 0, 1)
    assert (seen["key_token_stride"], seen["key_head_stride"]) == (KV_HEADS * DIM * 2, DIM * 2)
    strides = (PAGE * KV_HEADS * DIM * 2, KV_HEADS * DIM * 2, DIM * 2)
    assert tuple(seen[f"v_{name}_stride"] for name in ("page", "token", "head")) == strides
    sizes = (seen["batch"], seen["tokens"], seen["kv_heads"], seen["page_size"], seen["num_pages"], seen["columns"])
    assert sizes == (BATCH, TOKENS, KV_HEADS, PAGE, PAGES, COLUMNS)
    assert (seen["k_units"], seen["token_units"]) == (DIM // 8, 2 * KV_HEADS * DIM // 8)


def test_both_layouts_differ_in_strides_alone(stub_runtime: Runtime, standin: StandIn) -> None:
    caches = {
        name: view("bfloat16", PAGES, KV_HEADS, PAGE, DIM, at=at) for name, at in (("k_cache", 64), ("v_cache", 96))
    }
    append_kv(**call(**caches), kv_layout="HND", runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["page_size"], seen["kv_heads"]) == (PAGE, KV_HEADS)
    assert (seen["k_token_stride"], seen["k_head_stride"]) == (DIM * 2, PAGE * DIM * 2)


def test_columns_of_a_latent_cache_are_two_caches_of_one_head(stub_runtime: Runtime, standin: StandIn) -> None:
    rope = replace(LATENT, pointer=LATENT.pointer + 1024, shape=(PAGES, PAGE, 64))
    given = token_call(
        k=view("bfloat16", TOKENS, 512),
        v=view("bfloat16", TOKENS, 64),
        k_cache=replace(LATENT, shape=(PAGES, PAGE, 512)),
        v_cache=rope,
    )
    append_kv(**given, runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["kv_heads"], seen["k_units"], seen["v_units"], seen["k_token_stride"]) == (1, 64, 8, 1152)
    assert (seen["columns"], seen["table_stride"], seen["batch"]) == (61, 0, BATCH)
    assert (seen["k_cache"], seen["v_cache"]) == (LATENT.pointer, LATENT.pointer + 1024)


def test_the_grid_is_what_is_resident_but_no_more_than_the_chunks(stub_runtime: Runtime) -> None:
    assert plan_of(stub_runtime, call()).launch_plans()[0].grid == (TOKENS, 1, 1)
    for tokens, ctas in ((9000, 9000 // 12), (90_000, 6 * 132)):
        many = {name: view("bfloat16", tokens, KV_HEADS, DIM) for name in ("k", "v")}
        assert plan_of(stub_runtime, call(**many)).launch_plans()[0].grid == (ctas, 1, 1)


def test_requests_of_as_many_tokens_need_no_offsets(stub_runtime: Runtime, standin: StandIn) -> None:
    nested = {name: view("bfloat16", BATCH, 3, KV_HEADS, DIM) for name in ("k", "v")}
    append_kv(**call(**nested, q_cu_seq_lens=None), lengths_include_new=False, runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["new_tokens"], seen["tokens"], seen["batch"], seen["lengths_include_new"]) == (3, 3 * BATCH, BATCH, 0)


def test_scales_are_numbers_or_on_the_device(stub_runtime: Runtime, standin: StandIn) -> None:
    scale = view("float32", 1, at=0x7F0000006000)
    append_kv(**quantised_call(k_scale=scale), v_scale=0.25, runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["k_scale_device"], seen["k_scale"]) == (scale.pointer, 1.0)
    assert (seen["v_scale_device"], seen["v_scale"]) == (0, 0.25)
    assert standin.calls("cuLaunchKernelEx")[-1].seen["symbol"] == "append_kv_bf16_to_e4m3"


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((1, 1), (1, 1), (0, 0)),
        ((KV_HEADS,), (1,), (0, 1)),
        ((KV_HEADS,), (0,), (0, 0)),
        ((BATCH, KV_HEADS), (40, 2), (40, 2)),
        ((BATCH, KV_HEADS), (0, 1), (0, 1)),
    ],
)
def test_scales_differ_by_request_and_head_with_any_strides(
    stub_runtime: Runtime, standin: StandIn, shape: tuple[int, ...], strides: tuple[int, ...], expected: tuple[int, int]
) -> None:
    scale = replace(view("float32", 1, at=0x7F0000006000), shape=shape, strides=strides)
    append_kv(**quantised_call(v_scale=scale), runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["v_scale_request_stride"], seen["v_scale_head_stride"]) == expected
    assert (seen["v_scale_device"], seen["v_scale"], seen["k_scale_head_stride"]) == (scale.pointer, 1.0, 0)


def test_a_run_takes_another_number_than_planned(stub_runtime: Runtime, standin: StandIn) -> None:
    plan = plan_append_kv(**quantised_call(), k_scale=0.5, v_scale=0.25, runtime=stub_runtime)
    plan.run(**quantised_call(), k_scale=2.0)
    seen = sent(standin)
    assert (seen["k_scale"], seen["v_scale"]) == (2.0, 0.25)
    plain = plan_append_kv(**quantised_call(), runtime=stub_runtime)
    with pytest.raises(UsageError, match=r"k_scale=2\.0: planned with None"):
        plain.run(**quantised_call(), k_scale=2.0)


def test_a_bound_step_sends_what_a_run_sends(stub_runtime: Runtime, standin: StandIn) -> None:
    given = quantised_call()
    plan = plan_append_kv(**given, k_scale=0.5, runtime=stub_runtime)
    bound = plan.bind(k_cache=given["k_cache"], v_cache=given["v_cache"], k_scale=4.0)
    step = [given[name] for name in ("k", "v", "page_table", "seq_lens", "q_cu_seq_lens")]
    for _ in range(2):
        bound.step(*step)
        assert (sent(standin)["k_scale"], sent(standin)["key"]) == (4.0, given["k"].pointer)
    with pytest.raises(UsageError, match=r"max_seq_len: expected one of k, .*, v_scale$"):
        plan.bind(max_seq_len=5)


def test_programmatic_launches_are_so(stub_runtime: Runtime) -> None:
    assert plan_of(stub_runtime, call(), enable_pdl=True).launch_plans()[0].attributes.programmatic_serialization


def test_what_was_met_is_reported_once(stub_runtime: Runtime) -> None:
    plan = plan_append_kv(**call(), runtime=stub_runtime)
    workspace = plan.prepare(0)
    stub_runtime.driver.fill_words(workspace.regions(plan.regions)["status"], 16 + 32, 1, 0)
    with pytest.raises(ClampedInputError, match=r"append_kv by .* met a position behind .* and a token of no request"):
        plan.check(workspace)
    plan.check(workspace)


def test_reciprocals_divide_every_number_that_the_kernel_divides() -> None:
    for divisor in (*range(2, 70), 255, 256, 257, 1000, 4096, 8191, 8192):
        most = 32 * divisor
        assert all(n * reciprocal(divisor) >> 32 == n // divisor for n in range(0, most, max(1, most // 5000)))
        edges = [n for k in range(1, 33) for n in (k * divisor - 1, k * divisor)]
        assert all(n * reciprocal(divisor) >> 32 == n // divisor for n in edges)


E4M3 = "float8_e4m3fn"
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no tokens": (call(k=view("bfloat16", 0, 8, 128)), {}, r"k: shape \(0, 8, 128\), expected .* 1 token or more"),
    "too many tokens": (
        call(k=view("bfloat16", (1 << 30) + 1, 8, 128)), {}, "k: shape .*, expected at most 1073741824 tokens"
    ),
    "other dtype": (call(k=view("float16", TOKENS, 8, 128)), {}, "k: dtype float16, expected bfloat16 with"),
    "e4m3 into bf16": (call(v=view(E4M3, TOKENS, 8, 128)), {}, f"v: dtype {E4M3}, expected bfloat16 with"),
    "two dtypes": (quantised_call(v=view("float16", TOKENS, 8, 128)), {}, "v: dtype float16, expected bf"),
    "two caches": (call(v_cache=view(E4M3, 100, 64, 8, 128)), {}, f"v_cache: dtype {E4M3}, expected bfloat16 with"),
    "heads": (call(k=view("bfloat16", TOKENS, 4, 128)), {}, r"k: shape .*, expected \(23, 8, 128\)"),
    "tokens of value": (call(v=view("bfloat16", 22, 8, 128)), {}, r"v: shape .*, expected \(23, 8, 128\)"),
    "head dimension": (
        call(k=view("bfloat16", 23, 8, 40), k_cache=view("bfloat16", 9, 64, 8, 40)), {},
        "k_cache: head dimension 40, expected a multiple of 16 from 32 to 1024",
    ),
    "smallest head dimension": (
        call(k=view("bfloat16", 23, 8, 16), k_cache=view("bfloat16", 9, 64, 8, 16)), {},
        "k_cache: head dimension 16, expected a multiple of 16 from 32 to 1024",
    ),
    "largest head dimension": (
        call(v=view("bfloat16", 23, 8, 1040), v_cache=view("bfloat16", 100, 64, 8, 1040)), {},
        "v_cache: head dimension 1040, expected a multiple of 16 from 32 to 1024",
    ),
    "pages of V": (call(v_cache=view("bfloat16", 99, 64, 8, 128)), {}, r"v_cache: shape .*, expected \(100, 64"),
    "no page": (call(k_cache=view("bfloat16", 0, 64, 8, 128)), {}, "k_cache: shape .* at least one page"),
    "wide rows": (
        call(
            k=view("bfloat16", 23, 128, 512), v=view("bfloat16", 23, 128, 512),
            k_cache=view("bfloat16", 2, 1, 128, 512), v_cache=view("bfloat16", 2, 1, 128, 512),
        ), {}, "k_cache: 262144 bytes of keys and values per token, expected at most 131072",
    ),
    "layout": (call(), {"kv_layout": "DNH"}, "kv_layout='DNH': expected NHD or HND"),
    "no lengths": (call(seq_lens=None), {}, "seq_lens: None with positions None, expected one of them"),
    "lengths and positions": (
        call(positions=view("int32", 23), batch_indices=view("int32", 23)), {}, "seq_lens: given with positions given"
    ),
    "positions alone": (token_call(batch_indices=None), {}, "batch_indices: None, expected exactly when positions"),
    "offsets and positions": (token_call(q_cu_seq_lens=view("int32", 5)), {}, "q_cu_seq_lens: given with positions"),
    "no offsets": (call(q_cu_seq_lens=None), {}, r"k: shape .*, expected \[batch, tokens, .*\] without"),
    "short lengths": (call(seq_lens=view("int32", 3)), {}, r"q_cu_seq_lens: shape \(5,\), expected \(4,\)"),
    "lengths of 64 bits": (call(seq_lens=view("int64", 4)), {}, "seq_lens: dtype int64, expected int32 or uint32"),
    "positions": (token_call(positions=view("int32", 9)), {}, r"positions: shape \(9,\), expected \(23,\)"),
    "table": (call(page_table=view("int32", 3, 16)), {}, r"page_table: shape \(3, 16\), expected \[4, columns\]"),
    "flat table": (call(page_table=view("int32", 64)), {}, r"page_table: shape \(64,\), expected \[4, columns\]"),
    "table of rows": (
        token_call(page_table=view("int32", 4, 16)), {}, r"page_table: shape .* with page_indptr, expected \[page ids\]"
    ),
    "scale of a copy": (call(), {"k_scale": 1.0}, "k_scale: given with bfloat16 keys and bfloat16 caches"),
    "scale on the device of a copy": (call(v_scale=view("float32", 1)), {}, "v_scale: given with bfloat16 keys"),
    "scale of 0": (quantised_call(), {"k_scale": 0.0}, r"k_scale=0\.0: expected a number other than 0"),
    "infinite scale": (quantised_call(), {"v_scale": float("inf")}, "v_scale=inf: expected a finite number"),
    "scales of other heads": (quantised_call(k_scale=view("float32", KV_HEADS + 1)), {}, "k_scale: shape .*, expected"),
    "scales of other requests": (
        quantised_call(v_scale=view("float32", BATCH + 1, KV_HEADS)),
        {},
        "v_scale: shape .*, expected",
    ),
    "word for a switch": (call(), {"enable_pdl": 1}, "enable_pdl=1: expected True or False"),
    "other device": (call(v=replace(call()["v"], device=1)), {}, "v: on device 1, k is on device 0"),
    "address": (call(k=replace(call()["k"], pointer=8)), {}, "k: address 0x8, expected a multiple of 16"),
    "strides": (call(k=replace(call()["k"], strides=(1028, 128, 1))), {}, "k: strides .* multiples of 8"),
    "one address": (call(k_cache=replace(call()["k_cache"], strides=(0, 1024, 128, 1))), {}, "k_cache: .*overlap"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_call_outside_the_rules_is_refused(stub_runtime: Runtime, standin: StandIn, name: str) -> None:
    given, options, words = REFUSALS[name]
    for function in (append_kv, plan_append_kv):
        with pytest.raises(UsageError, match=words):
            function(**given, **options, runtime=stub_runtime)
    assert not standin.calls("cuLaunchKernelEx")


def test_another_device_has_no_kernel(stub_runtime: Runtime) -> None:
    ampere = DeviceFacts(0, "A100", (8, 0), 108, 166912, 167936, 40 << 20, 13000)
    with pytest.raises(BackendError, match="append_kv on A100"):
        plan_of(stub_runtime, call(), device_facts=ampere)
