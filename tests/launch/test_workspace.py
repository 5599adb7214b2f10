from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.workspace import Region, SemaphoreWorkspace, Workspace, WorkspacePool, workspace_size
from cubin_runtime.tensor import TensorView
from cubin_runtime.testing import StandIn

PARTS = (Region("counters", 100, 16), Region("partials", 1000, 256))


@pytest.fixture(params=[True, False], ids=["with accelerator", "without"])
def with_and_without_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr("cubin_runtime.launch.driver.accelerator", lambda: None)


def borrowed(driver: Driver, nbytes: int, address: int = 0x10000) -> Workspace:
    return Workspace(driver, 0xC000, address, nbytes)


def test_new_memory_is_zero(driver: Driver, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 64)
    assert driver.read(workspace.address, 64) == bytes(64)
    workspace.close()


@pytest.mark.parametrize(
    ("nbytes", "graphs", "name"),
    [(-1, 0, "nbytes=-1"), (64.0, 0, "nbytes=64.0"), ("64", 0, "nbytes='64'"), (64, -1, "graphs=-1")],
)
def test_memory_of_no_size_is_refused_before_any_is_made(
    driver: Driver, standin: StandIn, context: int, nbytes: int, graphs: int, name: str
) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected an integer of 0 or more"):
        Workspace.allocate(driver, context, nbytes, graphs=graphs)
    assert not standin.calls("cuMemAlloc")


@pytest.mark.parametrize("graphs", [-1, 1.5, None])
def test_a_reserve_is_for_a_number_of_graphs(driver: Driver, context: int, graphs: int) -> None:
    workspace = Workspace.allocate(driver, context, 64)
    with pytest.raises(UsageError, match=f"^graphs={graphs}: expected an integer of 0 or more"):
        workspace.reserve(graphs)


def test_it_is_cleared_on_the_stream_that_will_use_it(driver: Driver, standin: StandIn, context: int) -> None:
    Workspace.allocate(driver, context, 64, 0x5005).close()
    assert standin.call("cuMemsetD8Async") == {"value": "0", "count": "64", "stream": "0x5005"}


def test_reset_clears_all_of_it(driver: Driver, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 64)
    driver.fill(workspace.address, 9, 64, 0)
    workspace.reset()
    assert driver.read(workspace.address, 64) == bytes(64)
    workspace.close()


def test_owned_memory_is_freed_once(driver: Driver, standin: StandIn, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 64)
    workspace.close()
    workspace.close()
    assert len(standin.calls("cuMemFree")) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda closed: closed.claim(0),
        lambda closed: closed.claim(0x5001),
        lambda closed: closed.claim_eager(0),
        lambda closed: closed.reserve(1),
        lambda closed: closed.reset(),
        lambda closed: closed.places(),
        lambda closed: closed.regions(PARTS),
        lambda closed: closed.address,
        lambda closed: closed.keep(),
    ],
    ids=["claim", "claim on a stream", "claim_eager", "reserve", "reset", "places", "regions", "address", "keep"],
)
def test_a_closed_workspace_is_refused(
    driver: Driver, standin: StandIn, context: int, use: Callable[[Workspace], object]
) -> None:
    workspace = Workspace.allocate(driver, context, 64)
    workspace.claim(0)
    workspace.close()
    standin.clear_log()
    with pytest.raises(WorkspaceError, match="workspace of 64 bytes: it is closed"):
        use(workspace)
    assert standin.names() == []


def test_closing_leaves_the_memory_of_a_graph_to_the_graph(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream, graphs=1)
    graph, place = capture(driver, workspace, stream)
    workspace.close()
    assert f"{place:x}" not in freed(standin)
    driver.destroy_graph(graph)
    driver.free_waiting()
    assert f"{place:x}" in freed(standin)


def test_borrowed_memory_is_never_freed(driver: Driver, standin: StandIn) -> None:
    borrowed(driver, 64).close()
    assert standin.calls("cuMemFree") == []


def test_memory_is_freed_if_it_cannot_be_cleared(driver: Driver, standin: StandIn, context: int) -> None:
    standin.fail("cuMemsetD8Async", 1)
    with pytest.raises(DriverCallError):
        Workspace.allocate(driver, context, 64)
    assert len(standin.calls("cuMemFree")) == 1


def test_none_is_made_while_the_stream_captures(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match=r"64 bytes would be made while stream .* captures.*prepare\(stream\)"):
        Workspace.allocate(driver, context, 64, stream)
    assert standin.calls("cuMemAlloc") == []


def test_regions_lie_one_after_another_aligned(driver: Driver) -> None:
    assert borrowed(driver, 2048).regions(PARTS) == {"counters": 0x10000, "partials": 0x10100}


def test_regions_are_aligned_as_addresses_not_as_offsets(driver: Driver) -> None:
    assert borrowed(driver, 2048, 0x10010).regions(PARTS) == {"counters": 0x10010, "partials": 0x10100}


def test_a_buffer_too_small_names_the_bytes_needed(driver: Driver) -> None:
    with pytest.raises(
        WorkspaceError,
        match=r"workspace of 1255 bytes: 1256 bytes are needed \(counters 100, partials 1000\)",
    ):
        borrowed(driver, 1255).regions(PARTS)


def test_a_buffer_of_exactly_the_bytes_needed_is_enough(driver: Driver) -> None:
    assert borrowed(driver, 1256).regions(PARTS)["partials"] + 1000 == 0x10000 + 1256


regions = st.lists(
    st.builds(Region, st.uuids().map(str), st.integers(0, 5000), st.sampled_from([16, 64, 128, 256])),
    max_size=6,
)


@given(regions, st.integers(1, 1000).map(lambda n: n * 16))
def test_the_size_told_ahead_suffices_for_every_address(needed: list[Region], address: int) -> None:
    workspace = borrowed(Driver("unused"), workspace_size(needed), address)
    addresses = workspace.regions(needed)
    assert all(addresses[r.name] % r.alignment == 0 for r in needed)
    assert all(addresses[r.name] + r.nbytes <= address + workspace.nbytes for r in needed)


def test_an_address_that_is_not_aligned_is_refused(driver: Driver) -> None:
    with pytest.raises(WorkspaceError, match="0x10008"):
        borrowed(driver, 64, 0x10008)


@pytest.mark.parametrize(("nbytes", "alignment"), [(-1, 16), (1, 0), (1, 24)])
def test_a_region_outside_its_domain_is_refused(nbytes: int, alignment: int) -> None:
    with pytest.raises(UsageError, match="expected"):
        workspace_size([Region("r", nbytes, alignment)])


def test_the_same_stream_claims_again(driver: Driver, context: int) -> None:
    workspace = borrowed(driver, 64)
    workspace.claim(0x5001)
    workspace.claim(0x5001)
    with pytest.raises(WorkspaceError, match="belongs to stream 0x5001, not to stream 0x5002"):
        workspace.claim(0x5002)


def test_a_released_workspace_may_go_to_another_stream(driver: Driver, context: int) -> None:
    workspace = borrowed(driver, 64)
    workspace.claim(0x5001)
    workspace.release()
    workspace.claim(0x5002)
    with pytest.raises(WorkspaceError, match="belongs to stream 0x5002"):
        workspace.claim(0x5001)


def test_a_capture_takes_borrowed_memory_over_from_its_own_stream(driver: Driver, context: int) -> None:
    workspace, stream = borrowed(driver, 64), driver.create_stream()
    workspace.claim(stream)
    driver.begin_capture(stream)
    assert workspace.claim(stream) == (0x10000, 64)
    driver.end_capture(stream)
    with pytest.raises(WorkspaceError, match="belongs to captured graph 0x1, not to stream"):
        workspace.claim(stream)


def test_borrowed_memory_serves_one_graph(driver: Driver, context: int) -> None:
    workspace, stream = borrowed(driver, 64), driver.create_stream()
    capture(driver, workspace, stream)
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match=r"belongs to captured graph 0x1, not to captured graph 0x2.*graphs=n"):
        workspace.claim(stream)


def capture(driver: Driver, workspace: Workspace, stream: int) -> tuple[int, int]:
    """The graph of a capture in which the workspace was claimed twice, and where the buffer is that it got."""
    driver.begin_capture(stream)
    place = workspace.claim(stream)
    assert workspace.claim(stream) == place
    return driver.end_capture(stream), place[0]


def test_eager_launches_go_on_after_a_capture(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream)
    first, _ = workspace.claim(stream)
    _, captured = capture(driver, workspace, stream)
    again, _ = workspace.claim(stream)
    assert captured == first
    assert again != first
    assert driver.read(again, 64) == bytes(64)


def test_the_legacy_stream_gets_a_new_buffer_after_a_capture_took_the_only_one(driver: Driver, context: int) -> None:
    workspace, stream = Workspace.allocate(driver, context, 64), driver.create_stream()
    driver.begin_capture(stream)
    of_graph = workspace.claim(stream)
    driver.end_capture(stream)
    assert workspace.claim(0) not in (of_graph, None)
    assert workspace.claim(0) == workspace.claim(1)


def test_every_graph_has_a_buffer_of_its_own(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream, graphs=3)
    eager, _ = workspace.claim(stream)
    standin.clear_log()
    captured = [capture(driver, workspace, stream)[1] for _ in range(3)]
    assert standin.calls("cuMemAlloc") == []
    assert len({eager, *captured}) == 4
    assert workspace.claim(stream) == (eager, 64)


def test_streams_of_one_capture_do_not_share(driver: Driver, context: int) -> None:
    first, second = driver.create_stream(), driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, first, graphs=2)
    driver.begin_capture(first)
    driver.begin_capture(second)
    assert workspace.claim(first) != workspace.claim(second)


def test_a_capture_without_a_buffer_says_how_to_reserve_one(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream)
    capture(driver, workspace, stream)
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match=r"reserve one for each graph with prepare\(stream, graphs=n\)"):
        workspace.claim(stream)


def test_the_buffer_of_a_graph_is_free_again_when_graph_and_executables_are_gone(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream, graphs=1)
    workspace.claim(stream)
    graph, place = capture(driver, workspace, stream)
    executable = driver.instantiate(graph)
    driver.destroy_graph(graph)
    other, elsewhere = capture(driver, workspace, stream)
    assert elsewhere != place  # the executable still has the reserved one, so this was the stream's own
    driver.destroy_executable(executable)
    assert capture(driver, workspace, stream)[1] == place
    driver.destroy_graph(other)
    assert capture(driver, workspace, stream)[1] == elsewhere


def test_reserving_tops_up_what_is_free(driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream, graphs=2)
    capture(driver, workspace, stream)
    standin.clear_log()
    workspace.reserve(2, stream)
    workspace.reserve(2, stream)
    assert len(standin.calls("cuMemAlloc")) == 1


def test_a_stream_that_got_the_handle_of_a_destroyed_one_gets_another_buffer(
    driver: Driver, standin: StandIn, context: int
) -> None:
    standin.make_up_memory(1 << 44)  # what is freed does not come back at once
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream)
    first, _ = workspace.claim(stream)
    driver.destroy_stream(stream)
    assert driver.create_stream() == stream
    standin.clear_log()
    workspace.claim(stream)
    # Freeing waits for the work of the stream that is gone.
    assert [name for name in standin.names() if name.startswith("cuMem")] == [
        "cuMemFree",
        "cuMemAlloc",
        "cuMemsetD8Async",
    ]
    assert standin.calls("cuMemFree")[0].seen["address"] == f"{first:x}"


def test_a_stream_of_another_device_is_refused(driver: Driver, standin: StandIn, context: int) -> None:
    standin.with_devices(2)
    with driver.using(driver.primary_context(1)):
        stream = driver.create_stream()
    with pytest.raises(WorkspaceError, match="is of device 1, the workspace is on device 0"):
        Workspace.allocate(driver, context, 64).claim(stream)


def test_the_legacy_stream_has_two_names_and_each_thread_another_default_stream(driver: Driver, context: int) -> None:
    workspace = borrowed(driver, 64)
    assert workspace.claim(0) == workspace.claim(1)
    with pytest.raises(WorkspaceError, match="belongs to stream 0x0, not to stream 0x2"):
        workspace.claim(2)


def in_another_thread(call: Callable[[], object]) -> list[object]:
    """What the call gave, or raised, in a thread of its own."""
    came: list[object] = []

    def work() -> None:
        try:
            came.append(call())
        except WorkspaceError as error:
            came.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return came


def test_the_default_streams_of_two_threads_do_not_share(driver: Driver, standin: StandIn, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 64, 2)
    place = workspace.claim(2)
    standin.clear_log()
    (came,) = in_another_thread(lambda: workspace.claim(2))
    assert "belongs to stream 0x2 of thread" in str(came)
    assert "not to stream 0x2 of thread" in str(came)
    assert workspace.claim(2) == place
    assert not {"cuMemAlloc", "cuMemFree"} & set(standin.names())


@pytest.mark.usefixtures("with_and_without_accelerator")
@pytest.mark.parametrize("stream", [0, 2, 0x5001])
def test_an_eager_claim_tells_that_the_buffer_is_no_longer_the_streams(
    driver: Driver, context: int, stream: int
) -> None:
    workspace = Workspace.allocate(driver, context, 64, stream)
    claim = workspace.claim_eager(stream)
    assert claim is not None
    assert claim.holds()
    workspace.release()
    assert not claim.holds()


def test_an_eager_claim_is_that_of_one_thread(driver: Driver, context: int) -> None:
    claim = Workspace.allocate(driver, context, 64, 2).claim_eager(2)
    assert claim is not None
    assert in_another_thread(lambda: driver.set_current(context) or claim.holds()) == [False]
    assert claim.holds()


@pytest.mark.usefixtures("with_and_without_accelerator")
def test_an_eager_claim_ends_with_its_stream(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    claim = Workspace.allocate(driver, context, 64, stream).claim_eager(stream)
    assert claim is not None
    driver.destroy_stream(stream)
    assert driver.create_stream() == stream
    assert not claim.holds()


@pytest.mark.usefixtures("with_and_without_accelerator")
def test_an_eager_claim_is_not_for_a_capture(driver: Driver, context: int) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 64, stream)
    claim = workspace.claim_eager(stream)
    assert claim is not None
    driver.begin_capture(stream)
    assert not claim.holds()
    assert workspace.claim_eager(stream) is None
    driver.end_capture(stream)  # asking has not spoilt it
    assert not claim.holds()  # the graph has taken the buffer


def test_default_streams_are_those_of_the_workspaces_context(driver: Driver, standin: StandIn, context: int) -> None:
    standin.with_devices(2)
    workspace = Workspace.allocate(driver, context, 64)
    place = workspace.claim(0)
    with driver.using(driver.primary_context(1)):
        assert workspace.claim(0) == place


def test_a_capture_does_not_take_from_another_stream(driver: Driver, context: int) -> None:
    workspace, stream = borrowed(driver, 64), driver.create_stream()
    workspace.claim(0x5009)
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match="belongs to stream 0x5009"):
        workspace.claim(stream)


def test_the_pool_keeps_one_a_stream(driver: Driver, standin: StandIn, context: int) -> None:
    pool = WorkspacePool(driver, 0, 64)
    first = pool.take(0x5001)
    assert pool.take(0x5001) is first
    assert pool.take(0x5002) is not first
    pool.close()
    assert len(standin.calls("cuMemFree")) == 2


def test_the_pool_keeps_one_a_context_for_the_legacy_stream(driver: Driver, standin: StandIn, context: int) -> None:
    pool = WorkspacePool(driver, 0, 64)
    first = pool.take(0)
    made = standin.make_context(0)
    with driver.using(made):
        assert pool.take(0).context == made
    assert pool.take(0) is first
    pool.close()


def test_the_pool_keeps_one_a_thread_for_the_default_stream_of_each_thread(driver: Driver, context: int) -> None:
    pool = WorkspacePool(driver, 0, 64)
    mine, theirs = pool.take(2), []
    thread = threading.Thread(target=lambda: theirs.append(pool.take(2)))
    thread.start()
    thread.join()
    assert theirs[0] is not mine
    pool.close()


def test_the_pool_goes_by_the_context_of_the_stream(driver: Driver, standin: StandIn, context: int) -> None:
    made = standin.make_context(0)
    with driver.using(made):
        stream = driver.create_stream()
    pool = WorkspacePool(driver, 0, 64)
    assert pool.take(stream).context == made
    pool.close()


def test_the_pool_serves_a_stream_that_got_the_handle_of_one_of_another_context(
    driver: Driver, standin: StandIn, context: int
) -> None:
    pool, green = WorkspacePool(driver, 0, 256), standin.make_context(0)
    for of in (context, green):
        with driver.using(of):
            stream = driver.create_stream()
        workspace = pool.take(stream)
        workspace.claim(stream)
        assert workspace.context == of
        assert pool.take(stream) is workspace
        driver.destroy_stream(stream)


def test_a_stream_of_another_context_is_refused(driver: Driver, standin: StandIn, context: int) -> None:
    with driver.using(standin.make_context(0)):
        stream = driver.create_stream()
    for claim in (Workspace.allocate(driver, context, 256).claim, partial(Workspace.allocate, driver, context, 256)):
        with pytest.raises(UsageError, match=f"stream {stream:#x}: belongs to another context of device 0 than"):
            claim(stream)


def test_the_pool_makes_none_during_a_capture(driver: Driver, context: int) -> None:
    pool, stream = WorkspacePool(driver, 0, 64), driver.create_stream()
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match="captures"):
        pool.take(stream)


def test_the_pool_serves_a_capture_what_was_prepared(driver: Driver, context: int) -> None:
    pool, stream = WorkspacePool(driver, 0, 64), driver.create_stream()
    prepared = pool.take(stream)
    driver.begin_capture(stream)
    assert pool.take(stream) is prepared
    pool.close()


def freed(standin: StandIn) -> list[str]:
    gc.collect()
    return [call.seen["address"] for call in standin.calls("cuMemFree")]


def test_memory_that_nothing_refers_to_is_freed_when_the_next_is_made(
    driver: Driver, standin: StandIn, context: int
) -> None:
    workspace = Workspace.allocate(driver, context, 1024)
    address = f"{workspace.address:x}"
    del workspace
    assert freed(standin) == []
    Workspace.allocate(driver, context, 1024)
    assert freed(standin) == [address]


@pytest.mark.parametrize(("call", "code"), [("cuMemFree", 700), ("cuCtxPushCurrent", 201), ("cuCtxPushCurrent", 709)])
def test_memory_of_a_lost_context_does_not_fail_calls_in_others(
    driver: Driver, standin: StandIn, context: int, call: str, code: int
) -> None:
    for lost in (standin.make_context(0), standin.make_context(0)):
        with driver.using(lost):
            Workspace.allocate(driver, lost, 1024)
    gc.collect()
    standin.fail(call, code, times=2)
    Workspace.allocate(driver, context, 1024).close()
    assert driver.current_context() == context
    standin.fail("cuMemFree", 1)
    Workspace.allocate(driver, context, 1024)
    gc.collect()
    with pytest.raises(DriverCallError, match="cuMemFree returned 1"):
        Workspace.allocate(driver, context, 1024)


def test_memory_that_a_captured_graph_has_is_freed_after_the_graph(
    driver: Driver, standin: StandIn, context: int
) -> None:
    stream = driver.create_stream()
    workspace = Workspace.allocate(driver, context, 1024, stream)
    graph, place = capture(driver, workspace, stream)
    del workspace
    gc.collect()
    Workspace.allocate(driver, context, 1024).close()
    assert f"{place:x}" not in freed(standin)
    driver.destroy_graph(graph)
    Workspace.allocate(driver, context, 1024)
    assert f"{place:x}" in freed(standin)


def test_memory_that_is_to_be_kept_is_never_freed(driver: Driver, standin: StandIn, context: int) -> None:
    workspace = Workspace.allocate(driver, context, 1024)
    workspace.keep()
    workspace.close()
    del workspace
    gc.collect()
    Workspace.allocate(driver, context, 1024)
    assert freed(standin) == []


def test_a_workspace_of_no_bytes_has_an_address(driver: Driver, standin: StandIn, context: int) -> None:
    assert Workspace.allocate(driver, context, 0).address
    assert standin.call("cuMemAlloc")["size"] == "256"


def test_a_pool_that_is_dropped_gives_its_memory_back(driver: Driver, standin: StandIn, context: int) -> None:
    pool = WorkspacePool(driver, 0, 1024)
    address = f"{pool.take(0).address:x}"
    del pool
    gc.collect()
    Workspace.allocate(driver, context, 1024, driver.create_stream())
    assert freed(standin) == [address]


MIXED = (Region("status", 4, zeroed=True), Region("counters", 100, zeroed=True), Region("partials", 1000))


def test_regions_that_begin_as_zeros_come_from_the_semaphores() -> None:
    workspace = SemaphoreWorkspace(semaphores=(0x10000, 4096), scratch=(0x20010, 4096))
    assert workspace.regions(MIXED) == {"status": 0x10000, "counters": 0x10100, "partials": 0x20100}


@pytest.mark.parametrize(
    ("semaphores", "scratch", "words"),
    [
        (355, 1000, r"semaphores of 355 bytes: 356 bytes are needed \(status 4, counters 100\)"),
        (356, 999, r"scratch of 999 bytes: 1000 bytes are needed \(partials 1000\)"),
    ],
)
def test_the_buffer_that_is_too_small_is_named_with_the_bytes_needed(semaphores: int, scratch: int, words: str) -> None:
    workspace = SemaphoreWorkspace((0x10000, semaphores), (0x20000, scratch))
    with pytest.raises(WorkspaceError, match=words):
        workspace.regions(MIXED)


@pytest.mark.parametrize("scratch", [(0x20008, 64), (0x20000, -1)])
def test_a_buffer_that_no_region_fits_is_refused(scratch: tuple[int, int]) -> None:
    with pytest.raises(WorkspaceError, match=r"scratch at 0x2000.* expected a multiple of 16"):
        SemaphoreWorkspace((0x10000, 64), scratch)


def test_callers_tensors_are_taken_with_all_their_bytes() -> None:
    tensors = TensorView.contiguous(0x10000, "int32", (8, 8)), TensorView.contiguous(0x20000, "uint8", (100,))
    assert SemaphoreWorkspace.of(*tensors) == SemaphoreWorkspace((0x10000, 256), (0x20000, 100))
    assert SemaphoreWorkspace.of(*tensors).owner == tensors


def test_tensors_of_two_devices_are_refused() -> None:
    one, other = (TensorView.contiguous(0x10000, "uint8", (64,), device) for device in (0, 1))
    assert SemaphoreWorkspace.of(other, other).device == 1
    with pytest.raises(UsageError, match="scratch: on device 1, semaphores are on device 0"):
        SemaphoreWorkspace.of(one, other)


def test_tensors_with_gaps_are_refused() -> None:
    whole = TensorView.contiguous(0x10000, "uint8", (64, 64))
    with pytest.raises(UsageError, match=r"scratch: strides \(128, 1\), expected a contiguous tensor"):
        SemaphoreWorkspace.of(whole, replace(whole, strides=(128, 1)))
    with pytest.raises(WorkspaceError, match=r"semaphores at 0x10004 of .* expected a multiple of 16"):
        SemaphoreWorkspace.of(replace(whole, pointer=0x10004), whole)


def test_callers_buffers_serve_any_stream() -> None:
    workspace = SemaphoreWorkspace((0x10000, 64), (0x20000, 64))
    workspace.claim(0x5001)
    workspace.claim(0x5002)


def used_once(driver: Driver, context: int, nbytes: int, stream: int) -> int:
    """The address of a workspace that a stream had, and nobody refers to any more."""
    workspace = Workspace.allocate(driver, context, nbytes, stream)
    workspace.claim(stream)
    address = workspace.address
    del workspace
    gc.collect()
    return address


def test_a_stream_uses_its_memory_again(driver: Driver, standin: StandIn, context: int) -> None:
    address = used_once(driver, context, 5000, 0x5001)
    driver.fill(address, 9, 5000, 0x5001)
    for nbytes in (4000, 5000, 5100):
        standin.clear_log()
        workspace = Workspace.allocate(driver, context, nbytes, 0x5001)
        assert (workspace.address, driver.read(address, nbytes)) == (address, bytes(nbytes))
        assert not {"cuMemAlloc", "cuMemFree"} & set(standin.names())
        assert standin.call("cuMemsetD8Async")["stream"] == "0x5001"
        workspace.claim(0x5001)
        del workspace
        gc.collect()


@pytest.mark.parametrize(
    ("nbytes", "stream"), [(5000, 0x5002), (9000, 0x5001), (1000, 0x5001)], ids=["other stream", "too small", "too big"]
)
def test_memory_that_does_not_serve_is_freed(
    driver: Driver, standin: StandIn, context: int, nbytes: int, stream: int
) -> None:
    used_once(driver, context, 5000, 0x5001)
    Workspace.allocate(driver, context, nbytes, stream)
    assert len(standin.calls("cuMemFree")) == 1
    assert len(standin.calls("cuMemAlloc")) == 2


def test_memory_that_no_stream_had_is_freed(driver: Driver, standin: StandIn, context: int) -> None:
    Workspace.allocate(driver, context, 5000, 0x5001)  # its clearing may not be done when another stream gets it
    gc.collect()
    Workspace.allocate(driver, context, 5000, 0x5001)
    assert len(standin.calls("cuMemFree")) == 1


def test_memory_that_another_thread_frees_meanwhile_is_left_to_it(
    driver: Driver, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        driver.free_later(context, driver.allocate(64))
    free, freed = driver.free, []

    def take_the_rest(address: int) -> None:
        freed.append(address)
        free(address)
        driver._waiting.clear()

    monkeypatch.setattr(driver, "free", take_the_rest)
    driver.free_waiting()
    assert len(freed) == 1
