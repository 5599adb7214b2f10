from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import pytest

from cubin_runtime.errors import AbiError, UsageError
from cubin_runtime.launch import senders
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.driver_errors import DriverLibraryError
from cubin_runtime.launch.modules import KernelRequest, LoadedKernel, ModuleCache
from cubin_runtime.launch.plan import LaunchAttributes, LaunchPlan
from cubin_runtime.launch.prepared import PreparedLaunches
from cubin_runtime.launch.senders import Senders, senders_of
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.launch.tensormap import TensorMapCache, TensorMapError
from cubin_runtime.testing import StandIn
from tests.launch.examples import DIGEST, LAYOUT, SPEC, SYMBOL, VALUES, cubin, kernel_facts, needs, plan

ENCODED = SPEC.address.to_bytes(8, "little") + b"\xee" * 120


def sent(standin: StandIn, index: int = -1) -> dict[str, object]:
    """The parameter struct of a launch, as the stand-in read it from memory."""
    return LAYOUT.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


@pytest.fixture(autouse=True, params=["full path", "senders"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How launches are sent, by ctypes both."""
    if request.param == "senders":
        monkeypatch.setattr("cubin_runtime.launch.senders.accelerator", lambda: None)
        in_full = PreparedLaunches.run
        kept: dict[PreparedLaunches, Senders] = {}

        def run(self: PreparedLaunches, stream: int, *values: Any) -> None:
            if sys._getframe(1).f_code.co_filename == senders.__file__:  # a launch that was refused
                in_full(self, stream, *values)
                return
            written = set(range(len(self.names))) - self.resident
            own = kept.get(self) or kept.setdefault(self, senders_of(self, written))
            key = (stream, *(values[number] for number in sorted(self.resident)))
            own.send(key, stream, [[values[n] for n in numbers] for numbers in own.written], lambda: values)

        monkeypatch.setattr(PreparedLaunches, "run", run)
    return str(request.param)


@pytest.fixture
def kernel(driver: Driver, standin: StandIn, context: int) -> LoadedKernel:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    return cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000)))


def prepare(
    kernel: LoadedKernel, driver: Driver, *names: str, resident: tuple[str, ...] = (), **changes: Any
) -> PreparedLaunches:
    """One launch whose fields ``names`` take values of the same names."""
    made = plan(inputs=dict(zip(names, names, strict=True)), **changes)
    return PreparedLaunches([made], [kernel], driver, names, resident=resident)


@pytest.fixture
def prepared(driver: Driver, kernel: LoadedKernel) -> PreparedLaunches:
    return prepare(kernel, driver)


def test_configuration_and_attributes_arrive_as_planned(prepared: PreparedLaunches, standin: StandIn) -> None:
    prepared.run(0x5007)
    seen = standin.call("cuLaunchKernelEx")
    parameter = seen.pop("parameter0")
    assert len(parameter) == 2 * LAYOUT.size
    assert seen == {
        "symbol": SYMBOL,
        "context": "0xc000",
        "grid": "132,2,3",
        "block": "384,1,1",
        "shared": "200000",
        "stream": "0x5007",
        "attributes": "3",
        "cluster": "2,1,1",
        "policy": "1",
        "pdl": "1",
        "extra": "(nil)",
        "aligned0": "1",
    }


def test_attributes_that_were_not_asked_for_are_not_passed(
    driver: Driver, kernel: LoadedKernel, standin: StandIn
) -> None:
    prepare(kernel, driver, attributes=LaunchAttributes()).run(0)
    seen = standin.call("cuLaunchKernelEx")
    assert (seen["attributes"], seen["pdl"], "cluster" in seen, "policy" in seen) == ("1", "0", False, False)


def test_parameters_arrive_byte_for_byte(prepared: PreparedLaunches, standin: StandIn) -> None:
    prepared.run(0)
    assert standin.call("cuLaunchKernelEx")["parameter0"] == LAYOUT.pack({**VALUES, "k": ENCODED}).hex()


def test_only_the_inputs_change_from_run_to_run(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    prepared = prepare(kernel, driver, "lengths", "scale", "batch")
    prepared.run(0, 1, 0.5, 2)
    prepared.run(0, 0xABCDEF, 0.25, 3)
    first = {**LAYOUT.unpack(LAYOUT.pack({**VALUES, "k": ENCODED})), "lengths": 1, "scale": 0.5, "batch": 2}
    assert [sent(standin, i) for i in (0, 1)] == [first, {**first, "lengths": 0xABCDEF, "scale": 0.25, "batch": 3}]


def test_two_fields_may_take_one_value(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    made = plan(inputs={"out": "address", "lengths": "address"})
    PreparedLaunches([made], [kernel], driver, ["address"]).run(0, 0xAB)
    assert (sent(standin)["out"], sent(standin)["lengths"]) == (0xAB, 0xAB)


def test_launches_of_one_plan_follow_one_another_with_their_own_values(
    driver: Driver, kernel: LoadedKernel, standin: StandIn
) -> None:
    plans = [plan(inputs={"batch": name, "out": "out"}) for name in ("first", "second")]
    PreparedLaunches(plans, [kernel, kernel], driver, ["second", "out", "first"]).run(0x5001, 2, 0xEE, 1)
    assert [(sent(standin, i)["batch"], sent(standin, i)["out"]) for i in (0, 1)] == [(1, 0xEE), (2, 0xEE)]


@pytest.mark.parametrize("resident", [(), ("k",)], ids=["moving", "resident"])
def test_a_descriptor_is_that_of_the_address_given(
    driver: Driver, kernel: LoadedKernel, standin: StandIn, resident: tuple[str, ...]
) -> None:
    prepared = prepare(kernel, driver, "k", "batch", resident=resident)
    for number, address in enumerate((0x1230, 0x4560, 0x1230)):
        prepared.run(0, address, number)
    seen = [(bytes(sent(standin, i)["k"])[:8], sent(standin, i)["batch"]) for i in range(3)]  # type: ignore[call-overload]
    expected = [(address.to_bytes(8, "little"), i) for i, address in enumerate((0x1230, 0x4560, 0x1230))]
    assert seen == expected
    addresses = [call.seen["address"] for call in standin.calls("cuTensorMapEncodeTiled")]
    assert sorted(set(addresses) - {hex(SPEC.address)}) == ["0x1230", "0x4560"]


def test_descriptors_are_shared_through_the_cache(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    cache = TensorMapCache(driver)
    for _ in range(2):
        PreparedLaunches([plan()], [kernel], driver, descriptors=cache).run(0)
    assert len(standin.calls("cuTensorMapEncodeTiled")) == 1


def test_a_tensor_that_comes_back_needs_no_call_of_the_driver_but_the_launch(
    driver: Driver, kernel: LoadedKernel, standin: StandIn
) -> None:
    prepared = prepare(kernel, driver, "k")
    prepared.run(0, 0x1230)
    prepared.run(0, 0x4560)
    standin.clear_log()
    for address in (0x1230, 0x4560, 0x1230):
        prepared.run(0, address)
    assert standin.names() == ["cuLaunchKernelEx"] * 3
    assert [bytes(sent(standin, i)["k"])[:2] for i in range(3)] == [b"\x30\x12", b"\x60\x45", b"\x30\x12"]  # type: ignore[call-overload]


def test_so_many_addresses_that_some_are_forgotten(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    prepared = prepare(kernel, driver, "k")
    for address in [*range(0x10000, 0x10000 + 16 * 300, 16), 0x10000]:
        prepared.run(0, address)
        assert bytes(sent(standin)["k"])[:8] == address.to_bytes(8, "little")  # type: ignore[call-overload]


@pytest.mark.parametrize("resident", [(), ("k",)], ids=["moving", "resident"])
def test_descriptors_are_encoded_in_the_kernels_context(
    driver: Driver, kernel: LoadedKernel, standin: StandIn, resident: tuple[str, ...]
) -> None:
    prepared = prepare(kernel, driver, "k", resident=resident)
    driver.set_current(None)
    for address in (0x1230, 0x4560):
        standin.clear_log()
        prepared.run(0x5001, address)
        names = standin.names()
        pushed = names[: names.index("cuTensorMapEncodeTiled")]
        assert pushed.count("cuCtxPushCurrent") > pushed.count("cuCtxPopCurrent")


def test_a_descriptor_that_breaks_a_rule_is_refused(driver: Driver, kernel: LoadedKernel) -> None:
    with pytest.raises(TensorMapError, match="address-alignment"):
        prepare(kernel, driver, "k").run(0, 8)


@pytest.mark.parametrize("value", ["x", None, 2**64, -1, 1.5])
def test_a_value_that_does_not_fit_is_refused_and_nothing_launched(
    driver: Driver, kernel: LoadedKernel, standin: StandIn, value: object
) -> None:
    prepared = prepare(kernel, driver, "batch", "out")
    with pytest.raises(UsageError, match=r"launch of paged_decode_d128 with batch=3, out="):
        prepared.run(0, 3, value)
    assert standin.calls("cuLaunchKernelEx") == []
    prepared.run(0, 4, 1)
    assert (sent(standin)["batch"], sent(standin)["out"]) == (4, 1)


@pytest.mark.parametrize("value", ["x", None, 2**64, -1, 1.5])
def test_a_value_that_is_refused_after_others_changes_no_later_run(
    driver: Driver, kernel: LoadedKernel, standin: StandIn, value: object
) -> None:
    prepared = prepare(kernel, driver, "batch", "out", "k")
    prepared.run(0, 3, 1, SPEC.address)
    with pytest.raises(UsageError, match=r"launch of paged_decode_d128 with batch=5, out="):
        prepared.run(0, 5, value, 2 * SPEC.address)
    prepared.run(0, 4, 2, SPEC.address)
    first, last = sent(standin, 0), sent(standin, 1)
    assert last == {**first, "batch": 4, "out": 2}


def test_a_zero_keeps_its_sign_in_each_run(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    prepared = prepare(kernel, driver, "scale")
    for scale in (0.0, -0.0, 0.0):
        prepared.run(0, scale)
    assert [str(sent(standin, run)["scale"]) for run in range(3)] == ["0.0", "-0.0", "0.0"]


def test_an_input_that_is_no_scalar_is_refused(driver: Driver, kernel: LoadedKernel) -> None:
    with pytest.raises(UsageError, match="input 'group' of struct DecodeParams is FastModDiv"):
        prepare(kernel, driver, "group")


def test_a_truth_value_is_no_input(driver: Driver, standin: StandIn, context: int) -> None:
    """Packing would take any object for True."""
    layout = StructLayout.declare("Switches", [Field("on", "bool"), Field("batch", "int32")])
    standin.add_kernel(SYMBOL, (layout.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts((layout.size,))))
    wanted = needs(layout=layout, fingerprint=layout.fingerprint, dynamic_shared_bytes=200000)
    loaded = cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", wanted))
    with pytest.raises(UsageError, match="input 'on' of struct Switches is bool"):
        prepare(loaded, driver, "on", layout=layout, values={"on": True, "batch": 1})


def test_an_input_of_an_unknown_field_is_refused() -> None:
    with pytest.raises(UsageError, match=r"inputs of struct DecodeParams: unknown \['nope'\]"):
        plan(inputs={"nope": "out"})


def test_many_sets_of_resident_addresses_do_not_pile_up(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    own = senders_of(prepare(kernel, driver, "k", resident=("k",)), ())
    for layer in range(1100):
        address = 0x10000 * (layer + 1)
        own.send((0x5001, address), 0x5001, [()], lambda address=address: (address,))
    assert len(own.by_key) == 1024
    standin.clear_log()
    own.send((0x5001, 0x10000), 0x5001, [()], lambda: (0x10000,))
    assert bytes(sent(standin)["k"])[:8] == (0x10000).to_bytes(8, "little")  # type: ignore[call-overload]


def test_threads_launch_their_own_values(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    prepared = prepare(kernel, driver, "out", "lengths", "batch")

    def work(number: int) -> None:
        for i in range(100):
            prepared.run(0x5000 + number, number << 32 | i, number << 32 | i, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = [
        (int(call.seen["stream"], 16), LAYOUT.unpack(bytes.fromhex(call.seen["parameter0"])))
        for call in standin.calls("cuLaunchKernelEx")
    ]
    torn = [v for stream, v in launches if not (v["out"] == v["lengths"] and v["batch"] == stream - 0x5000)]
    assert torn == []
    assert len({v["out"] for _, v in launches}) == 600


class SlowDriver(Driver):
    """Once ``slow``, its next launch waits inside the call; each notes the parameters that it then finds."""

    def __init__(self, standin: StandIn) -> None:
        super().__init__(standin.path)
        self.entered, self.leave = threading.Event(), threading.Event()
        self.found: list[object] = []
        self.slow = False

    def function(self, name: str) -> Any:
        if name != "cuLaunchKernelEx":
            return super().function(name)

        def launch(config: int, function: int, arguments: int, extra: None) -> int:
            if self.slow and not self.entered.is_set():
                self.entered.set()
                assert self.leave.wait(100)
            at = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
            self.found.append(LAYOUT.unpack(ctypes.string_at(at, LAYOUT.size))["batch"])
            return 0

        return launch


def test_a_launch_under_way_keeps_its_parameters_while_another_thread_launches(
    standin: StandIn, kernel: LoadedKernel
) -> None:
    driver = SlowDriver(standin)
    prepared = prepare(kernel, driver, "batch")
    prepared.run(0, 0)  # so that a block waits to be taken
    driver.slow = True
    first = threading.Thread(target=prepared.run, args=(0, 1))
    first.start()
    assert driver.entered.wait(100)
    prepared.run(0, 2)
    driver.leave.set()
    first.join()
    prepared.run(0, 3)
    assert driver.found == [0, 2, 1, 3]


def test_a_thread_without_a_context_launches_in_the_kernels_own(
    prepared: PreparedLaunches, standin: StandIn, way: str
) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            prepared.run(0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    refused = [call.seen for call in standin.calls("refused")]
    assert refused == [{"call": "cuLaunchKernelEx"}] * (1 if way == "full path" else 2)
    assert standin.call("cuLaunchKernelEx")["symbol"] == SYMBOL


@pytest.mark.parametrize("stream", [0, 2])
def test_a_default_stream_is_that_of_the_kernels_context(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn, stream: int
) -> None:
    standin.with_devices(2)
    other = driver.primary_context(1)
    with driver.using(other):
        prepared.run(stream)
        assert driver.current_context() == other
    assert standin.calls("cuLaunchKernelEx")[-1].seen["context"] == "0xc000"


def test_a_stream_of_the_kernels_context_needs_no_current_one(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn, way: str
) -> None:
    stream = driver.create_stream()
    prepared.run(stream)
    driver.set_current(None)
    standin.clear_log()
    prepared.run(stream)
    assert [name for name in standin.names() if "Ctx" not in name] == ["cuLaunchKernelEx"]
    assert way == "full path" or len(standin.names()) == 1


def test_a_stream_of_another_device_is_refused_with_both_named(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn
) -> None:
    standin.with_devices(2)
    with driver.using(driver.primary_context(1)):
        stream = driver.create_stream()
    with pytest.raises(UsageError, match="belongs to device 1, the kernel is loaded on device 0"):
        prepared.run(stream)
    assert standin.calls("cuLaunchKernelEx") == []


def test_a_fault_names_the_launches_of_its_context_alone(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn
) -> None:
    standin.with_devices(2)
    other = driver.primary_context(1)
    prepared.run(0x5001)
    standin.fault(700)
    with driver.using(other), pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert caught.value.launches == ()
    with pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert len(caught.value.launches) == 1


def test_launching_allocates_waits_and_loads_nothing(prepared: PreparedLaunches, standin: StandIn) -> None:
    prepared.run(0)
    standin.clear_log()
    prepared.run(0)
    assert standin.names() == ["cuLaunchKernelEx"]


def test_a_launch_inside_a_capture_goes_to_the_capturing_stream(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn
) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    prepared.run(stream)
    assert driver.end_capture(stream)
    assert standin.call("cuLaunchKernelEx")["stream"] == hex(stream)


def test_a_fault_that_surfaces_later_names_the_last_launches(
    driver: Driver, kernel: LoadedKernel, standin: StandIn
) -> None:
    prepared = prepare(kernel, driver, "batch")
    for number in range(20):
        prepared.run(0x5000 + number, number)
    standin.fault(700)
    with pytest.raises(DriverCallError, match="last launches, newest last") as caught:
        driver.synchronize(0)
    records = caught.value.launches
    assert [LAYOUT.unpack(record.parameters)["batch"] for record in records] == list(range(4, 20))
    assert (records[-1].stream, records[-1].sha256, records[-1].grid) == (0x5013, DIGEST, (132, 2, 3))


def test_a_fault_names_kernel_digest_grid_attributes_and_pointers(
    prepared: PreparedLaunches, driver: Driver, standin: StandIn
) -> None:
    prepared.run(0x5001)
    standin.fault(719)
    with pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert str(caught.value).splitlines()[-1] == (
        "  paged_decode_d128 (decode, sha256 abababababab) grid (132, 2, 3) block (384, 1, 1) shared 200000 "
        "cluster (2, 1, 1), policy spread, pdl on stream 0x5001 pointers: out=0x1000 lengths=0x2000"
    )


def test_a_refused_launch_does_not_name_earlier_ones(prepared: PreparedLaunches, standin: StandIn) -> None:
    prepared.run(0)
    standin.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverCallError) as caught:
        prepared.run(0)
    assert (caught.value.sticky, caught.value.launches) == (False, ())


def test_the_history_can_be_cleared(prepared: PreparedLaunches, driver: Driver, kernel: LoadedKernel) -> None:
    history = driver.history(kernel.context)
    prepared.run(0)
    assert len(history.records()) == 1
    history.clear()
    assert history.records() == ()


SHORT = StructLayout.declare("Short", [Field("a", "int32")])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sha256": "00" * 32}, "sha256 000000000000"),
        ({"sha256": DIGEST[:12] + "00" * 26}, "plan for 'decode'"),
        ({"symbol": "other"}, "plan for 'other'"),
        ({"layout": SHORT, "values": {"a": 1}}, "struct Short .* struct DecodeParams"),
        ({"block": (512, 1, 1)}, "512 threads per block; 'decode' takes 384"),
        ({"shared_bytes": 200001}, "200001 bytes of dynamic shared memory; 'decode' was loaded for 200000"),
        (
            {"attributes": LaunchAttributes((12, 1, 1), nonportable_cluster=True)},
            "non-portable cluster; 'decode' was loaded for portable ones",
        ),
    ],
)
def test_a_plan_beyond_what_the_kernel_was_gated_for_is_refused(
    driver: Driver, kernel: LoadedKernel, changes: dict[str, Any], text: str
) -> None:
    made: LaunchPlan = plan(**changes)
    with pytest.raises(AbiError, match=text):
        PreparedLaunches([made], [kernel], driver)


def test_a_planned_value_that_does_not_fit_is_refused(driver: Driver, kernel: LoadedKernel) -> None:
    with pytest.raises(UsageError, match="batch=None: expected int32"):
        prepare(kernel, driver, values={**VALUES, "batch": None}).run(0)


def test_a_child_of_a_fork_is_told_so(
    prepared: PreparedLaunches, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver answers a child with CUDA_ERROR_NOT_INITIALIZED."""
    prepared.run(0x5007)
    monkeypatch.setattr("os.getpid", lambda: -1)
    standin.fail("cuLaunchKernelEx", 3)
    with pytest.raises(DriverLibraryError, match="before a fork"):
        prepared.run(0x5007)
