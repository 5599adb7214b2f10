from __future__ import annotations

import ctypes
import threading

import pytest

from cubin_runtime.errors import DeviceError, DriverError, UsageError
from cubin_runtime.launch import driver_api as api
from cubin_runtime.launch.driver import Driver, DriverCallError, DriverLibraryError
from cubin_runtime.launch.plan import LaunchAttributes, launch_config
from cubin_runtime.testing import StandIn


def test_nothing_is_opened_before_the_first_call() -> None:
    assert Driver("/nonexistent/libcuda.so.1").history(0xC000).records() == ()


def test_a_missing_library_is_named() -> None:
    with pytest.raises(DriverLibraryError, match=r"/nonexistent/libcuda\.so\.1"):
        Driver("/nonexistent/libcuda.so.1").version()


def test_asking_for_a_function_needs_the_library() -> None:
    with pytest.raises(DriverLibraryError, match="/nonexistent"):
        Driver("/nonexistent/libcuda.so.1").has("cuFuncLoad")


def test_the_loader_is_asked_for_the_library_by_its_plain_name(
    standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = ctypes.CDLL, list[str]()

    def load(path: str) -> ctypes.CDLL:
        tried.append(path)
        return real(str(standin.path))

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert Driver().version() == 13000
    assert tried == ["libcuda.so.1"]


def test_a_library_that_the_loader_lacks_is_looked_for_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(path: str) -> ctypes.CDLL:
        tried.append(path)
        raise OSError("not here")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(DriverLibraryError, match=r"'libcuda\.so\.1', which the NVIDIA driver installs: not here"):
        Driver().version()
    assert tried == ["libcuda.so.1"]


def test_a_library_without_our_functions_is_named() -> None:
    with pytest.raises(DriverLibraryError, match=r"libc.so.6 has no cuInit"):
        Driver("libc.so.6").version()


def test_a_machine_without_a_device_says_so(standin: StandIn) -> None:
    standin.without_device()
    with pytest.raises(DriverCallError, match=r"cuInit returned 100 CUDA_ERROR_NO_DEVICE .*CUDA_VISIBLE_DEVICES"):
        Driver(standin.path).version()


def test_opening_is_tried_again_after_it_failed(standin: StandIn) -> None:
    driver = Driver(standin.path)
    standin.without_device()
    with pytest.raises(DriverCallError):
        driver.version()
    standin.with_devices(1)
    assert driver.version() == 13000


def test_initialises_once_with_flags_zero(driver: Driver, standin: StandIn) -> None:
    driver.version()
    driver.device_count()
    assert standin.call("cuInit") == {"flags": "0"}


def test_threads_initialise_once(driver: Driver, standin: StandIn) -> None:
    threads = [threading.Thread(target=driver.version) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(standin.calls("cuInit")) == 1


def test_device_facts_are_read_by_their_attributes(driver: Driver, standin: StandIn) -> None:
    standin.pose_as(10, 3)
    facts = driver.device(0)
    assert (facts.name, facts.capability, facts.multiprocessors) == ("stand-in 0 (SM 10.3)", (10, 3), 132)
    assert (facts.shared_bytes_per_block_optin, facts.shared_bytes_per_multiprocessor) == (232448, 233472)
    assert (facts.l2_bytes, facts.driver_version) == (52428800, 13000)


@pytest.mark.parametrize("ordinal", [7, -1, 1 << 32])
def test_an_ordinal_that_does_not_exist_is_an_error(driver: Driver, ordinal: int) -> None:
    with pytest.raises(DriverCallError, match="likely cause: no such device ordinal"):
        driver.primary_context(ordinal)
    with pytest.raises(DriverCallError, match="likely cause: no such device ordinal"):
        driver.device(ordinal)


def test_the_primary_context_is_retained_once(driver: Driver, standin: StandIn) -> None:
    assert driver.primary_context(0) == driver.primary_context(0) == 0xC000
    assert len(standin.calls("cuDevicePrimaryCtxRetain")) == 1


def test_releasing_the_primary_context_gives_it_back_once(driver: Driver, standin: StandIn) -> None:
    driver.primary_context(0)
    driver.release_primary_context(0)
    driver.release_primary_context(0)
    assert len(standin.calls("cuDevicePrimaryCtxRelease")) == 1


def test_work_belongs_in_the_primary_context_where_none_is_current(driver: Driver) -> None:
    assert driver.context_on(0) == 0xC000
    assert driver.current_context() is None


def test_work_belongs_in_the_current_context_of_its_device(driver: Driver, standin: StandIn) -> None:
    made = standin.make_context(0)
    with driver.using(made):
        assert driver.context_on(0) == made


def test_work_belongs_in_the_primary_context_beside_a_current_one_of_another_device(
    driver: Driver, standin: StandIn, context: int
) -> None:
    standin.with_devices(2)
    assert driver.context_on(1) == 0xC001
    assert driver.current_context() == context


def test_the_device_of_any_context_is_told_and_the_current_one_stays(
    driver: Driver, standin: StandIn, context: int
) -> None:
    standin.with_devices(2)
    contexts = [driver.primary_context(1), standin.make_context(1), context]
    assert [driver.context_device(each) for each in contexts] == [1, 1, 0]
    assert driver.current_context() == context


def test_a_stream_handle_that_comes_back_is_a_new_stream(driver: Driver, context: int) -> None:
    first = driver.create_stream()
    capture, number = driver.stream_identity(first)
    driver.destroy_stream(first)
    assert driver.create_stream() == first
    assert capture is None
    assert driver.stream_identity(first)[1] != number


def test_a_capturing_stream_is_known_by_its_capture(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    assert driver.stream_identity(stream) == (driver.capture_id(stream), 0)
    driver.end_capture(stream)


def test_a_stream_tells_its_context_whatever_is_current(driver: Driver, standin: StandIn, context: int) -> None:
    standin.with_devices(2)
    with driver.using(driver.primary_context(1)):
        stream = driver.create_stream()
    assert driver.stream_context(stream) == 0xC001


def test_using_restores_the_context_that_was(driver: Driver, context: int) -> None:
    with driver.using(0xC001):
        assert driver.current_context() == 0xC001
    assert driver.current_context() == context


def test_using_restores_after_an_error(driver: Driver, context: int) -> None:
    with pytest.raises(RuntimeError), driver.using(0xC001):
        raise RuntimeError
    assert driver.current_context() == context


def test_using_the_current_context_changes_nothing(driver: Driver, standin: StandIn, context: int) -> None:
    with driver.using(context):
        pass
    assert standin.calls("cuCtxPushCurrent") == []


def test_the_device_of_the_context(driver: Driver, standin: StandIn) -> None:
    standin.with_devices(2)
    with driver.using(driver.primary_context(1)):
        assert driver.context_device() == 1


def test_bytes_copied_to_the_device_read_back(driver: Driver, context: int) -> None:
    address = driver.allocate(64)
    driver.copy_to_device(address, b"0123456789")
    assert driver.read(address, 10) == b"0123456789"
    driver.free(address)


def test_writable_host_buffers_are_copied_without_a_detour(driver: Driver, context: int) -> None:
    address = driver.allocate(64)
    driver.copy_to_device(address, bytearray(b"abcd"))
    back = bytearray(4)
    driver.copy_to_host(back, address)
    assert back == b"abcd"
    driver.free(address)


def test_numpy_arrays_are_host_buffers(driver: Driver, context: int) -> None:
    numpy = pytest.importorskip("numpy")
    address = driver.allocate(64)
    driver.copy_to_device(address, numpy.arange(6, dtype=numpy.int32).reshape(2, 3))
    back = numpy.zeros((2, 3), numpy.int32)
    driver.copy_to_host(back, address)
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]
    driver.free(address)


def test_empty_copies_do_nothing(driver: Driver, context: int) -> None:
    driver.copy_to_device(0, b"")
    assert driver.read(0, 0) == b""


def test_copying_into_read_only_memory_is_refused(driver: Driver, context: int) -> None:
    with pytest.raises(UsageError, match="writable"):
        driver.copy_to_host(b"xxxx", 0)


def test_a_host_buffer_with_gaps_is_refused(driver: Driver, context: int) -> None:
    with pytest.raises(UsageError, match="C-contiguous"):
        driver.copy_to_device(0, memoryview(bytearray(8))[::2])


def test_fill_sets_bytes_on_the_stream(driver: Driver, standin: StandIn, context: int) -> None:
    address = driver.allocate(16)
    driver.fill(address, 7, 16, 0x5003)
    assert standin.call("cuMemsetD8Async") == {"value": "7", "count": "16", "stream": "0x5003"}
    assert driver.read(address, 16) == b"\7" * 16
    driver.free(address)


def test_fill_words_sets_words_on_the_stream(driver: Driver, standin: StandIn, context: int) -> None:
    address = driver.allocate(16)
    driver.fill_words(address, 0xDEADBEEF, 4, 0x5003)
    assert driver.read(address, 16).hex() == "efbeadde" * 4
    assert standin.call("cuMemsetD32Async")["stream"] == "0x5003"
    driver.free(address)


def test_allocating_nothing_is_refused(driver: Driver, context: int) -> None:
    with pytest.raises(UsageError, match="nbytes=0"):
        driver.allocate(0)


def test_memory_that_is_not_there_is_an_error_with_its_cause(driver: Driver, context: int) -> None:
    with pytest.raises(DriverCallError, match=r"out of memory.*likely cause: device memory is exhausted"):
        driver.allocate(1 << 40)


@pytest.mark.parametrize("value", [-1, 256])
def test_a_fill_value_that_is_no_byte_is_refused(driver: Driver, value: int) -> None:
    with pytest.raises(UsageError, match=f"value={value}"):
        driver.fill(0, value, 1, 0)


@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_a_fill_value_that_is_no_word_is_refused(driver: Driver, value: int) -> None:
    with pytest.raises(UsageError, match=f"value={value}"):
        driver.fill_words(0, value, 1, 0)


@pytest.mark.parametrize(("blocking", "flags"), [(False, "1"), (True, "0")])
def test_stream_flags(driver: Driver, standin: StandIn, context: int, blocking: bool, flags: str) -> None:
    driver.create_stream(blocking=blocking)
    assert standin.call("cuStreamCreate")["flags"] == flags


def test_a_destroyed_stream_is_a_stale_handle(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    driver.destroy_stream(stream)
    with pytest.raises(DriverCallError, match="a handle is stale"):
        driver.destroy_stream(stream)


def test_capture_begins_instantiates_and_launches(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    assert driver.is_capturing(stream)
    assert driver.capture_id(stream) == 1
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, stream)
    driver.destroy_graph(graph)
    driver.destroy_executable(executable)
    assert standin.call("cuGraphInstantiate") == {"graph": hex(graph), "flags": "0"}
    assert standin.call("cuGraphLaunch") == {"executable": hex(executable), "stream": hex(stream)}
    assert standin.call("cuGraphDestroy") == {"graph": hex(graph)}
    assert standin.call("cuGraphExecDestroy") == {"executable": hex(executable)}


@pytest.mark.parametrize(("mode", "number"), [("global", "0"), ("thread_local", "1"), ("relaxed", "2")])
def test_capture_modes(driver: Driver, standin: StandIn, context: int, mode: str, number: str) -> None:
    driver.begin_capture(driver.create_stream(), mode)
    assert standin.call("cuStreamBeginCapture")["mode"] == number


def test_no_stream_captures_at_first(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    assert (driver.is_capturing(stream), driver.capture_id(stream)) == (False, None)


def test_the_default_stream_tells_of_a_capture_on_a_blocking_stream(driver: Driver, context: int) -> None:
    driver.begin_capture(driver.create_stream(blocking=True))
    assert driver.is_capturing(0)


@pytest.mark.parametrize("ask", ["is_capturing", "capture_id"])
def test_asking_a_bad_stream_is_an_error(driver: Driver, standin: StandIn, context: int, ask: str) -> None:
    standin.fail("cuStreamIsCapturing", api.INVALID_HANDLE)
    standin.fail("cuStreamGetCaptureInfo", api.INVALID_HANDLE)
    with pytest.raises(DriverCallError, match="returned 400"):
        getattr(driver, ask)(0x5009)


def test_events_carry_their_handles(driver: Driver, standin: StandIn, context: int) -> None:
    event = driver.create_event()
    driver.record(event, 0x5001)
    driver.synchronize_event(event)
    driver.destroy_event(event)
    assert standin.call("cuEventRecord") == {"event": "0x8001", "stream": "0x5001"}
    assert standin.call("cuEventSynchronize") == {"event": "0x8001"}
    assert standin.call("cuEventDestroy") == {"event": "0x8001"}


def test_elapsed_time_is_a_float_between_the_two_events(driver: Driver, standin: StandIn, context: int) -> None:
    assert driver.elapsed_ms(0x8001, 0x8002) == 1.5
    assert standin.call("cuEventElapsedTime") == {"start": "0x8001", "end": "0x8002"}


@pytest.mark.parametrize(("timing", "flags"), [(True, "0"), (False, "2")])
def test_event_flags(driver: Driver, standin: StandIn, context: int, timing: bool, flags: str) -> None:
    driver.create_event(timing=timing)
    assert standin.call("cuEventCreate") == {"flags": flags}


def test_synchronising_names_the_stream(driver: Driver, standin: StandIn, context: int) -> None:
    driver.synchronize(0x5007)
    assert standin.call("cuStreamSynchronize") == {"stream": "0x5007"}


@pytest.fixture
def function(driver: Driver, standin: StandIn, context: int) -> int:
    standin.add_kernel("decode", (128, 8), max_threads=512)
    return driver.get_function(driver.load_module(b"image"), "decode")


def test_a_module_is_loaded_from_its_bytes(driver: Driver, standin: StandIn, function: int) -> None:
    assert standin.call("cuModuleLoadData")["image"] == "image"
    assert standin.call("cuModuleGetFunction") == {"module": "0xd000", "name": "decode"}


def test_unloading_names_the_module(driver: Driver, standin: StandIn, function: int) -> None:
    driver.unload_module(0xD000)
    assert standin.call("cuModuleUnload") == {"module": "0xd000"}


def test_a_symbol_that_is_not_there_is_an_error(driver: Driver, function: int) -> None:
    with pytest.raises(DriverCallError, match="the module has no symbol of that name"):
        driver.get_function(0xD000, "encode")


def test_function_attributes(driver: Driver, function: int) -> None:
    assert driver.function_attribute(function, api.FUNC_MAX_THREADS) == 512
    assert driver.function_attribute(function, api.FUNC_REGISTERS) == 128


def test_dynamic_shared_memory_and_clusters_are_opted_into(driver: Driver, standin: StandIn, function: int) -> None:
    driver.allow_dynamic_shared(function, 200000)
    driver.allow_nonportable_cluster(function)
    assert [call.seen["attribute"] + ":" + call.seen["value"] for call in standin.calls("cuFuncSetAttribute")] == [
        "8:200000",
        "14:1",
    ]


def test_parameters_come_with_offset_and_size(driver: Driver, function: int) -> None:
    assert driver.parameters(function, 2) == ((0, 128), (128, 8))


def test_a_function_with_fewer_parameters_gives_those(driver: Driver, function: int) -> None:
    assert driver.parameters(function, 3) == ((0, 128), (128, 8))


def test_no_more_parameters_are_asked_for_than_wanted(driver: Driver, standin: StandIn, function: int) -> None:
    standin.fail("cuFuncGetParamInfo", api.INVALID_HANDLE, skip=1)
    assert driver.parameters(function, 1) == ((0, 128),)


def test_another_error_while_asking_for_parameters_is_raised(driver: Driver, standin: StandIn, function: int) -> None:
    standin.fail("cuFuncGetParamInfo", api.INVALID_HANDLE)
    with pytest.raises(DriverCallError, match="cuFuncGetParamInfo returned 400"):
        driver.parameters(function, 2)


def test_active_clusters_sees_the_whole_configuration(driver: Driver, standin: StandIn, function: int) -> None:
    config = launch_config((8, 2, 1), (256, 1, 1), 1024, LaunchAttributes((4, 1, 1), 0, False))
    assert driver.active_clusters(function, config) == 16
    assert standin.call("cuOccupancyMaxActiveClusters") == {
        "symbol": "decode",
        "grid": "8,2,1",
        "block": "256,1,1",
        "shared": "1024",
        "stream": "(nil)",
        "attributes": "3",
        "cluster": "4,1,1",
        "policy": "0",
        "pdl": "0",
    }


def test_an_error_carries_call_code_name_text_and_cause(driver: Driver, standin: StandIn, context: int) -> None:
    standin.fail("cuStreamSynchronize", 1)
    with pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuStreamSynchronize", 1, "CUDA_ERROR_INVALID_VALUE")
    assert (error.text, error.sticky, error.launches) == ("invalid argument", False, ())
    assert error.cause == "an argument is outside what the driver accepts"


def test_an_unknown_code_is_shown_as_it_is(driver: Driver, standin: StandIn, context: int) -> None:
    standin.fail("cuStreamSynchronize", 777)
    with pytest.raises(DriverCallError, match=r"^cuStreamSynchronize returned 777 unknown \(unknown\)$"):
        driver.synchronize(0)


def test_driver_errors_exit_as_device_errors() -> None:
    assert issubclass(DriverCallError, DriverError)
    assert issubclass(DriverLibraryError, DeviceError)
    assert DriverCallError("c", 1, "n", "t").exit_code == 9


def test_a_fault_is_told_apart_from_this_call(driver: Driver, standin: StandIn, context: int) -> None:
    standin.fault(700)
    with pytest.raises(DriverCallError, match="of earlier asynchronous work, not of this call") as caught:
        driver.synchronize(0)
    assert caught.value.sticky


def test_later_calls_say_where_the_fault_was_first_seen(driver: Driver, standin: StandIn, context: int) -> None:
    standin.fault(700)
    with pytest.raises(DriverCallError):
        driver.synchronize(0)
    with pytest.raises(DriverCallError, match=r"cuMemAlloc returned 700 .*first seen at cuStreamSynchronize"):
        driver.allocate(16)


def test_a_function_that_the_driver_lacks_is_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.PROTOTYPES, "cuFuture", api.Prototype(("cuFuture_v9", "cuFuture"), ()))
    with pytest.raises(DriverLibraryError, match="has no cuFuture_v9 or cuFuture: a newer driver is needed"):
        driver.call("cuFuture")
    assert not driver.has("cuFuture")


def test_an_older_symbol_serves_where_the_newest_is_missing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    old = api.Prototype(("cuDriverGetVersion_v9", "cuDriverGetVersion"), (ctypes.c_void_p,))
    monkeypatch.setitem(api.PROTOTYPES, "cuDriverGetVersion", old)
    assert driver.version() == 13000


def test_an_optional_function_that_is_missing_is_none(
    driver: Driver, function: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(api.PROTOTYPES, "cuFuncGetParamInfo", api.Prototype(("cuMissing",), ()))
    assert driver.parameters(function, 1) is None


def test_a_driver_that_loads_lazily_only_is_left_to_it(
    driver: Driver, function: int, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(api.PROTOTYPES, "cuFuncLoad", api.Prototype(("cuMissing",), ()))
    driver.finish_loading(function)
    assert standin.calls("cuFuncLoad") == []


def test_a_child_of_a_fork_is_told_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.version()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(DriverLibraryError, match="before a fork"):
        driver.device_count()
