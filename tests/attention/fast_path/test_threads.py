"""Threads that call at once do not mix their parameters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention.fast_path import any_size, operator_function
from tests.attention.any_size_calls import OPERATORS, calls_of
from tests.attention.fast_path_calls import ON_SM90, Call, Caller

THREADS, ROUNDS = 8, 50
FIRST, STEP = 0x1111_0000_0000, 1 << 36
CASES = ["paged_decode", "mla_decode", "plan.run", "mla plan.run", "trtllm_batch_decode", "plain xqa"]
OWN = ("q", "query", "out", "output", "page_table", "block_tables", "seq_lens")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def of_thread(call: Call, number: int) -> Call:
    """The call with tensors of the thread's own."""
    views = {name: view for name, view in call.arguments.items() if name in OWN and view is not None}
    places = range(FIRST + number * STEP, FIRST + (number + 1) * STEP, 1 << 32)
    moved: dict[str, Any] = {n: replace(v, pointer=at) for (n, v), at in zip(views.items(), places, strict=False)}
    return call.changed(**moved)


def sent(caller: Caller) -> list[str]:
    return [launch.seen["parameter0"] for launch in caller.standin.calls("cuLaunchKernelEx")]


@pytest.mark.parametrize("name", CASES)
def test_every_launch_has_the_parameters_of_one_call(caller: Caller, name: str) -> None:
    call = ON_SM90[name](caller.memory, caller.runtime)
    check_threads(caller, [of_thread(call, number) for number in range(THREADS)])


@pytest.mark.parametrize("name", OPERATORS)
def test_every_launch_has_the_sizes_of_one_call(caller: Caller, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_function, "FULL_RUNS", 1 << 30)
    monkeypatch.setattr(any_size, "_MOST_SIZES", THREADS // 2)
    check_threads(caller, calls_of(name, caller.memory, caller.runtime, THREADS))


def check_threads(caller: Caller, calls: Sequence[Call]) -> None:
    """Call from all threads at once, and compare what arrives with the launches of the same calls one by one."""
    caller.standin.clear_log()
    for each in calls:
        each.function(**each.arguments)
    wanted = sent(caller)
    assert len(set(wanted)) == len(wanted) >= THREADS
    caller.standin.clear_log()
    ready, context = threading.Barrier(THREADS), caller.runtime.driver.current_context()

    def work(number: int) -> None:
        caller.runtime.driver.set_current(context)
        ready.wait()
        for turn in range(ROUNDS):
            each = calls[(number + turn) % THREADS]
            each.function(**each.arguments)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    came = sent(caller)
    assert {each: came.count(each) for each in wanted} == dict.fromkeys(wanted, ROUNDS)
    assert len(came) == len(wanted) * ROUNDS
