"""Captures of other threads, which nothing that the driver layer does may spoil."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cubin_runtime.launch import driver_api as api
from cubin_runtime.launch.driver import DriverCallError
from cubin_runtime.launch.modules import KernelRequest, ModuleCache
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import GraphDriver, StandIn
from tests.launch.examples import DIGEST, LAYOUT, SYMBOL, cubin, kernel_facts, needs

Act = Callable[[GraphDriver, int], Any]


def load(driver: GraphDriver, context: int) -> None:
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts(max_threads=None)))
    cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000)))
    cache.close()


def make_workspace(driver: GraphDriver, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 1024, driver.create_stream(), graphs=1)
    workspace.close()


def drop_workspace(driver: GraphDriver, context: int) -> None:
    Workspace.allocate(driver, context, 1024, driver.create_stream())
    Workspace.allocate(driver, context, 1024, driver.create_stream())  # which frees the first


def copy(driver: GraphDriver, context: int) -> None:
    address = driver.allocate(4)
    driver.copy_to_device(address, b"abcd")
    assert driver.read(address, 4) == b"abcd"
    driver.free(address)


def wait(driver: GraphDriver, context: int) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    driver.record(event, stream)
    driver.synchronize(stream)
    driver.synchronize_event(event)


ACTS: dict[str, Act] = {
    "load and unload": load,
    "make a workspace": make_workspace,
    "drop a workspace": drop_workspace,
    "copy": copy,
    "wait": wait,
}


@pytest.fixture
def capturing(driver: GraphDriver, context: int) -> Iterator[Callable[[str], Callable[[], int]]]:
    """Begins a capture of a mode on another thread; what it gives ends the capture there."""
    begun, over, found = threading.Event(), threading.Event(), list[Any]()
    threads = list[threading.Thread]()

    def capture(mode: str) -> None:
        driver.set_current(context)
        stream = driver.create_stream()
        driver.begin_capture(stream, mode)
        begun.set()
        over.wait(30)
        try:
            found.append(driver.end_capture(stream))
        except DriverCallError as error:
            found.append(error)

    def end() -> int:
        over.set()
        threads[0].join()
        if isinstance(found[0], Exception):
            raise found[0]
        return int(found[0])

    def begin(mode: str) -> Callable[[], int]:
        threads.append(threading.Thread(target=capture, args=(mode,)))
        threads[0].start()
        begun.wait(30)
        return end

    yield begin
    over.set()


def mode_of_thread(driver: GraphDriver) -> int:
    """The calling thread's capture mode, which is asked for by setting another and setting it back."""
    mode = ctypes.c_int(0)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
    before = mode.value
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
    return before


@pytest.mark.parametrize("act", ACTS)
def test_a_capture_of_another_thread_in_global_mode_survives(
    driver: GraphDriver, standin: StandIn, context: int, capturing: Any, act: str
) -> None:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    end = capturing("global")
    ACTS[act](driver, context)
    assert end()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_of_the_same_thread_on_another_stream_survives(
    driver: GraphDriver, standin: StandIn, context: int, act: str, mode: str
) -> None:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    stream = driver.create_stream()
    driver.begin_capture(stream, mode)
    ACTS[act](driver, context)
    assert driver.end_capture(stream)


def test_the_stand_in_spoils_a_global_capture_when_another_thread_allocates(
    driver: GraphDriver, standin: StandIn, capturing: Any
) -> None:
    end = capturing("global")
    unguarded = ctypes.CDLL(str(standin.path)).cuMemAlloc_v2
    assert unguarded(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4)) == api.CAPTURE_UNSUPPORTED
    with pytest.raises(DriverCallError, match="cuStreamEndCapture returned 901"):
        end()


@pytest.mark.parametrize("code", [0, 2])
def test_the_mode_of_the_thread_is_as_it_was(driver: GraphDriver, standin: StandIn, context: int, code: int) -> None:
    if code:
        standin.fail("cuMemAlloc", code)
        with pytest.raises(DriverCallError, match="cuMemAlloc returned 2"):
            driver.allocate(4)
    else:
        driver.allocate(4)
    assert mode_of_thread(driver) == 0


def test_a_driver_that_refuses_the_mode_is_called_all_the_same(
    driver: GraphDriver, standin: StandIn, context: int
) -> None:
    standin.fail("cuThreadExchangeStreamCaptureMode", 1)
    assert driver.allocate(4)
