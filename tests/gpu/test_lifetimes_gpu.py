"""Buffers, graphs and plans end when they are dropped, with the driver: nothing is shared, freed early or kept."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cubin_runtime.attention import (
    Runtime,
    plan_append_kv,
    plan_context_attention,
    plan_merge_states,
    plan_mla_decode,
    plan_paged_decode,
)
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import GraphDriver

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu
CACHES = ("k_cache", "v_cache")
ROUNDS = 20
PER_THREAD = 2  # CU_STREAM_PER_THREAD


def bf16(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def int32(*values: int) -> Any:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def table(batch: int, columns: int) -> Any:
    return torch.arange(batch * columns, device="cuda", dtype=torch.int32).view(batch, columns)


def paged(length: int = 4096) -> dict[str, Any]:
    """Two requests whose keys are split, so that partials and counters count."""
    caches = {name: bf16(128, 64, 4, 128) for name in CACHES}
    q, lens = bf16(2, 32, 128), int32(length, length)
    return {"q": q, **caches, "page_table": table(2, 64), "seq_lens": lens, "out": torch.empty_like(q)}


def latent() -> dict[str, Any]:
    return {
        "q": bf16(2, 16, 576),
        "kv_cache": bf16(128, 64, 576),
        "page_table": table(2, 64),
        "seq_lens": int32(4096, 77),
        "out": bf16(2, 16, 512),
    }


def context() -> dict[str, Any]:
    return {
        "q": bf16(300, 8, 128),
        "k": bf16(64, 64, 2, 128),
        "v": bf16(64, 64, 2, 128),
        "page_table": table(2, 32),
        "seq_lens": int32(1000, 500),
        "q_cu_seq_lens": int32(0, 100, 300),
        "out": bf16(300, 8, 128),
    }


def append() -> dict[str, Any]:
    new, caches = {"k": bf16(23, 8, 128), "v": bf16(23, 8, 128)}, {name: bf16(8, 64, 8, 128) for name in CACHES}
    return {**new, **caches, "page_table": table(2, 4), "seq_lens": int32(40, 50), "q_cu_seq_lens": int32(0, 11, 23)}


def merge() -> dict[str, Any]:
    return {"parts": bf16(23, 3, 8, 128), "part_lses": torch.randn(23, 3, 8, device="cuda"), "out": bf16(23, 8, 128)}


PLANS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "paged": (plan_paged_decode, paged, {"max_seq_len": 4096}),
    "mla": (plan_mla_decode, latent, {"max_seq_len": 4096, "softmax_scale": 0.1}),
    "context": (plan_context_attention, context, {"max_seq_len": 2048, "max_q_len": 256}),
    "append": (plan_append_kv, append, {}),
    "merge": (plan_merge_states, merge, {}),
}


@pytest.fixture
def driver(runtime: Runtime) -> GraphDriver:
    assert isinstance(runtime.driver, GraphDriver)
    return runtime.driver


@pytest.fixture
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the collector off, also where torch asks for it before a capture."""
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    yield
    gc.enable()


class HeldMemory:
    """The device memory of the driver's allocations and of torch's tensors; other processes change what is free."""

    def __init__(self, driver: GraphDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self._driver, self._sizes = driver, dict[int, int]()
        allocate, free = driver.allocate, driver.free

        def allocated(nbytes: int) -> int:
            address = allocate(nbytes)
            self._sizes[address] = nbytes
            return address

        def freed(address: int) -> None:
            free(address)
            self._sizes.pop(address, None)

        monkeypatch.setattr(driver, "allocate", allocated)
        monkeypatch.setattr(driver, "free", freed)

    def nbytes(self) -> int:
        """What is held, once all is freed that waits for it."""
        torch.cuda.synchronize()
        time.sleep(0.1)  # the driver tells on a thread of its own that a graph has ended
        self._driver.free_waiting()
        return sum(self._sizes.values()) + torch.cuda.memory_allocated()


def live(runtime: Runtime, name: str) -> None:
    """A plan's whole life: runs, bound steps, captures, replays; all of it is dropped at the end."""
    planned, make, options = PLANS[name]
    given = make()
    plan = planned(**given, **options, runtime=runtime)
    plan.preload()
    stream = torch.cuda.Stream()
    plan.prepare(stream, graphs=1)
    first = next(iter(given))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(5):
            plan.run(**given)
        bound = plan.bind(**given, graphs=1)
        layer = plan.bind(**{key: value for key, value in given.items() if key != first})
        for _ in range(3):
            bound.step()
            layer.step(given[first])
    torch.cuda.synchronize()
    graphs = []
    for send in (bound.step, lambda: layer.step(given[first]), lambda: plan.run(**given)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            send()
        graph.replay()
        graphs.append(graph)
    with torch.cuda.stream(stream):
        bound.step()
        layer.step(given[first])
        plan.run(**given)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("name", PLANS)
def test_memory_is_back_at_the_level_before_without_the_collector(
    runtime: Runtime, driver: GraphDriver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    held = HeldMemory(driver, monkeypatch)
    for _ in range(3):  # what torch and the driver make once
        live(runtime, name)
    before = held.nbytes()
    for _ in range(ROUNDS):
        live(runtime, name)
    assert held.nbytes() == before


@pytest.mark.parametrize("bound", [CACHES, ("q", *CACHES, "page_table", "seq_lens", "out")], ids=["caches", "all"])
def test_eager_steps_share_no_memory_with_a_graph_that_was_captured_without_a_reserve(
    runtime: Runtime, bound: tuple[str, ...]
) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    plan.preload()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    workspace = plan.new_workspace(stream.cuda_stream)
    moving = {name: value for name, value in given.items() if name not in bound}
    step = plan.bind(**{name: given[name] for name in bound}, workspace=workspace, stream=stream)
    for _ in range(3):
        step.step(**moving)
    torch.cuda.synchronize()
    wanted, graph = given["out"].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.step(**moving)
    for _ in range(200):
        step.step(**moving)
        with torch.cuda.stream(other):
            graph.replay()
    torch.cuda.synchronize()
    assert len(set(workspace.places())) == 2
    given["out"].fill_(float("nan"))
    torch.cuda.synchronize()
    step.step(**moving)
    torch.cuda.synchronize()
    assert torch.equal(given["out"], wanted)
    plan.check(workspace, stream)


def test_the_default_stream_of_a_thread_is_captured_with_memory_of_the_graph(
    runtime: Runtime, driver: GraphDriver
) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    plan.preload()
    step = plan.bind(**given, stream=PER_THREAD, graphs=1)
    for _ in range(3):
        step.step()
    driver.synchronize(PER_THREAD)
    wanted = given["out"].clone()
    torch.cuda.synchronize()
    driver.begin_capture(PER_THREAD)
    step.step()
    graph = driver.end_capture(PER_THREAD)
    executable = driver.instantiate(graph)
    given["out"].fill_(float("nan"))
    torch.cuda.synchronize()
    driver.launch_graph(executable, PER_THREAD)
    driver.synchronize(PER_THREAD)
    assert torch.equal(given["out"], wanted)
    step.step()
    driver.synchronize(PER_THREAD)
    driver.destroy_executable(executable)
    driver.destroy_graph(graph)


def test_the_default_streams_of_threads_do_not_share_a_bound_step(runtime: Runtime, driver: GraphDriver) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    step = plan.bind(**given, stream=PER_THREAD)
    for _ in range(3):
        step.step()
    came: list[BaseException] = []

    def work() -> None:
        driver.set_current(driver.primary_context(0))
        try:
            step.step()
        except WorkspaceError as error:
            came.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(came) == 1
    step.step()
    driver.synchronize(PER_THREAD)


def test_a_stream_with_the_handle_of_a_destroyed_one_gets_other_memory(runtime: Runtime, driver: GraphDriver) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    stream = driver.create_stream()
    workspace = plan.new_workspace(stream)
    step = plan.bind(**given, stream=stream, workspace=workspace)
    for _ in range(3):
        step.step()
    _, before = driver.stream_identity(stream)
    driver.destroy_stream(stream)
    made = [driver.create_stream() for _ in range(64)]
    if stream not in made:
        pytest.skip("the driver gave the handle to none of 64 streams")
    step.step()
    driver.synchronize(stream)
    claim = workspace.claim_eager(stream)
    assert claim is not None
    assert claim.owner[1] == driver.stream_identity(stream)[1] != before
    for handle in made:
        driver.destroy_stream(handle)


@pytest.mark.parametrize("end", ["release", "close", "drop"])
def test_a_graph_that_outlives_its_workspace_writes_to_no_freed_memory(
    runtime: Runtime, driver: GraphDriver, end: str
) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    plan.preload()
    stream = torch.cuda.Stream()
    handle = stream.cuda_stream
    memory = torch.zeros(plan.workspace_bytes, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    graphs = []
    for _ in range(32):
        workspace: Any = Workspace(driver, driver.primary_context(0), memory.data_ptr(), plan.workspace_bytes)
        driver.begin_capture(handle)
        with torch.cuda.stream(stream):
            plan.run(**given, workspace=workspace)
        graphs.append(driver.end_capture(handle))
        if end != "drop":
            getattr(workspace, end)()
        del workspace
    pattern = b"\x01" * 64
    taken = [ctypes.create_string_buffer(pattern, 64) for _ in range(100_000)]
    for graph in graphs:
        driver.destroy_graph(graph)
    torch.cuda.synchronize()
    assert all(buffer.raw == pattern for buffer in taken)


def test_a_closed_workspace_is_refused_and_the_memory_of_its_graph_stays(runtime: Runtime) -> None:
    given = paged()
    plan = plan_paged_decode(**given, max_seq_len=4096, runtime=runtime)
    plan.preload()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    workspace = plan.prepare(stream, graphs=1)
    step = plan.bind(**given, stream=stream, workspace=workspace)
    for _ in range(3):
        step.step()
    torch.cuda.synchronize()
    wanted = given["out"].clone()
    with torch.cuda.graph(graph, stream=stream):
        step.step()
    workspace.close()
    for send in (step.step, lambda: plan.run(**given, stream=stream), lambda: workspace.reset(stream)):
        with pytest.raises(WorkspaceError, match="closed"):
            send()
    others = [plan_paged_decode(**given, max_seq_len=4096, runtime=runtime).prepare() for _ in range(8)]
    given["out"].fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(given["out"], wanted)
    for other in others:
        other.close()


def test_plans_that_are_dropped_inside_a_capture_do_not_spoil_it(runtime: Runtime) -> None:
    given = paged()
    plans = [plan_paged_decode(**given, max_seq_len=4096, runtime=runtime) for _ in range(4)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    steps = [plan.bind(**given, stream=stream, graphs=1) for plan in plans]
    for plan, step in zip(plans, steps, strict=True):
        for _ in range(4):
            plan.run(**given)
            step.step()
    torch.cuda.synchronize()
    wanted = given["out"].clone()
    with torch.cuda.graph(graph, stream=stream):
        steps[0].step()
        del plan, plans, step, steps
        gc.collect()
    given["out"].fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(given["out"], wanted)
