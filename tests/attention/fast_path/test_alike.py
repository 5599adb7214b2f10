"""A call like an earlier one is sent by its function, with the bytes of the full path; any other is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubin_runtime.attention.fast_path import operator_function
from tests.attention.fast_path_calls import ON_SM90, ON_SM100, Call, Caller, FullPaths, others_of

CASES = [*(pytest.param(name, (9, 0), id=name) for name in ON_SM90)]
CASES += [pytest.param(name, (10, 0), id=f"trtllm-gen: {name}") for name in ON_SM100]


@pytest.fixture
def call(caller: Caller, name: str, capability: tuple[int, int]) -> Call:
    return (ON_SM90 if capability == (9, 0) else ON_SM100)[name](caller.memory, caller.runtime)


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_an_equal_call_takes_the_fast_path_and_sends_the_same(
    caller: Caller, call: Call, full_paths: FullPaths
) -> None:
    first = caller.outcome(call)
    assert ("symbol" in first[0], full_paths.count) == (True, 1)
    for _ in range(3):
        came = caller.outcome(call)
        assert came == first, _part(came, first)
    assert full_paths.count == 1
    assert caller.in_full(call) == first


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_the_third_call_of_a_form_is_the_last_on_the_full_path(
    caller: Caller, call: Call, full_paths: FullPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_function, "FULL_RUNS", 3)
    first = caller.outcome(call)
    for number in (2, 3, 3, 3):
        assert caller.outcome(call) == first
        assert full_paths.count == number


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_a_call_with_another_argument_does_what_the_full_path_does(caller: Caller, call: Call) -> None:
    different = list(_different(caller, call))
    assert not different, f"{len(different)} differ:\n" + "\n".join(different[:8])


@pytest.mark.parametrize("option", ["softmax_scale", "output_scale", "max_seq_len", "mask", "sinks", "workspace"])
def test_a_plan_s_own_method_sees_each_option(caller: Caller, option: str) -> None:
    make = ON_SM90["plan.run without options"]
    for number in range(len(list(others_of(make(caller.memory, caller.runtime), option, caller)))):
        call = make(caller.memory, caller.runtime)  # of a new plan, whose method is of calls without options
        changed = call.changed(**{option: list(others_of(call, option, caller))[number]})
        caller.outcome(call)
        came = caller.outcome(changed)
        assert came == caller.in_full(changed)


def _different(caller: Caller, call: Call) -> Iterator[str]:
    first = caller.outcome(call)
    for name, value in call.arguments.items():
        for other in others_of(call, name, caller):
            changed = call.changed(**{name: other})
            caller.outcome(call)
            came, wanted = caller.outcome(changed), caller.in_full(changed)
            if not came == wanted == caller.outcome(changed):
                yield f"{name}={other!r}: {_part(came, wanted)}"
            again = caller.outcome(call)
            if again != first:
                yield f"after {name}={other!r}, {value!r} again: {_part(again, first)}"


def _part(came: object, wanted: object) -> str:
    """Where two outcomes part."""
    one, two = str(came), str(wanted)
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
    return f"...{one[max(0, at - 30) : at + 90]} instead of ...{two[max(0, at - 30) : at + 90]}"
