"""The operator ``merge_states``: what it sends and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, merge_states, plan_merge_states
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.merge.params import MERGE_STATES
from cubin_runtime.kernels.native.problem import LOG2_E
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.copying_examples import DIM, KV_HEADS, TOKENS, view
from tests.attention.copying_examples import merge_call as call

OTHER = {"other": view("bfloat16", TOKENS, KV_HEADS, DIM), "other_lse": view("float32", TOKENS, KV_HEADS)}


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch."""
    return MERGE_STATES.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def test_tensors_and_strides_arrive(stub_runtime: Runtime, standin: StandIn) -> None:
    given = call()
    assert merge_states(**given, runtime=stub_runtime) is given["out"]
    seen = sent(standin)
    fields = {"parts": "v", "part_lses": "s"}
    assert {name: seen[fields.get(name, name)] for name in given} == {name: x.pointer for name, x in given.items()}
    assert (seen["tokens"], seen["parts"], seen["heads"], seen["units"]) == (TOKENS, 3, KV_HEADS, DIM // 8)
    strides = (seen["v_token_stride"], seen["v_part_stride"], seen["v_head_stride"])
    assert strides == (3 * KV_HEADS * DIM, KV_HEADS * DIM, DIM)
    assert (seen["v_other"], seen["sinks"], seen["mask"], seen["lse_to_log2"]) == (0, 0, 0, 1.0)


def test_states_of_one_part_merge_in_place(stub_runtime: Runtime, standin: StandIn) -> None:
    v, s = view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000100000), view("float32", TOKENS, KV_HEADS)
    mask = view("bool", TOKENS, at=0x7F0000000001)
    merge_states(v, s, **OTHER, out=v, lse=s, mask=mask, runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["v"], seen["s"], seen["mask"]) == (seen["out"], seen["lse"], mask.pointer)
    assert (seen["parts"], seen["v_other_token_stride"], seen["s_other_head_stride"]) == (1, KV_HEADS * DIM, 1)


def test_base_e_is_converted_and_back(stub_runtime: Runtime, standin: StandIn) -> None:
    merge_states(**call(), lse_base="e", runtime=stub_runtime)
    seen = sent(standin)
    assert (seen["lse_to_log2"], seen["lse_from_log2"]) == pytest.approx((LOG2_E, 1 / LOG2_E))


@pytest.mark.parametrize(
    ("dim", "lanes"), [(8, 1), (64, 8), (80, 2), (128, 16), (192, 8), (256, 32), (512, 32), (576, 8)]
)
def test_no_lane_of_a_row_idles(stub_runtime: Runtime, dim: int, lanes: int) -> None:
    given = call(
        parts=view("bfloat16", 9, 3, 8, dim),
        part_lses=view("float32", 9, 3, 8),
        out=view("bfloat16", 9, 8, dim),
        lse=None,
    )
    plan = plan_merge_states(**given, runtime=stub_runtime, device_facts=H200)
    (launch,) = plan.launch_plans()
    assert 1 << launch.values["lanes_log2"] == lanes
    assert launch.grid == (-(-9 * 8 * lanes // 256), 1, 1)


def test_it_needs_no_scratch_and_has_nothing_to_report(stub_runtime: Runtime) -> None:
    plan = plan_merge_states(**call(), runtime=stub_runtime)
    assert plan.workspace_bytes == 0
    plan.check(plan.prepare(0))


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rank": (call(parts=view("bfloat16", 23, 128)), {}, r"parts: shape \(23, 128\), expected \[tokens, parts"),
    "no part": (call(parts=view("bfloat16", 23, 0, 8, 128)), {}, "parts: shape .* with elements"),
    "head dimension": (call(parts=view("bfloat16", 23, 3, 8, 12)), {}, "parts: head dimension 12, expected"),
    "dtype": (call(parts=view("float8_e4m3fn", 23, 3, 8, 128)), {}, "parts: dtype float8_e4m3fn, expected bfloat16"),
    "half a log-sum-exp": (call(part_lses=view("float16", 23, 3, 8)), {}, "part_lses: dtype float16, expected float32"),
    "shape of s": (call(part_lses=view("float32", 23, 8, 3)), {}, r"part_lses: shape .*, expected \(23, 3, 8\)"),
    "one other": (call(other=OTHER["other"]), {}, "other_lse: None, expected exactly when other is given"),
    "other dtype": (
        call(**{**OTHER, "other": view("float16", 23, 8, 128)}),
        {},
        "other: dtype float16, expected bfloat16, like parts",
    ),
    "out": (call(out=view("bfloat16", 23, 3, 8, 128)), {}, r"out: shape .*, expected \(23, 8, 128\)"),
    "lse": (call(lse=view("float32", 8, 23)), {}, r"lse: shape \(8, 23\), expected \(23, 8\)"),
    "sinks": (call(sinks=view("float32", 9)), {}, r"sinks: shape \(9,\), expected \(8,\)"),
    "mask": (call(mask=view("uint8", 22)), {}, r"mask: shape \(22,\), expected \(23,\)"),
    "base": (call(), {"lse_base": "10"}, "lse_base='10': expected '2' or 'e'"),
    "strides": (call(parts=replace(call()["parts"], strides=(3076, 1024, 128, 1))), {}, "parts: strides .* of 8"),
    "one address": (call(lse=replace(call()["lse"], strides=(0, 1))), {}, "lse: .* no overlapping elements"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_call_outside_the_rules_is_refused(stub_runtime: Runtime, standin: StandIn, name: str) -> None:
    given, options, words = REFUSALS[name]
    for function in (merge_states, plan_merge_states):
        with pytest.raises(UsageError, match=words):
            function(**given, **options, runtime=stub_runtime)
    assert not standin.calls("cuLaunchKernelEx")
