"""Any sequence of calls does on fast paths what it does without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.fast_path_calls import ON_SM90, ON_SM100, Call, Caller, others_of

NAMES = (
    *("paged_decode", "paged_decode without out", "mla_decode", "plan.run", "mla plan.run", "plain xqa"),
    *("plain xqa_batch_decode", "plain xqa_batch_decode_mla", "plain trtllm_batch_decode"),
)
CASES = [*(pytest.param(name, (9, 0), id=name) for name in NAMES)]
CASES += [pytest.param(name, (10, 0), id=f"trtllm-gen: {name}") for name in ("plain decode", "plain mla")]
# Which argument is changed and to which of its other values; no change is the likeliest.
CHANGES = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=3)
STEPS = st.lists(st.tuples(CHANGES, st.booleans()), min_size=2, max_size=8)


@pytest.fixture
def call(caller: Caller, name: str, capability: tuple[int, int]) -> Call:
    return (ON_SM90 if capability == (9, 0) else ON_SM100)[name](caller.memory, caller.runtime)


@pytest.fixture
def others(caller: Caller, call: Call) -> list[tuple[str, list[Any]]]:
    """What else each argument may be."""
    found = [(name, others_of(call, name, caller)) for name in call.arguments]
    return [(name, values) for name, values in found if values]


@pytest.fixture
def streams(caller: Caller) -> tuple[int, int]:
    return 0, caller.runtime.driver.create_stream()


@pytest.mark.parametrize(("name", "capability"), CASES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_sequence_of_calls_does_what_the_full_path_does(
    caller: Caller,
    call: Call,
    others: Sequence[tuple[str, list[Any]]],
    streams: tuple[int, int],
    steps: Sequence[tuple[list[tuple[int, int]], bool]],
) -> None:
    caller.runtime.fast_paths.clear()
    seen: list[Call] = [call]
    for changes, on_other_stream in steps:
        changed = seen[len(changes) % len(seen)].changed(**dict(_change(others, *change) for change in changes))
        seen.append(changed)
        caller.memory.stream = streams[on_other_stream]
        for each in (changed, seen[0], changed):
            assert caller.outcome(each) == caller.in_full(each)


def _change(others: Sequence[tuple[str, list[Any]]], argument: int, value: int) -> tuple[str, Any]:
    name, values = others[argument % len(others)]
    return name, values[value % len(values)]
