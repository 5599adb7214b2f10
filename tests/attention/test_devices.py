"""Several devices: an operator runs on that of its tensors, whatever is current, and refuses to mix them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView, mla_decode, paged_decode, plan_mla_decode, plan_paged_decode
from cubin_runtime.errors import CubinRuntimeError, FrozenError, UsageError, WorkspaceError
from cubin_runtime.launch.workspace import SemaphoreWorkspace, Workspace
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.device_calls import CONTEXTS, at_once, stream_on
from tests.attention.latent_examples import latent_call

GQA = {name: getattr(Tensors(), name) for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out")}
PLANS = {"paged_decode": plan_paged_decode, "mla_decode": plan_mla_decode}
TENSORS = {"paged_decode": GQA, "mla_decode": latent_call()}
OPTIONS = {"max_seq_len": 1000, "softmax_scale": 0.5}


def tensors_on(device: int, operator: str = "paged_decode") -> dict[str, Any]:
    return {name: replace(view, device=device) for name, view in TENSORS[operator].items()}


def plan_on(runtime: Runtime, device: int, operator: str = "paged_decode") -> Any:
    return PLANS[operator](**tensors_on(device, operator), **OPTIONS, runtime=runtime)


def call(runtime: Runtime, device: int, **options: Any) -> None:
    paged_decode(**tensors_on(device), **{**OPTIONS, **options}, runtime=runtime)


def call_mla(runtime: Runtime, device: int, **options: Any) -> None:
    mla_decode(**tensors_on(device, "mla_decode"), **OPTIONS, runtime=runtime, **options)


def run_plan(operator: str) -> Callable[[Runtime, int], None]:
    def run(runtime: Runtime, device: int) -> None:
        plan = plan_on(runtime, device, operator)
        plan.run(**tensors_on(device, operator), workspace=plan.prepare())

    return run


@pytest.fixture
def runtime(stub_runtime: Runtime, standin: StandIn) -> Runtime:
    """With two devices and no context current."""
    standin.with_devices(2)
    stub_runtime.driver.set_current(None)
    return stub_runtime


WAYS = {
    "paged_decode": call,
    "mla_decode": call_mla,
    "plan of paged_decode": run_plan("paged_decode"),
    "plan of mla_decode": run_plan("mla_decode"),
}


@pytest.mark.parametrize("current", [None, 0, 1], ids=["none current", "0 current", "1 current"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_it_runs_where_its_tensors_are_and_leaves_the_current_context(
    runtime: Runtime, standin: StandIn, way: str, device: int, current: int | None
) -> None:
    before = None if current is None else runtime.driver.primary_context(current)
    runtime.driver.set_current(before)
    for _ in range(2):
        WAYS[way](runtime, device)
    launches = standin.calls("cuLaunchKernelEx")
    assert [launch.seen["context"] for launch in launches] == [hex(CONTEXTS[device])] * 2
    assert {call.seen["context"] for call in standin.calls("cuMemAlloc")} == {hex(CONTEXTS[device])}
    assert runtime.driver.current_context() == before


def test_a_context_of_the_programs_own_is_used_and_has_its_own_modules(runtime: Runtime, standin: StandIn) -> None:
    own = standin.make_context(1)
    for context in (CONTEXTS[1], own, own):
        runtime.driver.primary_context(1)
        runtime.driver.set_current(context)
        call(runtime, 1)
    assert [launch.seen["context"] for launch in standin.calls("cuLaunchKernelEx")] == ["0xc001", hex(own), hex(own)]
    assert len(standin.calls("cuModuleLoadData")) == 2


@pytest.mark.parametrize("name", [name for name in GQA if name != "q"])
def test_tensors_of_two_devices_are_refused_with_both_named(runtime: Runtime, standin: StandIn, name: str) -> None:
    given = tensors_on(1)
    given[name] = replace(given[name], device=0)
    with pytest.raises(UsageError, match=f"{name}: on device 0, q is on device 1"):
        paged_decode(**given, **OPTIONS, runtime=runtime)
    assert standin.names().count("cuLaunchKernelEx") == 0


@pytest.mark.parametrize("operator", PLANS)
def test_a_plan_refuses_the_tensors_of_another_device(runtime: Runtime, operator: str) -> None:
    plan = plan_on(runtime, 0, operator)
    with pytest.raises(UsageError, match="q: on device 1, planned for device 0"):
        plan.run(**tensors_on(1, operator), workspace=plan.prepare())


def test_a_workspace_of_another_device_is_refused(runtime: Runtime) -> None:
    plan = plan_on(runtime, 1)
    elsewhere = Workspace.allocate(runtime.driver, runtime.driver.primary_context(0), plan.workspace_bytes)
    with pytest.raises(UsageError, match="workspace: on device 0, the plan is for tensors on device 1"):
        plan.run(**tensors_on(1), workspace=elsewhere)


@pytest.mark.parametrize("way", [call, call_mla])
def test_a_stream_of_another_device_is_refused(runtime: Runtime, standin: StandIn, way: Callable[..., None]) -> None:
    runtime.driver.primary_context(1)
    stream = stream_on(runtime, 1)
    with pytest.raises(CubinRuntimeError, match=r"device 1.* device 0"):
        way(runtime, 0, stream=stream)
    assert standin.calls("cuLaunchKernelEx") == []


def test_two_threads_run_on_two_devices_at_once(runtime: Runtime, standin: StandIn) -> None:
    for device in (0, 1):
        call(runtime, device)
    standin.clear_log()
    at_once(lambda device: call(runtime, device, softmax_scale=1.0 + device))
    sent = [(launch.seen["context"], launch.seen["parameter0"]) for launch in standin.calls("cuLaunchKernelEx")]
    assert len(sent) == 100
    assert {context: len({bytes_ for where, bytes_ in sent if where == context}) for context, _ in sent} == {
        "0xc000": 1,
        "0xc001": 1,
    }


def test_a_graph_is_captured_on_the_second_device(runtime: Runtime, standin: StandIn) -> None:
    runtime.driver.primary_context(1)
    plan, stream = plan_on(runtime, 1), stream_on(runtime, 1)
    plan.preload()
    workspace = plan.prepare(stream, graphs=2)
    standin.clear_log()
    for _ in range(2):
        runtime.driver.begin_capture(stream)
        plan.run(**tensors_on(1), workspace=workspace, stream=stream)
        runtime.driver.end_capture(stream)
    plan.run(**tensors_on(1), workspace=workspace, stream=stream)
    assert standin.calls("cuMemAlloc") == []
    sent = [launch.seen["parameter0"] for launch in standin.calls("cuLaunchKernelEx")]
    assert len(set(sent)) == 3  # each graph has its scratch, and so have eager launches


def test_preloading_serves_the_device_that_it_names(runtime: Runtime, standin: StandIn) -> None:
    plan = plan_on(runtime, 1)
    runtime.preload([selection.kernel for selection in plan.selections], device=1)
    runtime.freeze()
    call(runtime, 1)
    with pytest.raises(FrozenError, match="is not loaded on device 0"):
        call(runtime, 0)


def test_two_captures_beside_eager_calls_of_the_function(runtime: Runtime, standin: StandIn) -> None:
    runtime.driver.primary_context(1)
    stream = stream_on(runtime, 1)
    for _ in range(2):
        call(runtime, 1, stream=stream)
        runtime.driver.begin_capture(stream)
        call(runtime, 1, stream=stream)
        runtime.driver.end_capture(stream)
    call(runtime, 1, stream=stream)
    sent = [launch.seen["parameter0"] for launch in standin.calls("cuLaunchKernelEx")]
    assert sent[0] == sent[1]  # a capture without a reserve takes what its stream had
    assert len({sent[1], sent[3], sent[4]}) == 3


def test_a_capture_without_a_reserve_says_so(runtime: Runtime) -> None:
    runtime.driver.primary_context(0)
    plan, stream = plan_on(runtime, 0), stream_on(runtime, 0)
    workspace = plan.prepare(stream)
    for again in (False, True):
        runtime.driver.begin_capture(stream)
        if again:
            with pytest.raises(WorkspaceError, match=r"prepare\(stream, graphs=n\)"):
                plan.run(**tensors_on(0), workspace=workspace, stream=stream)
        else:
            plan.preload()
            plan.run(**tensors_on(0), workspace=workspace, stream=stream)
        runtime.driver.end_capture(stream)


@pytest.mark.parametrize("way", ["call", "run", "bind", "check"])
def test_a_callers_buffers_on_another_device_are_refused(runtime: Runtime, standin: StandIn, way: str) -> None:
    of = [TensorView.contiguous(at, "uint8", (1 << 21,), 1) for at in (0x7F0000800000, 0x7F0000A00000)]
    plan, workspace = plan_on(runtime, 0), SemaphoreWorkspace.of(*of)
    ways: dict[str, Callable[[], object]] = {
        "call": lambda: call(runtime, 0, workspace=workspace),
        "run": lambda: plan.run(**tensors_on(0), workspace=workspace),
        "bind": lambda: plan.bind(**tensors_on(0), workspace=workspace),
        "check": lambda: plan.check(workspace),
    }
    with pytest.raises(UsageError, match="workspace: on device 1, the plan is for tensors on device 0"):
        ways[way]()
    assert not standin.calls("cuLaunchKernelEx")
    call(runtime, 1, workspace=workspace)
    assert len(standin.calls("cuLaunchKernelEx")) == 1
