"""Names that arguments had in the last minor version, which calls may still use."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime, append_kv, merge_states, plan_append_kv, plan_merge_states, plan_mla_decode
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.testing import StandIn
from tests.attention.copying_examples import append_call, merge_call
from tests.attention.latent_examples import latent_call

FORMER = {"k": "key", "v": "value", "q_cu_seq_lens": "cum_seq_lens", "parts": "v", "part_lses": "s"}
CALLS = [(append_kv, plan_append_kv, append_call()), (merge_states, plan_merge_states, merge_call())]
STRUCTS = {"append_kv": LAYOUTS["AppendKvParams"], "merge_states": LAYOUTS["MergeStatesParams"]}


def launches(standin: StandIn, operator: str) -> list[dict[str, Any]]:
    """The parameters of each launch but for the status word, which each plan has its own of."""
    sent = [bytes.fromhex(call.seen["parameter0"]) for call in standin.calls("cuLaunchKernelEx")]
    return [{**STRUCTS[operator].unpack(parameters), "status": None} for parameters in sent]


@pytest.mark.parametrize(("call", "plan", "given"), CALLS, ids=["append_kv", "merge_states"])
def test_calls_by_the_former_names_send_the_same_and_warn(
    call: Any, plan: Any, given: dict[str, Any], stub_runtime: Runtime, standin: StandIn
) -> None:
    call(**given, runtime=stub_runtime)
    former = {FORMER.get(name, name): value for name, value in given.items()}
    for _ in range(5):  # a path of earlier calls does not take them
        with pytest.warns(DeprecationWarning, match=r"is now called .*; the next minor version refuses the old name"):
            call(**former, runtime=stub_runtime)
    with pytest.warns(DeprecationWarning, match=r"^plan_\w+: \w+ is now called"):
        planned = plan(**former, runtime=stub_runtime)
    with pytest.warns(DeprecationWarning, match=r"^run: \w+ is now called"):
        planned.run(**former)
    with pytest.warns(DeprecationWarning, match=r"^bind: \w+ is now called"):
        planned.bind(**former).step()
    sent = launches(standin, call.__name__)
    assert sent == sent[:1] * 8


def test_a_bound_step_takes_them(stub_runtime: Runtime, standin: StandIn) -> None:
    given = append_call()
    free = ("k", "v")
    step = plan_append_kv(**given, runtime=stub_runtime).bind(**{n: t for n, t in given.items() if n not in free})
    step.step(k=given["k"], v=given["v"])
    with pytest.warns(DeprecationWarning, match=r"^step: \w+ is now called \w;"):
        step.step(key=given["k"], value=given["v"])
    first, second = launches(standin, "append_kv")
    assert first == second


def test_an_argument_given_by_both_names_is_refused(stub_runtime: Runtime) -> None:
    given = append_call()
    for function in (append_kv, plan_append_kv):
        with pytest.raises(UsageError, match=r"^key: given with k, of which it is the former name"):
            function(**given, key=given["k"], runtime=stub_runtime)


def test_plans_have_selections_and_still_the_first_one(stub_runtime: Runtime) -> None:
    plan = plan_mla_decode(**latent_call(), max_seq_len=64, softmax_scale=0.1, runtime=stub_runtime)
    with pytest.warns(DeprecationWarning, match="^selection is now called selections"):
        assert plan.selection is plan.selections[0]
