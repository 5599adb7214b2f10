"""When calls take fast paths, how many are kept, and what is around a call: contexts, captures, forks, recorders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, paged_decode
from cubin_runtime.debug.tracing import Recorder
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.launch.workspace import SemaphoreWorkspace, Workspace
from cubin_runtime.testing import StandIn
from tests.attention.fast_path_calls import ON_SM90, Call, Caller, FullPaths

MOST = 16


@pytest.fixture
def call(caller: Caller) -> Call:
    return ON_SM90["paged_decode"](caller.memory, caller.runtime)


@pytest.fixture
def run(caller: Caller) -> Call:
    return ON_SM90["plan.run"](caller.memory, caller.runtime)


def paths(runtime: Runtime) -> tuple[Callable[..., Any], ...]:
    """The fast paths of the one operator that was called."""
    (operator,) = runtime.fast_paths.values()
    return operator.entries


def windows(call: Call, count: int) -> list[Call]:
    """Calls that need a path each."""
    return [call.changed(window_left=number) for number in range(count)]


def test_paths_are_kept_up_to_a_number_the_last_used_first(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    calls = windows(call, MOST + 8)
    wanted = [caller.outcome(each) for each in calls]
    assert (len(paths(caller.runtime)), full_paths.count) == (MOST, MOST + 8)
    assert [caller.outcome(each) for each in calls[8:]] == wanted[8:]
    assert full_paths.count == MOST + 8
    assert [caller.outcome(each) for each in calls[:8]] == wanted[:8]
    assert full_paths.count == MOST + 16


def test_the_path_that_was_used_is_tried_first(caller: Caller, call: Call) -> None:
    first, second, third = windows(call, 3)
    for each in (first, second, third):
        caller.outcome(each)
    of_third, of_second, of_first = paths(caller.runtime)
    caller.outcome(first)
    assert paths(caller.runtime) == (of_first, of_third, of_second)


def test_bounds_of_one_bucket_share_a_path(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    for bound in (513, 1000, 1024, 514):
        caller.outcome(call.changed(max_seq_len=bound))
    assert full_paths.count == 1
    caller.outcome(call.changed(max_seq_len=512))
    assert full_paths.count == 2


def test_scales_of_any_size_share_a_path(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    for scale in (0.5, 2.0, -3.0, 1e-30):
        given = call.changed(softmax_scale=scale, output_scale=scale * 2)
        assert caller.outcome(given) == caller.in_full(given)
    assert full_paths.count == 1


def test_tensors_elsewhere_share_a_path(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    caller.outcome(call)
    for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out"):
        view = call.arguments[name]
        moved = call.changed(**{name: replace(view, pointer=view.pointer + (1 << 42))})
        assert caller.outcome(moved) == caller.in_full(moved)
    assert full_paths.count == 1


def test_tensors_of_one_memory_move_in_it(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    cache = call.arguments["k_cache"]
    calls = [call.changed(v_cache=replace(cache, pointer=cache.pointer + by)) for by in (1 << 20, 1 << 21, 0)]
    wanted = [caller.in_full(each) for each in calls]
    assert [caller.outcome(each) for each in calls] == wanted
    assert full_paths.count == 1


def test_a_call_that_is_refused_leaves_nothing_behind(caller: Caller, call: Call, full_paths: FullPaths) -> None:
    assert caller.outcome(call.changed(max_seq_len=-1))[0] == "UsageError"
    assert not any(caller.runtime.fast_paths.values())
    first = caller.outcome(call)
    assert caller.outcome(call) == first
    assert full_paths.count == 2


def test_a_method_taken_before_the_first_run_takes_the_fast_path_too(
    caller: Caller, call: Call, run: Call, full_paths: FullPaths
) -> None:
    caller.outcome(run)
    caller.outcome(run)
    assert full_paths.count == 1
    assert caller.outcome(run) == caller.in_full(run)


@pytest.mark.parametrize("face", ["call", "run"])
def test_another_context_of_the_device_is_launched_in(
    caller: Caller, standin: StandIn, face: str, request: pytest.FixtureRequest
) -> None:
    call: Call = request.getfixturevalue(face)
    driver = caller.runtime.driver
    first, own = caller.outcome(call), standin.make_context(0)
    for context, expected in ((own, hex(own)), (driver.primary_context(0), None), (None, None), (own, hex(own))):
        driver.set_current(context)
        came = caller.outcome(call)
        assert came == caller.in_full(call)
        assert driver.current_context() == context
        assert (f"('context', '{expected}')" in came[0]) == (came != first) == (context == own)


@pytest.mark.parametrize("name", ["paged_decode", "plan.run", "append_kv", "merge_states", "plain xqa"])
@pytest.mark.parametrize("first", ["primary", "own"])
@pytest.mark.parametrize("of", ["primary", "own"])
def test_a_stream_is_launched_on_in_its_own_context_whichever_is_current(
    caller: Caller, standin: StandIn, name: str, first: str, of: str
) -> None:
    driver = caller.runtime.driver
    contexts = {"primary": driver.primary_context(0), "own": standin.make_context(0)}
    streams = dict[str, int]()
    for owner, context in contexts.items():
        with driver.using(context):
            streams[owner] = driver.create_stream()
    call = ON_SM90[name](caller.memory, caller.runtime)

    def on(stream: int) -> Call:
        caller.memory.stream = stream  # the current one, of functions that name none
        return call.changed(stream=stream) if "stream" in call.arguments else call

    for _ in range(3):
        caller.outcome(on(streams[first]))
    for current in (contexts["own"], contexts["primary"], None, contexts["own"]):
        driver.set_current(current)
        came = caller.outcome(on(streams[of]))
        assert came == caller.in_full(on(streams[of]))
        assert f"('context', '{contexts[of]:#x}')" in came[0], came
        assert driver.current_context() == current


def test_a_stream_of_another_context_than_the_workspace_is_refused(caller: Caller, standin: StandIn, run: Call) -> None:
    driver, own = caller.runtime.driver, standin.make_context(0)
    with driver.using(own):
        stream = driver.create_stream()
    workspace = Workspace.allocate(driver, driver.primary_context(0), 64 << 20)
    workspace.release()
    changed = run.changed(stream=stream, workspace=workspace)
    for context in (None, own, driver.primary_context(0)):
        driver.set_current(context)
        kind, message = caller.outcome(changed)
        assert (kind, message) == caller.in_full(changed)
        assert kind == "UsageError"
        assert message == f"stream {stream:#x}: belongs to another context of device 0 than the workspace"


@pytest.mark.parametrize("name", ["paged_decode", "plan.run", "append_kv", "merge_states", "plain xqa"])
def test_a_stream_that_got_the_handle_of_one_of_another_context_is_launched_on(
    caller: Caller, standin: StandIn, name: str
) -> None:
    driver = caller.runtime.driver
    contexts = [driver.primary_context(0), standin.make_context(0)]
    call = ON_SM90[name](caller.memory, caller.runtime)
    handles = set()
    for context in (*contexts, *contexts):
        with driver.using(context):
            caller.memory.stream = stream = driver.create_stream()
        handles.add(stream)
        on_stream = call.changed(stream=stream) if "stream" in call.arguments else call
        came = [caller.outcome(on_stream) for _ in range(3)]
        assert f"('context', '{context:#x}')" in came[0][0], came[0]
        assert came == [came[0]] * 3
        driver.destroy_stream(stream)
    assert len(handles) == 1


def test_no_path_is_written_for_a_workspace_that_names_no_context(caller: Caller, call: Call) -> None:
    buffers = SemaphoreWorkspace(semaphores=(0x7F_F100_0000_00, 8 << 20), scratch=(0x7F_F200_0000_00, 64 << 20))
    own = call.changed(workspace=buffers)
    assert caller.outcome(own) == caller.outcome(own) == caller.in_full(own)
    assert not any(caller.runtime.fast_paths.values())


def test_a_context_of_another_device_does_not_matter(caller: Caller, call: Call) -> None:
    first = caller.outcome(call)
    caller.runtime.driver.set_current(caller.runtime.driver.primary_context(1))
    assert caller.outcome(call) == first


@pytest.mark.parametrize("face", ["call", "run"])
def test_each_captured_graph_has_a_workspace_of_its_own(
    caller: Caller, face: str, request: pytest.FixtureRequest
) -> None:
    call: Call = request.getfixturevalue(face)
    driver = caller.runtime.driver
    stream = driver.create_stream()
    call, caller.by_place = call.changed(stream=stream), False
    eager = caller.outcome(call)
    assert caller.outcome(call) == eager
    driver.begin_capture(stream)
    captured = [caller.outcome(call), caller.outcome(call), caller.in_full(call)]
    driver.end_capture(stream)
    assert captured == [eager] * 3  # without a reserve the capture takes the buffer
    after = caller.outcome(call)
    assert after != eager
    assert caller.outcome(call) == caller.in_full(call) == after


def test_a_capture_without_a_workspace_is_told_what_to_do(caller: Caller, call: Call) -> None:
    driver = caller.runtime.driver
    stream = driver.create_stream()
    caller.outcome(call)
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match=r"prepare\(stream"):
        call.function(**call.changed(stream=stream).arguments)
    driver.end_capture(stream)


def test_a_recorder_sees_calls_that_had_a_fast_path(caller: Caller, call: Call, tmp_path: Path) -> None:
    for _ in range(2):
        caller.outcome(call)
    with Recorder(tmp_path):
        caller.outcome(call.changed(max_seq_len=999))
    caller.outcome(call.changed(max_seq_len=998))
    (lines,) = tmp_path.glob("workloads/*/*.jsonl")
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert line["definition"]


def test_a_forked_child_is_refused(caller: Caller, call: Call) -> None:
    for _ in range(2):
        caller.outcome(call)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            paged_decode(**{**call.arguments, "runtime": None})
        except UsageError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"before a fork" in os.read(read, 1000)
    assert caller.outcome(call)[1] == "out"
