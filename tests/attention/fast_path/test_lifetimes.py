"""What is dropped is gone at once: plans, workspaces, runtimes and generated functions are in no reference cycle."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import (
    Runtime,
    plan_append_kv,
    plan_context_attention,
    plan_merge_states,
    plan_mla_decode,
    plan_paged_decode,
)
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.any_size_calls import OPERATORS, calls_of
from tests.attention.fast_path_calls import (
    ON_SM90,
    ON_SM100,
    Caller,
    NotingMemory,
    _append_quantised,
    _context,
    _latent,
    _merge,
    _paged,
    _paged_full,
    _paged_ragged,
)
from tests.golden.adapter import NATIVE, PUBLISHED

PLANS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "paged": (plan_paged_decode, _paged),
    "paged with all tensors": (plan_paged_decode, _paged_full),
    "paged with two launches": (plan_paged_decode, _paged_ragged),
    "mla": (plan_mla_decode, _latent),
    "context": (plan_context_attention, _context),
    "append": (plan_append_kv, _append_quantised),
    "merge": (plan_merge_states, _merge),
}
FUNCTIONS = ("paged_decode", "mla_decode", "context_attention", "append_kv", "merge_states")
OF_A_RUNTIME = [name for name in ON_SM90 if name.startswith(FUNCTIONS)]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Keep the collector off during a test."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def left() -> list[str]:
    """The package's objects, functions and frames that wait for the collector; classes may."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [thing for thing in gc.garbage if is_ours(thing)]
    gc.garbage.clear()
    return sorted({f"{type(thing).__qualname__} {getattr(thing, '__qualname__', '')}" for thing in found})


def is_ours(thing: Any) -> bool:
    code = getattr(thing, "f_code", getattr(thing, "__code__", None))
    if code is not None and not isinstance(thing, type):
        return "cubin_runtime/" in code.co_filename or code.co_filename.startswith("<written ")
    return type(thing).__module__.startswith("cubin_runtime.")


class Planned:
    """A plan with its own tensors, which has run often enough for all its functions."""

    def __init__(self, caller: Caller, name: str, stream: int | None) -> None:
        planned, make = PLANS[name]
        given = make(caller.memory)
        self.plan = planned(**given, runtime=caller.runtime)
        names = inspect.signature(type(self.plan).run).parameters
        self.given = {name: value for name, value in given.items() if name in names}
        self.stream = stream
        for _ in range(4):
            self.run()

    def run(self) -> None:
        self.plan.run(**self.given, stream=self.stream)

    def bind(self, *free: str) -> Any:
        """A step that has been sent, and what it takes."""
        bound = self.plan.bind(**{n: v for n, v in self.given.items() if n not in free}, stream=self.stream, graphs=1)
        for _ in range(2):
            bound.step(*(self.given[name] for name in free))
        return bound


def allocated(caller: Caller) -> int:
    """How many allocations there are, once those are freed that wait for it."""
    caller.runtime.driver.free_waiting()
    return len(caller.standin.calls("cuMemAlloc")) - len(caller.standin.calls("cuMemFree"))


def captured(caller: Caller, stream: int, send: Callable[[], object]) -> int:
    """The graph of a capture."""
    caller.runtime.driver.begin_capture(stream)
    send()
    graph: int = caller.runtime.driver.end_capture(stream)
    return graph


@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_dropped_plan_is_gone_with_its_memory(caller: Caller, name: str, on_stream: bool) -> None:
    stream = caller.runtime.driver.create_stream() if on_stream else None
    before = allocated(caller)
    planned = Planned(caller, name, stream)
    gone = [ref(planned.plan), ref(planned.plan.prepare(stream))]
    if planned.plan.workspace_bytes:
        assert allocated(caller) > before
    del planned
    assert [reference() for reference in gone] == [None, None]
    assert allocated(caller) == before
    assert left() == []


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_dropped_bound_step_is_gone_with_its_memory(caller: Caller, name: str, on_stream: bool, close: bool) -> None:
    planned = Planned(caller, name, caller.runtime.driver.create_stream() if on_stream else None)
    before = allocated(caller)
    bound, layer = planned.bind(), planned.bind(*list(planned.given)[:1])
    assert allocated(caller) > before
    if close:
        bound.close()
        layer.close()
    gone = [ref(bound), ref(layer), ref(planned.plan)]
    del bound, layer, planned
    assert [reference() for reference in gone] == [None, None, None]
    assert allocated(caller) <= before
    assert left() == []


@pytest.mark.parametrize("name", PLANS)
def test_memory_of_a_captured_graph_is_gone_with_the_graph(caller: Caller, name: str) -> None:
    stream = caller.runtime.driver.create_stream()
    before = allocated(caller)
    planned = Planned(caller, name, stream)
    bound = planned.bind()
    graphs = [captured(caller, stream, send) for send in (bound.step, bound.step, planned.run)]
    bound.step()
    planned.run()
    gone = [ref(bound), ref(planned.plan)]
    del bound, planned
    assert [reference() for reference in gone] == [None, None]
    assert allocated(caller) == before + 3
    for number, graph in enumerate(graphs):
        caller.runtime.driver.destroy_graph(graph)
        assert allocated(caller) == before + 2 - number
    assert left() == []


@pytest.mark.parametrize("name", ON_SM90)
def test_calls_leave_nothing_to_the_collector(caller: Caller, name: str) -> None:
    call = ON_SM90[name](caller.memory, caller.runtime)
    for _ in range(4):
        call.function(**call.arguments)
    del call
    assert left() == []


@pytest.mark.parametrize("capability", [(10, 0)])
@pytest.mark.parametrize("name", ON_SM100)
def test_calls_of_trtllm_gen_kernels_leave_nothing_to_the_collector(caller: Caller, name: str) -> None:
    call = ON_SM100[name](caller.memory, caller.runtime)
    for _ in range(4):
        call.function(**call.arguments)
    del call
    assert left() == []


@pytest.fixture
def other(config: Config, standin: StandIn, caller: Caller) -> list[Runtime]:
    """The only reference to a runtime that is not the process's."""
    memory = NotingMemory()
    driver = GraphDriver(standin.path)
    made = Runtime(config, driver=driver, release=NATIVE, trtllm_release=PUBLISHED, memory=memory)
    standin.accept_kernels(KERNEL_PARAMS.size)
    return [made]


@pytest.mark.parametrize("name", OF_A_RUNTIME)
def test_a_dropped_runtime_is_gone_with_its_plans(caller: Caller, other: list[Runtime], name: str) -> None:
    runtime = other.pop()
    call = ON_SM90[name](caller.memory, runtime)
    for _ in range(4):
        call.function(**call.arguments)
    gone = [ref(runtime), *map(ref, runtime.plans._plans.values())]
    assert len(gone) > 1
    del call, runtime
    assert [reference() for reference in gone if reference() is not None] == []
    assert left() == []


@pytest.mark.parametrize("name", OPERATORS)
def test_a_runtime_is_gone_with_its_paths_for_any_size(caller: Caller, other: list[Runtime], name: str) -> None:
    runtime = other.pop()
    for call in calls_of(name, caller.memory, runtime, 6):
        call.function(**call.arguments)
    assert any(runtime.family_paths.values())
    gone = [ref(runtime), *map(ref, runtime.plans._plans.values())]
    del call, runtime
    assert [reference() for reference in gone if reference() is not None] == []
    assert left() == []


def test_a_run_that_was_taken_from_a_plan_outlives_it(caller: Caller) -> None:
    planned = Planned(caller, "paged", None)
    run, given, other = planned.plan.run, planned.given, planned.plan.new_workspace(0)
    assert "run" in vars(planned.plan)
    del planned
    caller.standin.clear_log()
    run(**given)
    run(**{**given, "workspace": other})  # not alike
    assert len(caller.standin.calls("cuLaunchKernelEx")) == 2
    del run, other
    assert left() == []


def test_a_plan_has_a_method_for_calls_that_came_by_the_one_before(caller: Caller) -> None:
    planned = Planned(caller, "paged", None)
    before = vars(planned.plan)["run"]
    scaled = {**planned.given, "softmax_scale": 0.25, "workspace": planned.plan.prepare()}
    for _ in range(3):
        planned.plan.run(**scaled)
    assert vars(planned.plan)["run"] is not before
    gone = ref(planned.plan)
    del planned, before, scaled
    assert gone() is None
    assert left() == []
