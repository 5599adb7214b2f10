"""Bound steps ask at each launch whether the buffer that they know is still their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cubin_runtime.attention import TensorView, plan_paged_decode
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from tests.attention.fast_path_calls import ON_SM90, Call, Caller

CACHES = ("k_cache", "v_cache")
NAMES = (*CACHES, "q", "page_table", "seq_lens", "out")


@pytest.fixture
def tensors(caller: Caller) -> dict[str, TensorView]:
    call = ON_SM90["paged_decode"](caller.memory, caller.runtime)
    return {name: call.arguments[name] for name in NAMES}


@pytest.fixture
def plan(caller: Caller, tensors: dict[str, TensorView]) -> Any:
    return plan_paged_decode(**tensors, max_seq_len=1000, runtime=caller.runtime)


@pytest.fixture(params=[CACHES, NAMES], ids=["caches", "everything"])
def bound(request: pytest.FixtureRequest) -> Any:
    return request.param


def parts(tensors: dict[str, TensorView], bound: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is bound, and what a step takes."""
    return {name: tensors[name] for name in bound}, {name: tensors[name] for name in NAMES if name not in bound}


@pytest.mark.parametrize("taken_before", [False, True])
def test_after_an_unreserved_capture_steps_have_other_memory_than_the_graph(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...], taken_before: bool
) -> None:
    driver, (given, moving) = caller.runtime.driver, parts(tensors, bound)
    stream = driver.create_stream()
    layer = plan.bind(**given, stream=stream)
    layer.step(**moving)
    taken = layer.step

    def step() -> Any:
        return caller.outcome(Call(taken if taken_before else layer.step, moving))

    before = step()
    driver.begin_capture(stream)
    captured = step()
    driver.end_capture(stream)
    after = [step() for _ in range(3)]
    assert before == captured
    assert len(set(after)) == 1
    assert after[0] != captured


def test_a_step_that_got_other_memory_has_a_function_for_it(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, (given, moving) = caller.runtime.driver, parts(tensors, bound)
    stream = driver.create_stream()
    layer = plan.bind(**given, stream=stream)
    layer.step(**moving)
    driver.begin_capture(stream)
    layer.step(**moving)
    driver.end_capture(stream)
    layer.step(**moving)
    monkeypatch.setattr(plan, "run_step", lambda *_: pytest.fail("the full path"))
    layer.step(**moving)


def test_a_stream_with_the_handle_of_a_destroyed_one_gets_other_memory(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    driver, (given, moving) = caller.runtime.driver, parts(tensors, bound)
    caller.standin.make_up_memory(1 << 44)
    stream = driver.create_stream()
    step = Call(plan.bind(**given, stream=stream).step, moving)
    first = [caller.outcome(step) for _ in range(2)]
    driver.destroy_stream(stream)
    assert driver.create_stream() == stream
    second = [caller.outcome(step) for _ in range(2)]
    assert first[0] == first[1] != second[0] == second[1]


def test_the_default_stream_of_another_thread_is_another_stream(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    given, moving = parts(tensors, bound)
    layer = plan.bind(**given, stream=2)
    for _ in range(2):
        layer.step(**moving)
    refused: list[str] = []

    def work() -> None:
        driver = caller.runtime.driver
        driver.set_current(driver.primary_context(0))
        with pytest.raises(WorkspaceError, match="belongs to stream 0x2 of thread") as caught:
            layer.step(**moving)
        refused.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(refused) == 1
    layer.step(**moving)
    assert len(caller.standin.calls("cuLaunchKernelEx")) == 3


@pytest.mark.parametrize("stream", [0, 2, 0x5001])
def test_memory_that_was_released_to_another_stream_is_not_written(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...], stream: int
) -> None:
    given, moving = parts(tensors, bound)
    workspace = plan.prepare(stream)
    layer = plan.bind(**given, stream=stream, workspace=workspace)
    layer.step(**moving)
    workspace.release()
    workspace.claim(0x5002)
    caller.standin.clear_log()
    with pytest.raises(WorkspaceError, match="belongs to stream 0x5002"):
        layer.step(**moving)
    assert caller.standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("stream", [0, 2, 0x5001])
def test_a_closed_workspace_is_refused(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...], stream: int
) -> None:
    given, moving = parts(tensors, bound)
    workspace = plan.prepare(stream)
    layer = plan.bind(**given, stream=stream, workspace=workspace)
    for _ in range(2):
        layer.step(**moving)
        plan.run(**tensors, stream=stream)
        plan.run(**tensors, workspace=workspace, stream=stream)
    workspace.close()
    caller.standin.clear_log()
    for send in (
        lambda: layer.step(**moving),
        lambda: plan.run(**tensors, stream=stream),
        lambda: plan.run(**tensors, workspace=workspace, stream=stream),
        lambda: plan.check(workspace, stream),
        lambda: plan.prepare(stream),
        lambda: plan.bind(**tensors, stream=stream, workspace=workspace),
    ):
        with pytest.raises(WorkspaceError, match="it is closed"):
            send()
    assert caller.standin.calls("cuLaunchKernelEx") == caller.standin.calls("cuMemsetD8Async") == []


def test_binding_reserves_memory_for_graphs(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    driver, (given, moving) = caller.runtime.driver, parts(tensors, bound)
    stream = driver.create_stream()
    step = Call(plan.bind(**given, stream=stream, graphs=2).step, moving)
    eager, captured = caller.outcome(step), []
    for _ in range(2):
        driver.begin_capture(stream)
        captured.append(caller.outcome(step))
        driver.end_capture(stream)
    assert len({eager, *captured}) == 3
    assert caller.outcome(step) == eager


def test_the_callers_two_buffers_reserve_nothing(plan: Any, tensors: dict[str, TensorView]) -> None:
    workspace = SemaphoreWorkspace((0x10000, 1 << 20), (0x20_0000, 1 << 30))
    with pytest.raises(WorkspaceError, match="graphs=1: a SemaphoreWorkspace has no memory to reserve"):
        plan.bind(**tensors, workspace=workspace, graphs=1)
    plan.bind(**tensors, workspace=workspace).step()


def test_a_step_outlives_what_it_was_taken_from(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    driver, (given, moving) = caller.runtime.driver, parts(tensors, bound)
    stream = driver.create_stream()
    layer = plan.bind(**given, stream=stream)
    layer.step(**moving)
    step = Call(layer.step, moving)
    del layer
    eager = caller.outcome(step)
    driver.begin_capture(stream)
    captured = caller.outcome(step)
    driver.end_capture(stream)
    assert eager == captured != caller.outcome(step)


def test_plans_on_the_default_streams_of_threads_do_not_share(
    caller: Caller, plan: Any, tensors: dict[str, TensorView]
) -> None:
    run = Call(plan.run, {**tensors, "stream": 2})
    mine = [caller.outcome(run) for _ in range(3)]
    theirs: list[Any] = []

    def work() -> None:
        driver = caller.runtime.driver
        driver.set_current(driver.primary_context(0))
        theirs.extend(caller.outcome(run) for _ in range(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(set(mine)) == len(set(theirs)) == 1
    assert mine[0] != theirs[0]
