"""What calls of trtllm-gen kernels share a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention.trtllm_gen import Call, ContextCall, DecodeCall, OutScales, RaggedCall, Sage, Scale
from cubin_runtime.attention.trtllm_gen.plan_key import bound_of, bounded, plan_key
from cubin_runtime.kernels.trtllm_gen.arithmetic import INT32_MAX
from cubin_runtime.tensor import TensorView


def tensor(address: int, dtype: str, *shape: int) -> TensorView:
    return TensorView.contiguous(address, dtype, shape)


OF_ALL: dict[str, Any] = {
    "query": tensor(0x1000, "bfloat16", 4, 32, 128),
    "out": tensor(0x2000, "bfloat16", 4, 32, 128),
    "seq_lens": tensor(0x3000, "int32", 4),
    "max_q": 1,
    "max_kv": 1000,
}
KEY = tensor(0x4000, "bfloat16", 64, 4, 32, 128)
PAGED = {**OF_ALL, "key": KEY, "value": replace(KEY, pointer=0x5000), "block_tables": tensor(0x6000, "int32", 4, 64)}
DECODE = DecodeCall(**PAGED)
CONTEXT = ContextCall(**PAGED, cum_seq_lens_kv=tensor(0x7000, "int32", 5))
RAGGED_KEY = tensor(0x4000, "bfloat16", 400, 32, 128)
RAGGED = RaggedCall(**OF_ALL, key=RAGGED_KEY, value=RAGGED_KEY, cum_seq_lens_kv=tensor(0x7000, "int32", 5))
TENSORS = ("query", "out", "seq_lens", "key", "value", "block_tables")


FORMS: dict[str, Callable[[TensorView], TensorView]] = {
    "dtype": lambda view: replace(view, dtype="int8"),
    "shape": lambda view: replace(view, shape=(*view.shape[:-1], view.shape[-1] + 1)),
    "strides": lambda view: replace(view, strides=(view.strides[0] + 1, *view.strides[1:])),
    "device": lambda view: replace(view, device=1),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_another_plan(name: str, form: str) -> None:
    assert plan_key(replace(DECODE, **{name: FORMS[form](getattr(DECODE, name))})) != plan_key(DECODE)


@pytest.mark.parametrize("name", TENSORS)
def test_another_address_is_the_same_plan(name: str) -> None:
    moved = replace(DECODE, **{name: replace(getattr(DECODE, name), pointer=0x9000)})
    assert plan_key(moved) == plan_key(DECODE)


def test_one_pool_for_keys_and_values_is_another_plan() -> None:
    assert plan_key(replace(DECODE, value=KEY)) != plan_key(DECODE)


@pytest.mark.parametrize(
    "changes",
    [
        {"bmm1": Scale(0.5)},
        {"bmm2": Scale(0.5)},
        {"out_scales": OutScales(scale=2.0, first_token=3)},
        {"max_kv": 600},
    ],
)
def test_scales_and_lengths_within_the_bound_are_the_same_plan(changes: dict[str, Any]) -> None:
    assert plan_key(replace(DECODE, **changes)) == plan_key(DECODE)


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (DECODE, {"bmm1": Scale(1.0, 0x40)}),
        (DECODE, {"bmm2": Scale(1.0, 0x40)}),
        (DECODE, {"max_q": 2}),
        (DECODE, {"max_kv": 1025}),
        (DECODE, {"cum_seq_lens_q": tensor(0x40, "int32", 5)}),
        (DECODE, {"sinks": tensor(0x40, "float32", 32)}),
        (DECODE, {"lse": tensor(0x40, "float32", 4, 32)}),
        (DECODE, {"window_left": 7}),
        (DECODE, {"skip_softmax_factor": 1.0}),
        (DECODE, {"pdl": True}),
        (DECODE, {"batch_invariant": True}),
        (DECODE, {"key_scales": tensor(0x40, "float8_e4m3fn", 1)}),
        (DECODE, {"value_scales": tensor(0x40, "float8_e4m3fn", 1)}),
        (DECODE, {"shares_index": False}),
        (DECODE, {"out_scales": OutScales(tensor(0x40, "float8_e4m3fn", 1))}),
        (DECODE, {"out_scales": OutScales(block=16)}),
        (DECODE, {"top_k_lens": tensor(0x40, "int32", 4)}),
        (CONTEXT, {"causal": False}),
        (RAGGED, {"sage": Sage(blocks=(1, 0, 0, 0))}),
        (RAGGED, {"sage": Sage((tensor(0x40, "float32", 1), None, None, None))}),
    ],
)
def test_another_option_or_tensor_is_another_plan(call: Call, changes: dict[str, Any]) -> None:
    assert plan_key(replace(call, **changes)) != plan_key(call)


def test_kinds_of_calls_do_not_share_plans() -> None:
    assert len({plan_key(call)[0] for call in (DECODE, CONTEXT, RAGGED)}) == 3


@pytest.mark.parametrize(
    ("max_kv", "bound"),
    [(1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 2048), (2049, 2048), (INT32_MAX, 2048)],
)
def test_the_bound_is_a_power_of_two_within_the_table(max_kv: int, bound: int) -> None:
    assert bound_of(replace(DECODE, max_kv=max_kv)) == bound
    assert bounded(replace(DECODE, max_kv=max_kv)).max_kv == bound


@pytest.mark.parametrize("max_kv", [-1, 0, INT32_MAX + 1])
def test_a_bound_that_no_call_has_stays_for_the_checks_to_refuse(max_kv: int) -> None:
    assert bound_of(replace(DECODE, max_kv=max_kv)) == max_kv


@pytest.mark.parametrize("call", [RAGGED, replace(DECODE, top_k=64)], ids=["ragged", "sparse"])
def test_without_a_table_of_pages_only_an_int32_limits_the_bound(call: Call) -> None:
    assert bound_of(replace(call, max_kv=5000)) == 8192
    assert bound_of(replace(call, max_kv=INT32_MAX)) == INT32_MAX
