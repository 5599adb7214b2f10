"""Calls that interrupt a call of the same operator on the same thread, as signal handlers and finalizers make them."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cubin_runtime
from cubin_runtime.attention.runtime import PlanCache
from cubin_runtime.errors import CubinRuntimeError
from tests.attention.fast_path_calls import ON_SM90, Call, Caller, FullPaths

PACKAGE = str(Path(cubin_runtime.__file__).parent)
NAMES = ["paged_decode", "paged_decode of ragged queries", "append_kv", "plain xqa"]
Frame = Any


def in_time(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, on a thread that is given up where it waits for itself."""
    found = list[Any]()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    waits = [] if found else traceback.format_stack(sys._current_frames()[thread.ident or 0])
    assert not waits, "".join(waits[-4:])
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def interrupted(work: Callable[[], Any], by: Callable[[], Any], line: int) -> int:
    """Run ``work``, and ``by`` before the package's line of that number in the order of execution; all lines."""
    lines = 0

    def trace(frame: Frame, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == line:
                sys.settrace(None)
                by()
                sys.settrace(trace)
        return trace if frame.f_code.co_filename.startswith((PACKAGE, "<written")) else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return lines


def launches(caller: Caller) -> int:
    return len([call for call in caller.standin.calls("cuLaunchKernelEx") if "grid" in call.seen])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", range(4))
def test_a_call_may_be_interrupted_anywhere_by_another(caller: Caller, name: str, part: int) -> None:
    runtime, context = caller.runtime, caller.runtime.driver.primary_context(0)
    call, other = (ON_SM90[name](caller.memory, runtime) for _ in range(2))

    def sent() -> int:
        runtime.driver.set_current(context)
        runtime.plans = PlanCache()
        runtime.modules.close()
        for kept in (runtime.fast_paths, runtime.family_paths, runtime.families):
            kept.clear()
        caller.standin.clear_log()
        return interrupted(lambda: call.function(**call.arguments), lambda: other.function(**other.arguments), line=at)

    at = 0
    _, lines = in_time(sent), in_time(sent)  # the first reads more than the later ones
    once = launches(caller)
    for at in range(1 + part * lines // 4, (part + 1) * lines // 4, max(1, lines // 120)):
        came = in_time(sent)
        assert launches(caller) == (2 * once if at <= came else once), at
    for each in (call, other):
        assert caller.outcome(each) == caller.in_full(each)


def test_a_signal_handler_may_call_the_operator_that_it_interrupts(caller: Caller) -> None:
    call, other = (ON_SM90["paged_decode"](caller.memory, caller.runtime) for _ in range(2))
    handled = list[Any]()
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(caller_of(other)))

    def caller_of(each: Call) -> None:
        try:
            each.function(**each.arguments)
        except CubinRuntimeError as error:
            handled.append(error)

    try:
        for number in range(60):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number))
            call.function(**{**call.arguments, "window_left": number % 40})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled
    assert not [error for error in handled if error is not None]
    for each in (call, other):
        assert caller.outcome(each) == caller.in_full(each)


def test_a_finalizer_may_call_the_operator_that_it_interrupts(caller: Caller, full_paths: FullPaths) -> None:
    call, other = (ON_SM90["paged_decode"](caller.memory, caller.runtime) for _ in range(2))

    class Last:
        def __del__(self) -> None:
            caller.runtime.plans.get = made  # type: ignore[method-assign]
            other.function(**other.arguments)

    made = caller.runtime.plans.get
    caller.runtime.plans.get = lambda *given: (Last(), made(*given))[1]  # type: ignore[method-assign]
    call.function(**{**call.arguments, "window_left": 7})
    assert (launches(caller), full_paths.count) == (2, 2)
    call.function(**{**call.arguments, "window_left": 7})
    other.function(**other.arguments)
    assert (launches(caller), full_paths.count) == (4, 2)
