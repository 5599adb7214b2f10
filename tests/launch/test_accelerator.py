"""The optional accelerator beside the Python that it stands for."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.launch import accelerator
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.history import KEPT, LaunchHistory, Ring
from cubin_runtime.launch.modules import KernelRequest, LoadedKernel, ModuleCache
from cubin_runtime.launch.prepared import OtherContextError, PreparedLaunches
from cubin_runtime.launch.senders import senders_of
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.testing import StandIn
from tests.launch.examples import DIGEST, LAYOUT, SPEC, SYMBOL, cubin, kernel_facts, needs, plan

needs_accelerator = pytest.mark.skipif(
    accelerator.accelerator() is None, reason="cubin_runtime_accelerator is not installed: pip install ./accelerator"
)
NAMES = ("out", "batch", "scale")
Send = Callable[..., Any]


class Launch:
    """What refers to the ring that holds it."""

    ring: Any


def send(prepared: PreparedLaunches, make: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Send, bool]:
    """A function of the stream and the values, and whether the accelerator sends them."""
    monkeypatch.setattr("cubin_runtime.launch.senders.accelerator", lambda: make)
    own = senders_of(prepared, range(len(prepared.names)))

    def call(stream: int, *values: Any) -> None:
        own.send(stream, stream, [[values[number] for number in numbers] for numbers in own.written], lambda: values)

    return call, own.accelerated


@pytest.fixture
def kernel(driver: Driver, standin: StandIn, context: int) -> LoadedKernel:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    return cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000)))


@pytest.fixture
def prepared(driver: Driver, kernel: LoadedKernel) -> PreparedLaunches:
    made = plan(inputs={"out": "out", "batch": "batch", "scale": "scale"})
    return PreparedLaunches([made], [kernel], driver, NAMES)


@pytest.fixture
def with_descriptor(driver: Driver, kernel: LoadedKernel) -> PreparedLaunches:
    """Whose descriptor is that of a tensor which moves."""
    return PreparedLaunches([plan(inputs={"k": "k", "batch": "batch"})], [kernel], driver, ("k", "batch"))


def test_launches_are_counted_where_a_counter_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfPython314(itertools.count):  # type: ignore[type-arg]
        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle 'itertools.count' object")

    monkeypatch.setattr("cubin_runtime.launch.history.count", OfPython314)
    ring = Ring()
    for launches in range(KEPT + 2):
        assert ring.launches == launches
        ring.record((cast(Any, None), b"", 0))


@needs_accelerator
@pytest.mark.parametrize("values", [(0, 0, 0.0), (2**64 - 1, -1, -1.5), (1 << 47, 2**31 - 1, float("inf")), (5, 6, 7)])
def test_both_send_the_same_launch(
    prepared: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...]
) -> None:
    found = []
    for make in (None, accelerator.accelerator()):
        call, accelerated = send(prepared, make, monkeypatch)
        assert accelerated == (make is not None)
        call(0x5007, *values)
        call(0x5007, *values)
        found += [launch.seen for launch in standin.calls("cuLaunchKernelEx")[-2:]]
    assert found[0]["stream"] == "0x5007"
    assert all(seen == found[0] for seen in found)


@needs_accelerator
def test_both_send_a_descriptor_with_the_address_of_each_call(
    with_descriptor: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, found = (0x7F0000000000, 1 << 47, 0x7F0000000000, 16), []
    for make in (None, accelerator.accelerator()):
        call, accelerated = send(with_descriptor, make, monkeypatch)
        assert accelerated == (make is not None)
        standin.clear_log()
        for batch, address in enumerate(addresses):
            call(0x5007, address, batch)
        found.append([launch.seen["parameter0"] for launch in standin.calls("cuLaunchKernelEx")])
    assert found[0] == found[1]
    sent = [LAYOUT.unpack(bytes.fromhex(parameters))["k"] for parameters in found[0]]
    assert sent == [SPEC._replace(address=address).encode(with_descriptor.driver) for address in addresses]
    assert len(standin.calls("cuTensorMapReplaceAddress")) == len(addresses)


@needs_accelerator
def test_a_descriptor_that_the_driver_refuses_is_not_launched(
    with_descriptor: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = send(with_descriptor, accelerator.accelerator(), monkeypatch)
    standin.fail("cuTensorMapReplaceAddress", 1, times=1)
    with pytest.raises(UsageError, match="with k=32, batch=1: cuTensorMapReplaceAddress returned 1"):
        call(0x5007, 32, 1)
    assert standin.calls("cuLaunchKernelEx") == []
    call(0x5007, 32, 1)
    assert len(standin.calls("cuLaunchKernelEx")) == 1


@needs_accelerator
def test_python_sends_descriptors_where_the_driver_cannot_change_them(
    with_descriptor: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_descriptor.driver, "has", lambda name: name != "cuTensorMapReplaceAddress")
    call, accelerated = send(with_descriptor, accelerator.accelerator(), monkeypatch)
    call(0x5007, 32, 1)
    assert not accelerated
    assert len(standin.calls("cuLaunchKernelEx")) == 1


@needs_accelerator
@pytest.mark.parametrize(
    "values", [(-1, 1, 1.0), (2**64, 1, 1.0), (1, 2**31, 1.0), ("a", 1, 1.0), (1, 1.5, 1.0), (1, 1, None), (1, 1, 1e39)]
)
def test_values_that_do_not_fit_are_refused_by_both_before_anything_is_sent(
    prepared: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...]
) -> None:
    for make in (None, accelerator.accelerator()):
        call, _ = send(prepared, make, monkeypatch)
        with pytest.raises(UsageError, match=f"launch of {plan().kernel} with out="):
            call(0, *values)
    assert standin.calls("cuLaunchKernelEx") == []


@needs_accelerator
def test_launches_are_recorded_and_counted(
    prepared: PreparedLaunches, driver: Driver, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = send(prepared, accelerator.accelerator(), monkeypatch)
    for batch in range(3):
        call(0x5007, 16, batch, 1.0)
    history = driver.history(context)
    assert history.launches == 3
    assert [LAYOUT.unpack(record.parameters)["batch"] for record in history.records()] == [0, 1, 2]
    assert {record.stream for record in history.records()} == {0x5007}


@needs_accelerator
def test_both_rings_keep_the_same_launches() -> None:
    python, c = Ring(), LaunchHistory().ring
    assert type(c) is accelerator.accelerator().Ring
    for number in range(3 * KEPT):
        entry = (cast(Any, f"launch {number}"), bytes([number]) * (number * 200), number)
        for ring in (python, c):
            ring.record(entry)
            assert ring.launches == number + 1
        assert c.entries() == python.entries()
        assert len(c.entries()) == min(number + 1, KEPT)
    for ring in (python, c):
        ring.clear()
        assert ring.entries() == []
        assert ring.launches == 3 * KEPT
        ring.record(entry)
        assert ring.entries() == [entry]


@needs_accelerator
def test_a_ring_lets_its_launches_go() -> None:
    ring = accelerator.accelerator().Ring()
    launch = Launch()
    launch.ring, alive = ring, weakref.ref(launch)
    ring.record((launch, b"", 0))
    del ring, launch
    gc.collect()
    assert alive() is None


@needs_accelerator
@pytest.mark.parametrize("entry", [None, (), ("launch", "text", 0), ("launch", b"")])
def test_a_ring_refuses_what_is_no_launch(entry: Any) -> None:
    ring = accelerator.accelerator().Ring()
    with pytest.raises(TypeError):
        ring.record(entry)
    assert ring.launches == 0
    assert ring.entries() == []


@needs_accelerator
def test_a_refusal_of_the_driver_is_explained(
    prepared: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = send(prepared, accelerator.accelerator(), monkeypatch)
    call(0, 16, 1, 1.0)
    standin.fail("cuLaunchKernelEx", 700)
    with pytest.raises(Exception, match="700") as caught:
        call(0, 16, 2, 1.0)
    assert len(caught.value.launches) >= 2  # type: ignore[attr-defined]


@needs_accelerator
def test_threads_do_not_mix_their_parameters(
    prepared: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = send(prepared, accelerator.accelerator(), monkeypatch)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def run(first: int) -> None:
            for number in range(first, first + 100):
                call(0x5000, number, number, float(number))

        threads = [threading.Thread(target=run, args=(1 + 100 * index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    seen = [LAYOUT.unpack(bytes.fromhex(c.seen["parameter0"])) for c in standin.calls("cuLaunchKernelEx")]
    assert sorted(values["batch"] for values in seen) == list(range(1, 601))
    assert all(values["out"] == values["batch"] == values["scale"] for values in seen)


@needs_accelerator
def test_a_sender_takes_a_value_for_each_field() -> None:
    make = cast("Any", accelerator.accelerator()).Sender
    given = {
        "call": 0,
        "replace": 0,
        "config": 0,
        "function": 0,
        "parameters": bytes(16),
        "fields": accelerator.FIELD.pack(8, b"Q"),
    }
    given |= {"launch": None, "stream": 0, "ring": LaunchHistory().ring, "kept": None}
    with pytest.raises(TypeError, match="2 values, expected 1"):
        make(**given).send(1, 2)


def test_an_accelerator_of_another_abi_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type(sys)("cubin_runtime_accelerator")
    module.ABI = 2
    monkeypatch.setitem(sys.modules, "cubin_runtime_accelerator", module)
    found = accelerator.accelerator.__wrapped__  # what is installed is looked for once
    assert found() is None
    module.ABI = accelerator._ABI
    assert found() is module


@needs_accelerator
@pytest.mark.parametrize(
    ("size", "count", "by_accelerator"), [(4096, 3, True), (4104, 3, False), (4096, 64, True), (4096, 65, False)]
)
def test_more_than_4096_bytes_or_64_values_are_sent_without_it(
    driver: Driver,
    standin: StandIn,
    context: int,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    count: int,
    by_accelerator: bool,
) -> None:
    layout = StructLayout.declare("Large", [Field(f"value{number}", "int64", "") for number in range(size // 8)])
    standin.add_kernel(SYMBOL, (size,))
    facts = cubin(facts=kernel_facts((size,)))
    wanted = needs(layout=layout, fingerprint=layout.fingerprint, dynamic_shared_bytes=200000)
    kernel = ModuleCache(driver, parse=lambda _: facts).kernel(
        KernelRequest(context, DIGEST, SYMBOL, lambda: b"", wanted)
    )
    values = {field.name: 0 for field in layout.fields}
    names = [f"input{number}" for number in range(count)]
    made = plan(layout=layout, values=values, inputs={f"value{number}": name for number, name in enumerate(names)})
    call, accelerated = send(PreparedLaunches([made], [kernel], driver, names), accelerator.accelerator(), monkeypatch)
    for _ in range(2):
        call(0x5007, *range(1, count + 1))
    assert accelerated == by_accelerator
    assert layout.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))["value2"] == 3


@pytest.fixture
def pair(driver: Driver, standin: StandIn, context: int) -> PreparedLaunches:
    """Two launches, of grids of 1 and 2 blocks."""
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    kernel = cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000)))
    inputs = {name: name for name in NAMES}
    plans = [plan(inputs=inputs, grid=(2 * blocks, 1, 1)) for blocks in (1, 2)]
    return PreparedLaunches(plans, [kernel, kernel], driver, NAMES)


def bound(prepared: PreparedLaunches, stream: int, values: tuple[Any, ...]) -> Send:
    """A function that sends everything as it was bound; what it gives where the stream is of another context."""
    own = senders_of(prepared, ())

    def run() -> str | None:
        try:
            own.send((), stream, [()] * len(own.written), lambda: values)
        except OtherContextError:
            return "else"
        return None

    return run


@pytest.mark.parametrize("code", [1, 201, 400])
@pytest.mark.parametrize("stream", [0, 0x5007])
@pytest.mark.parametrize("face", ["run", "sending", "bound"])
@pytest.mark.parametrize("make", [None, accelerator.accelerator()], ids=["ctypes", "accelerator"])
def test_no_launch_is_sent_again_when_one_behind_it_is_refused(
    pair: PreparedLaunches,
    standin: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    face: str,
    stream: int,
    code: int,
) -> None:
    values = (0x1000, 5, 0.5)
    call, _ = send(pair, make, monkeypatch)
    calls: dict[str, Send] = {
        "run": lambda: pair.run(stream, *values),
        "sending": lambda: call(stream, *values),
        "bound": bound(pair, stream, values),
    }
    calls[face]()
    standin.clear_log()
    once = code == 1  # of the others, the driver is asked for the same launch once more
    standin.fail("cuLaunchKernelEx", code, skip=1, times=1 if once else -1)
    with pytest.raises(DriverCallError, match=f"cuLaunchKernelEx returned {code} "):
        calls[face]()
    assert [launch.seen["grid"] for launch in standin.calls("cuLaunchKernelEx") if "grid" in launch.seen] == ["2,1,1"]


@pytest.mark.parametrize("make", [None, accelerator.accelerator()], ids=["ctypes", "accelerator"])
def test_all_launches_are_sent_where_no_context_is_current(
    pair: PreparedLaunches, standin: StandIn, driver: Driver, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    call, _ = send(pair, make, monkeypatch)
    context = driver.current_context()
    driver.set_current(None)
    call(0, 0x1000, 5, 0.5)
    driver.set_current(context)
    sent = [launch.seen["grid"] for launch in standin.calls("cuLaunchKernelEx") if "grid" in launch.seen]
    assert sent == ["2,1,1", "4,1,1"]
