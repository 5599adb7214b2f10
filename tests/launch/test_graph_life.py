from __future__ import annotations

import ctypes
import gc

import pytest

from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.graph_life import GraphLife, _alive
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import StandIn


def captured(driver: Driver) -> tuple[int, GraphLife]:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    life = GraphLife(driver, stream)
    return driver.end_capture(stream), life


def test_a_life_ends_with_the_graph_and_its_executables(driver: Driver, context: int) -> None:
    graph, life = captured(driver)
    executable = driver.instantiate(graph)
    driver.destroy_graph(graph)
    assert not life.ended
    driver.destroy_executable(executable)
    assert life.ended
    assert life.ended


@pytest.mark.parametrize("end", ["release", "close", "drop"])
def test_a_graph_writes_to_no_memory_that_was_freed(driver: Driver, context: int, end: str) -> None:
    stream, memory = driver.create_stream(), ctypes.create_string_buffer(256)
    address = (ctypes.addressof(memory) + 15) & ~15
    workspace: Workspace | None = Workspace(driver, context, address, 64)
    assert workspace is not None
    driver.begin_capture(stream)
    workspace.claim(stream)
    graph = driver.end_capture(stream)
    if end == "release":
        workspace.release()
    elif end == "close":
        workspace.close()
    else:
        workspace = None
    gc.collect()
    pattern = b"\x01" * 64
    taken = [ctypes.create_string_buffer(pattern, 64) for _ in range(20_000)]
    driver.destroy_graph(graph)
    assert all(buffer.raw == pattern for buffer in taken)


def test_the_memory_of_a_life_that_nothing_refers_to_is_freed_with_a_later_one(driver: Driver, context: int) -> None:
    before = set(_alive)
    graph, life = captured(driver)
    assert _alive - before == {life}
    del life
    other, _ = captured(driver)
    assert len(_alive - before) == 2
    driver.destroy_graph(graph)
    driver.destroy_graph(other)
    last, life = captured(driver)
    assert _alive - before == {life}
    driver.destroy_graph(last)
    assert life.ended
    assert not _alive - before


def test_a_buffer_is_not_lost_to_a_capture_that_cannot_have_it(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream, graphs=1)
    workspace.claim(stream)
    standin.fail("cuUserObjectCreate", 1, times=1)
    driver.begin_capture(stream)
    with pytest.raises(DriverCallError):
        workspace.claim(stream)
    assert workspace.claim(stream)
