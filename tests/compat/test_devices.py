"""Several devices: FlashInfer's operators on native kernels run where their tensors are and refuse to mix devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import CubinRuntimeError, FrozenError, UsageError
from cubin_runtime.testing import StandIn
from tests.attention.device_calls import (
    CONTEXTS,
    ON_NATIVE_KERNELS,
    at_once,
    on_device,
    stream_on,
    tensors_of,
    with_two_devices,
)
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.xqa_calls import mla_list_arguments_of_ragged_queries, trtllm_arguments, xqa_arguments


@pytest.fixture
def runtime(hopper: Runtime, standin: StandIn) -> Runtime:
    """On SM90 with two devices and no context current."""
    return with_two_devices(hopper, standin)


def call(name: str, memory: MadeUpMemory, device: int) -> None:
    function, arguments = ON_NATIVE_KERNELS[name]
    function(**on_device(arguments(memory), device))


def launch_contexts(standin: StandIn) -> list[str]:
    return [launch.seen["context"] for launch in standin.calls("cuLaunchKernelEx")]


@pytest.mark.parametrize("current", [None, 0, 1], ids=["none current", "0 current", "1 current"])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_it_runs_where_its_tensors_are_and_leaves_the_current_context(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, device: int, current: int | None
) -> None:
    before = None if current is None else CONTEXTS[current]
    runtime.driver.set_current(before)
    for _ in range(2):
        call(name, memory, device)
    assert launch_contexts(standin) == [hex(CONTEXTS[device])] * 2
    assert runtime.driver.current_context() == before
    assert {view.device for _, view in memory.made} <= {device}


@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_a_context_of_the_programs_own_is_used_and_has_its_own_modules(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    own = standin.make_context(1)
    for context in (CONTEXTS[1], own, own):
        runtime.driver.set_current(context)
        call(name, memory, 1)
    assert launch_contexts(standin) == ["0xc001", hex(own), hex(own)]
    assert [load.seen["context"] for load in standin.calls("cuModuleLoadData")] == ["0xc001", hex(own)]


@pytest.mark.parametrize(("device", "current"), [(0, 1), (1, 0)])
def test_memory_in_place_of_too_few_semaphores_is_on_the_device_of_the_tensors(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, device: int, current: int
) -> None:
    runtime.driver.set_current(CONTEXTS[current])
    flashinfer.xqa(**on_device(xqa_arguments(memory, semaphores=memory.tensor("uint32", 68)), device))
    assert [made.seen["context"] for made in standin.calls("cuMemAlloc")] == [hex(CONTEXTS[device])]
    assert launch_contexts(standin) == [hex(CONTEXTS[device])]


@pytest.mark.parametrize(("name", "argument"), tensors_of(ON_NATIVE_KERNELS))
def test_a_tensor_of_another_device_is_refused_with_both_named(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, argument: str
) -> None:
    function, arguments = ON_NATIVE_KERNELS[name]
    given = on_device(arguments(memory), 1)
    given[argument] = on_device(given[argument], 0)
    with pytest.raises(UsageError, match=r"on device 0, .* on device 1|on device 1, .* on device 0|v_cache: other"):
        function(**given)
    assert standin.calls("cuLaunchKernelEx") == []


def _ragged_tokens(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    sums = memory.tensor("int32", 5, values=(0, 3, 4, 5, 7))
    return trtllm_arguments(memory, 7, q_len_per_req=None, cum_seq_lens_q=sums, **changes)


def _ragged_tokens_of_a_rank(memory: MadeUpMemory) -> dict[str, Any]:
    counts = memory.tensor("int32", 4)
    return _ragged_tokens(memory, max_q_len=3, cp_world=2, causal_seqlens_kv_global=counts)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (flashinfer.trtllm_batch_decode_with_kv_cache, _ragged_tokens),
        (flashinfer.trtllm_batch_decode_with_kv_cache, _ragged_tokens_of_a_rank),
        (flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_list_arguments_of_ragged_queries),
    ],
    ids=["read back", "added to counts", "added to lengths"],
)
def test_running_sums_of_another_device_are_refused_before_torch_computes_with_them(
    runtime: Runtime, memory: MadeUpMemory, function: Callable[..., Any], arguments: Callable[..., dict[str, Any]]
) -> None:
    tensors = on_device(arguments(memory), 1)
    tensors["cum_seq_lens_q"] = on_device(tensors["cum_seq_lens_q"], 0)
    with pytest.raises(UsageError, match=r"^cum_seq_lens_q: on device 0, query is on device 1"):
        function(**tensors)
    assert memory.reads == []
    assert {what for what, _ in memory.made} <= {"empty"}  # the output


@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_it_runs_on_the_current_stream_of_the_tensors_device(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {device: stream_on(runtime, device) for device in (0, 1)}
    for device in (0, 1):
        call(name, memory, device)
    sent = [int(launch.seen["stream"], 0) for launch in standin.calls("cuLaunchKernelEx")]
    assert sent == [memory.streams[0], memory.streams[1]]


@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_a_stream_of_another_device_is_refused(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {0: stream_on(runtime, 1)}
    with pytest.raises(CubinRuntimeError, match=r"device 1.* device 0"):
        call(name, memory, 0)
    assert standin.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_it_is_captured_on_the_second_device_while_the_first_is_current(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    memory.streams = {1: stream_on(runtime, 1)}
    runtime.driver.set_current(CONTEXTS[0])
    call(name, memory, 1)
    standin.clear_log()
    runtime.driver.begin_capture(memory.streams[1])
    call(name, memory, 1)
    assert runtime.driver.end_capture(memory.streams[1])
    assert launch_contexts(standin) == [hex(CONTEXTS[1])]
    assert not {"cuMemAlloc", "cuModuleLoadData"} & set(standin.names())


@pytest.mark.parametrize("name", ON_NATIVE_KERNELS)
def test_preloading_serves_the_device_that_it_names(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    runtime.preload([k for k in runtime.native_release().kernels if k.architecture.runs_on(90)], device=1)
    runtime.freeze()
    call(name, memory, 1)
    with pytest.raises(FrozenError, match="is not loaded on device 0"):
        call(name, memory, 0)
    assert launch_contexts(standin) == [hex(CONTEXTS[1])]


def test_two_threads_run_on_two_devices_at_once(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    given = {device: on_device(xqa_arguments(memory), device) for device in (0, 1)}
    for device in (0, 1):
        flashinfer.xqa(**given[device])
    standin.clear_log()
    at_once(lambda device: flashinfer.xqa(**given[device]))
    sent = {(launch.seen["context"], launch.seen["parameter0"]) for launch in standin.calls("cuLaunchKernelEx")}
    assert sorted(context for context, _ in sent) == ["0xc000", "0xc001"]
