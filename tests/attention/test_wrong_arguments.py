"""Operators with wrong values for every argument: one of our errors, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime import attention
from cubin_runtime.attention import Runtime
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention import context_calls
from tests.attention.attention_examples import Tensors
from tests.attention.copying_examples import append_call, merge_call, token_call
from tests.attention.latent_examples import latent_call
from tests.attention.sparse_mla_examples import sparse_call
from tests.attention.wrong_values import VALUES, untyped

_TENSORS = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out")
DECODE = {**{name: getattr(Tensors(), name) for name in _TENSORS}, "max_seq_len": 1000}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("paged_decode", DECODE),
    "mla": ("mla_decode", {**latent_call(), "max_seq_len": 1000, "softmax_scale": 0.1}),
    "ragged context": ("context_attention", {**context_calls.ragged_call(), "max_seq_len": 300}),
    "paged context": ("context_attention", {**context_calls.paged_call(), "max_seq_len": 300}),
    "even context": ("context_attention", {**context_calls.even_call(), "max_seq_len": 300}),
    "append by offsets": ("append_kv", append_call()),
    "append by positions": ("append_kv", token_call()),
    "merge": ("merge_states", merge_call()),
    "sparse mla": ("sparse_mla_decode", sparse_call()),
}
ALL = [value for values in VALUES.values() for value in values]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("prefix", ["", "plan_"])
def test_a_wrong_argument_is_our_error(stub_runtime: Runtime, standin: StandIn, call: str, prefix: str) -> None:
    name, good = CALLS[call]
    assert untyped(getattr(attention, prefix + name), {**good, "runtime": stub_runtime}, ALL, standin) == []


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("method", ["run", "bind"])
def test_a_wrong_argument_of_a_plan_is_our_error(
    stub_runtime: Runtime, standin: StandIn, call: str, method: str
) -> None:
    name, good = CALLS[call]
    plan = getattr(attention, f"plan_{name}")(**good, runtime=stub_runtime)
    tensors = {name: value for name, value in good.items() if name not in ("max_seq_len", "softmax_scale")}
    names = (*tensors, "workspace", "stream")  # ``bind`` takes the arguments of ``run`` without listing them
    assert untyped(getattr(plan, method), tensors, ALL, standin, names) == []


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_tensor_of_a_call_without_an_output_is_our_error(
    stub_runtime: Runtime, standin: StandIn, call: str
) -> None:
    name, good = CALLS[call]
    arguments = {name: value for name, value in good.items() if name not in ("out", "lse")}
    function = getattr(attention, name)
    assert untyped(function, {**arguments, "runtime": stub_runtime}, VALUES["tensors"], standin, good) == []


def test_what_is_no_runtime_does_not_become_the_default() -> None:
    with pytest.raises(UsageError, match="runtime: got str"):
        attention.set_default_runtime("other")  # type: ignore[arg-type]
