"""Captures in global mode on one thread, beside loads, allocations and waits on another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import paged_decode, plan_paged_decode
from cubin_runtime.attention.runtime import Runtime
from cubin_runtime.errors import DriverError
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import GraphDriver

pytestmark = pytest.mark.gpu
FIXTURE = Path(__file__).parents[1] / "fixtures" / "facts_sm_90a.cubin"


def on_another_thread(work: Callable[[], None]) -> None:
    """Run ``work`` to its end on a thread of its own; its error is raised here."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture
def driver() -> Iterator[GraphDriver]:
    made = GraphDriver()
    try:
        made.set_current(made.primary_context(0))
    except DriverError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    yield made
    made.release_primary_context()


def test_loads_allocations_and_waits_leave_a_capture_of_another_thread_as_it_is(driver: GraphDriver) -> None:
    if driver.device(driver.context_device()).capability != (9, 0):
        pytest.skip("the fixture cubin is built for sm_90a")
    context, memory, stream = driver.primary_context(0), driver.allocate(1024), driver.create_stream()

    def work() -> None:
        driver.set_current(context)
        module = driver.load_module(FIXTURE.read_bytes())
        driver.finish_loading(driver.get_function(module, "block"))
        driver.unload_module(module)
        other = driver.create_stream()
        Workspace.allocate(driver, context, 1024, other, graphs=1).close()
        driver.synchronize(other)
        assert driver.read(memory, 4) == bytes(4)
        driver.destroy_stream(other)

    driver.fill(memory, 0, 1024, stream)
    driver.synchronize(stream)
    driver.begin_capture(stream, "global")
    driver.fill(memory, 7, 1024, stream)
    on_another_thread(work)
    graph = driver.end_capture(stream)
    executable = driver.instantiate(graph)
    driver.launch_graph(executable, stream)
    driver.synchronize(stream)
    assert driver.read(memory, 4) == bytes([7] * 4)
    driver.destroy_executable(executable)
    driver.destroy_graph(graph)
    driver.destroy_stream(stream)
    driver.free(memory)


def test_a_first_call_leaves_a_capture_by_torch_on_another_thread_as_it_is(
    runtime: Runtime, runtime_config: Config
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    options = {"device": "cuda", "dtype": torch.bfloat16}
    tensors: dict[str, Any] = {
        "q": torch.randn(2, 32, 128, **options),
        "k_cache": torch.randn(8, 64, 4, 128, **options),
        "v_cache": torch.randn(8, 64, 4, 128, **options),
        "page_table": torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4),
        "seq_lens": torch.full((2,), 200, device="cuda", dtype=torch.int32),
    }
    outs = [torch.zeros_like(tensors["q"]) for _ in range(2)]
    expected = paged_decode(**tensors, max_seq_len=256, runtime=runtime)
    torch.cuda.synchronize()

    def work() -> None:
        fresh = Runtime(runtime_config, driver=runtime.driver)  # has no kernel loaded
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plan = plan_paged_decode(**tensors, max_seq_len=256, out=outs[0], runtime=fresh)
            plan.preload()
            workspace = plan.prepare(graphs=1)
            plan.run(**tensors, out=outs[0], workspace=workspace)
            plan.check(workspace)
        fresh.modules.close()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        paged_decode(**tensors, max_seq_len=256, out=outs[1], runtime=runtime)
        on_another_thread(work)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], expected)
    assert torch.equal(outs[1], expected)
