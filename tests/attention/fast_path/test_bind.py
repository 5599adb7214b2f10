"""Bound steps: what cannot be bound, what a step refuses, and what it sends where a run would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import TensorView, paged_decode, plan_paged_decode
from cubin_runtime.errors import UsageError, WorkspaceError
from tests.attention.fast_path_calls import ON_SM90, Call, Caller, suspended

CACHES = ("k_cache", "v_cache")
MOVING = ("q", "page_table", "seq_lens", "out")
NAMES = (*CACHES, *MOVING)
OTHER_FORMS: dict[str, Callable[[TensorView], Any]] = {
    "dtype": lambda view: replace(view, dtype="uint8"),
    "shape": lambda view: replace(view, shape=(view.shape[0] + 1, *view.shape[1:])),
    "strides": lambda view: replace(view, strides=(view.strides[0] + 64, *view.strides[1:])),
    "device": lambda view: replace(view, device=1),
    "address": lambda view: replace(view, pointer=view.pointer + 2),
    "no address": lambda view: replace(view, pointer=0),
    "None": lambda view: None,
    "a number": lambda view: 1,
}


@pytest.fixture
def tensors(caller: Caller) -> dict[str, TensorView]:
    call = ON_SM90["paged_decode"](caller.memory, caller.runtime)
    return {name: call.arguments[name] for name in NAMES}


@pytest.fixture
def plan(caller: Caller, tensors: dict[str, TensorView]) -> Any:
    return plan_paged_decode(**tensors, max_seq_len=1000, runtime=caller.runtime)


def only(tensors: dict[str, TensorView], names: tuple[str, ...]) -> dict[str, TensorView]:
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("name", ["kv_cache", "kv_layout", "window_left", "self"])
def test_a_name_that_is_not_a_run_s_is_refused(plan: Any, name: str) -> None:
    with pytest.raises((UsageError, TypeError), match=name):
        plan.bind(**{name: 1})


@pytest.mark.parametrize("form", OTHER_FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_another_form_is_refused_when_it_is_bound(
    plan: Any, tensors: dict[str, TensorView], name: str, form: str
) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        plan.bind(**{name: OTHER_FORMS[form](tensors[name])})


@pytest.mark.parametrize("form", OTHER_FORMS)
@pytest.mark.parametrize("name", MOVING)
def test_another_form_is_refused_at_each_step(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], name: str, form: str
) -> None:
    layer, good = plan.bind(**only(tensors, CACHES)), only(tensors, MOVING)
    for _ in range(3):
        with pytest.raises(UsageError, match=f"^{name}: "):
            layer.step(**{**good, name: OTHER_FORMS[form](good[name])})
        layer.step(**good)
    assert len(caller.standin.calls("cuLaunchKernelEx")) == 3


@pytest.mark.parametrize("bound", [(), CACHES, NAMES], ids=["nothing", "caches", "everything"])
@pytest.mark.parametrize("on_stream", [False, True])
def test_a_step_sends_what_a_run_does(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...], on_stream: bool
) -> None:
    stream = caller.runtime.driver.create_stream() if on_stream else None
    workspace = plan.prepare(stream)
    scales = {"softmax_scale": 0.5, "output_scale": 2.0, "max_seq_len": 600}
    layer = plan.bind(**only(tensors, bound), **scales, workspace=workspace, stream=stream)
    free = tuple(name for name in NAMES if name not in bound)
    for number in range(3):
        moved = {name: replace(tensors[name], pointer=tensors[name].pointer + 4096 * number) for name in free}
        step = Call(layer.step, moved)
        run = Call(plan.run, {**tensors, **moved, **scales, "workspace": workspace, "stream": stream})
        assert caller.outcome(step)[0] == caller.in_full(run)[0]
        assert caller.outcome(step)[0] == caller.outcome(run)[0]


def test_a_step_that_was_taken_before_the_first_call_stays_good(
    caller: Caller, plan: Any, tensors: dict[str, TensorView]
) -> None:
    layer = plan.bind(**only(tensors, CACHES))
    step, moving = layer.step, only(tensors, MOVING)
    sent = {caller.outcome(Call(step, moving)) for _ in range(3)}
    assert sent == {caller.outcome(Call(layer.step, moving))}


@pytest.mark.parametrize("bound", [CACHES, NAMES], ids=["caches", "everything"])
def test_a_closed_step_is_an_error(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    moving = only(tensors, tuple(name for name in NAMES if name not in bound))
    with plan.bind(**only(tensors, bound)) as layer:
        before = layer.step
        before(**moving)
        taken = layer.step
    caller.standin.clear_log()
    for step in (before, taken, layer.step):
        with pytest.raises(UsageError, match="closed"):
            step(*moving.values())
    assert caller.standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("bound", [CACHES, NAMES], ids=["caches", "everything"])
def test_a_captured_step_has_a_workspace_of_the_graph(
    caller: Caller, plan: Any, tensors: dict[str, TensorView], bound: tuple[str, ...]
) -> None:
    driver = caller.runtime.driver
    stream = driver.create_stream()
    workspace = plan.prepare(stream, graphs=1)
    layer = plan.bind(**only(tensors, bound), stream=stream, workspace=workspace)
    call = Call(layer.step, only(tensors, tuple(name for name in NAMES if name not in bound)))
    eager = [caller.outcome(call) for _ in range(3)]
    driver.begin_capture(stream)
    captured = [caller.outcome(call) for _ in range(2)]
    driver.end_capture(stream)
    assert len(set(eager)) == len(set(captured)) == 1
    assert captured[0] != eager[0] == caller.outcome(call)


def test_a_workspace_of_another_kind_is_refused(plan: Any, tensors: dict[str, TensorView]) -> None:
    with pytest.raises(UsageError, match="workspace"):
        plan.bind(**tensors, workspace=tensors["q"])


def test_a_bound_step_outlives_eviction(caller: Caller, plan: Any, tensors: dict[str, TensorView]) -> None:
    layer, moving = plan.bind(**only(tensors, CACHES)), only(tensors, MOVING)
    first = [caller.outcome(Call(layer.step, moving)) for _ in range(2)]
    with suspended():
        for number in range(1100):  # more sets of caches than a plan's blocks are kept for
            moved = {name: replace(tensors[name], pointer=tensors[name].pointer + 4096 * number) for name in CACHES}
            plan.run(**{**tensors, **moved})
        caller.standin.clear_log()
    assert caller.outcome(Call(layer.step, moving)) == first[0] == first[1]


def test_a_workspace_that_is_too_small_is_refused_when_it_is_bound(
    caller: Caller, plan: Any, tensors: dict[str, TensorView]
) -> None:
    from cubin_runtime.launch.workspace import Workspace

    small = Workspace.allocate(caller.runtime.driver, caller.runtime.driver.primary_context(0), 16)
    with pytest.raises(WorkspaceError, match=r"[0-9]+ bytes are needed"):
        plan.bind(**tensors, workspace=small)


def test_an_option_by_keyword_cannot_be_passed_by_position(
    caller: Caller, plan: Any, tensors: dict[str, TensorView]
) -> None:
    first = [tensors[name] for name in ("q", *CACHES, "page_table", "seq_lens")]
    faces: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = [
        (paged_decode, first, {"max_seq_len": 1000, "out": tensors["out"], "runtime": caller.runtime}),
        (plan.run, [*first, tensors["out"], None], {}),
    ]
    for function, places, options in faces:
        for _ in range(3):  # by the full path, a fast path, and the method of the plan
            with pytest.raises(TypeError, match="positional argument"):
                function(*places, None, **options)
            function(*places, **options)
