"""Several devices: trtllm-gen's operators run where their tensors are, whatever is current, and refuse to mix them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention import trtllm_gen as operators
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import CubinRuntimeError, FrozenError, UsageError
from cubin_runtime.kernels.trtllm_gen.call import Call
from cubin_runtime.testing import StandIn
from tests.attention.device_calls import (
    CHECKED_ONLY,
    CONTEXTS,
    ON_TRTLLM_GEN_KERNELS,
    at_once,
    on_device,
    stream_on,
    tensors_of,
    with_two_devices,
)
from tests.attention.trtllm_calls import MadeUpMemory, decode_arguments
from tests.attention.trtllm_operators import OPERATORS, Spy, reduced_mla

# The workspace is looked at after planning, for which the made-up release has no kernel.
NOT_REACHED = {(name, "workspace_buffer") for name in CHECKED_ONLY}
ALL = {**ON_TRTLLM_GEN_KERNELS, **CHECKED_ONLY}
MIXED = [(name, argument) for name, argument in tensors_of(ALL) if (name, argument) not in NOT_REACHED]
# What the code for several devices does is the same on both architectures.
ON_SM100 = pytest.mark.parametrize("capability", [(10, 0)], ids=["sm100"], indirect=True)


@pytest.fixture
def runtime(runtime: Runtime, standin: StandIn) -> Runtime:
    """With two devices and no context current."""
    return with_two_devices(runtime, standin)


def arguments_on(name: str, memory: MadeUpMemory, device: int) -> dict[str, Any]:
    given: dict[str, Any] = on_device(ON_TRTLLM_GEN_KERNELS[name][1](memory), device)
    return given


def run_on(name: str, memory: MadeUpMemory, device: int) -> None:
    ON_TRTLLM_GEN_KERNELS[name][0](**arguments_on(name, memory, device))


def launch_contexts(standin: StandIn) -> set[str]:
    return {launch.seen["context"] for launch in standin.calls("cuLaunchKernelEx")}


def call_on(spy: Spy, name: str, memory: MadeUpMemory, device: int) -> Call:
    """The call that an operator makes of tensors on ``device``, after it ran."""
    run_on(name, memory, device)
    return spy.runs[-1][1]


def moved(call: Call, device: int) -> Call:
    """``call`` with all its tensors on ``device``."""
    return replace(call, **{member.name: on_device(getattr(call, member.name), device) for member in fields(call)})


@pytest.mark.parametrize("current", [None, 0, 1], ids=["none current", "0 current", "1 current"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("name", ON_TRTLLM_GEN_KERNELS)
def test_it_runs_where_its_tensors_are_and_leaves_the_current_context(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, device: int, current: int | None
) -> None:
    before = None if current is None else CONTEXTS[current]
    runtime.driver.set_current(before)
    for _ in range(2):
        run_on(name, memory, device)
    assert launch_contexts(standin) == {hex(CONTEXTS[device])}
    assert runtime.driver.current_context() == before
    assert {view.device for _, view in memory.made} <= {device}


@ON_SM100
@pytest.mark.parametrize("name", ON_TRTLLM_GEN_KERNELS)
def test_a_context_of_the_programs_own_is_used_and_has_its_own_modules(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    own = standin.make_context(1)
    for context in (CONTEXTS[1], own):
        runtime.driver.set_current(context)
        run_on(name, memory, 1)
    launched, loaded = (
        [seen.seen["context"] for seen in standin.calls(call)] for call in ("cuLaunchKernelEx", "cuModuleLoadData")
    )
    assert list(dict.fromkeys(launched)) == list(dict.fromkeys(loaded)) == ["0xc001", hex(own)]


@ON_SM100
@pytest.mark.parametrize(("device", "current"), [(0, 1), (1, 0)])
def test_a_reduction_and_the_occupancy_query_are_on_the_device_of_the_tensors(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, device: int, current: int
) -> None:
    runtime.driver.set_current(CONTEXTS[current])
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**on_device(reduced_mla(memory), device))
    flashinfer.trtllm_batch_decode_with_kv_cache(**on_device(decode_arguments(memory), device))
    assert len(standin.calls("cuLaunchKernelEx")) >= 3
    assert launch_contexts(standin) == {hex(CONTEXTS[device])}
    assert {load.seen["context"] for load in standin.calls("cuModuleLoadData")} == {hex(CONTEXTS[device])}


@ON_SM100
@pytest.mark.parametrize(("name", "argument"), MIXED)
def test_a_tensor_of_another_device_is_refused_with_both_named(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, argument: str
) -> None:
    function, arguments = ALL[name]
    given = on_device(arguments(memory), 1)
    given[argument] = on_device(given[argument], 0)
    with pytest.raises(UsageError, match=r"on device 0, .* on device 1|on device 1, .* on device 0"):
        function(**given)
    assert standin.calls("cuLaunchKernelEx") == []


@ON_SM100
def test_scales_of_another_device_are_refused(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    ragged, decode = (moved(call_on(spy, name, memory, 0), 1) for name in ("ragged", "decode"))
    there = memory.tensor("float32", 8)
    for call, words in (
        (replace(ragged, sage=operators.Sage((None, there, None, None))), r"sage\.scales\[1\]"),
        (replace(decode, out_scales=operators.OutScales(there)), "out_scales"),
    ):
        with pytest.raises(UsageError, match=f"{words}: on device 0, query is on device 1"):
            operators.plan(call, runtime=runtime)


@ON_SM100
@pytest.mark.parametrize("name", OPERATORS)
def test_a_plan_refuses_the_call_of_another_device(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    call = call_on(spy, name, memory, 0)
    plan, workspace = operators.plan(moved(call, 1), runtime=runtime), (0x7F0000000000, 1 << 30)
    standin.clear_log()
    with pytest.raises(UsageError, match="query: on device 0, planned for device 1"):
        plan.run(call, workspace, 0, 0)
    assert standin.calls("cuLaunchKernelEx") == []


@ON_SM100
@pytest.mark.parametrize("name", ON_TRTLLM_GEN_KERNELS)
def test_it_runs_on_the_current_stream_of_the_tensors_device(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {device: stream_on(runtime, device) for device in (0, 1)}
    for device in (0, 1):
        run_on(name, memory, device)
    sent = [int(launch.seen["stream"], 0) for launch in standin.calls("cuLaunchKernelEx")]
    assert list(dict.fromkeys(sent)) == [memory.streams[0], memory.streams[1]]


@ON_SM100
@pytest.mark.parametrize("name", ON_TRTLLM_GEN_KERNELS)
def test_a_stream_of_another_device_is_refused(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {0: stream_on(runtime, 1)}
    with pytest.raises(CubinRuntimeError, match=r"belongs to device 1.* device 0"):
        run_on(name, memory, 0)
    assert standin.calls("cuLaunchKernelEx") == []


@ON_SM100
@pytest.mark.parametrize("name", ON_TRTLLM_GEN_KERNELS)
def test_it_is_captured_on_the_second_device_while_the_first_is_current(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {1: stream_on(runtime, 1)}
    runtime.driver.set_current(CONTEXTS[0])
    run_on(name, memory, 1)
    standin.clear_log()
    runtime.driver.begin_capture(memory.streams[1])
    run_on(name, memory, 1)
    assert runtime.driver.end_capture(memory.streams[1])
    assert launch_contexts(standin) == {hex(CONTEXTS[1])}
    assert not {"cuMemAlloc", "cuModuleLoadData"} & set(standin.names())


@ON_SM100
@pytest.mark.parametrize("name", OPERATORS)
def test_preloading_serves_the_device_of_the_call(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    call = call_on(spy, name, memory, 0)
    runtime.modules.close()
    standin.clear_log()
    operators.preload(moved(call, 1), runtime=runtime)
    runtime.freeze()
    assert {load.seen["context"] for load in standin.calls("cuModuleLoadData")} == {hex(CONTEXTS[1])}
    run_on(name, memory, 1)
    assert launch_contexts(standin) == {hex(CONTEXTS[1])}


@ON_SM100
def test_a_kernel_of_one_device_is_not_loaded_on_another(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    run_on("context", memory, 1)
    runtime.freeze()
    run_on("context", memory, 1)
    with pytest.raises(FrozenError, match="is not loaded on device 0"):
        run_on("context", memory, 0)


@ON_SM100
def test_two_threads_run_on_two_devices_at_once(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    given = [arguments_on("decode", memory, device) for device in (0, 1)]
    for arguments in given:
        flashinfer.trtllm_batch_decode_with_kv_cache(**arguments)
    standin.clear_log()
    at_once(lambda device: flashinfer.trtllm_batch_decode_with_kv_cache(**given[device]))
    seen = {(launch.seen["context"], launch.seen["symbol"]) for launch in standin.calls("cuLaunchKernelEx")}
    assert {context for context, _ in seen} == {"0xc000", "0xc001"}
