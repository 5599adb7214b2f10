from __future__ import annotations

import threading
from typing import Any

import pytest
from examples import DIGEST, LAYOUT, SPEC, SYMBOL, VALUES, cubin, kernel_facts, needs, plan
from standin_build import StandIn

from cubin_runtime.errors import AbiError, UsageError
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.launcher import LaunchAttributes, LaunchPlan, PreparedLaunch
from cubin_runtime.launch.modules import LoadedKernel, ModuleCache
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.launch.tensormap import TensorMapCache, TensorMapError

ENCODED = SPEC.address.to_bytes(8, "little") + b"\xee" * 120


def sent(standin: StandIn, index: int = -1) -> dict[str, object]:
    """The parameter struct of a launch, as the stand-in read it from memory."""
    return LAYOUT.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


@pytest.fixture
def kernel(driver: Driver, standin: StandIn, context: int) -> LoadedKernel:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    return cache.kernel(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000))


@pytest.fixture
def prepared(driver: Driver, kernel: LoadedKernel) -> PreparedLaunch:
    return PreparedLaunch(plan(), kernel, driver)


def test_configuration_and_attributes_arrive_as_planned(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.launch(0x5007)
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
    PreparedLaunch(plan(attributes=LaunchAttributes()), kernel, driver).launch(0)
    seen = standin.call("cuLaunchKernelEx")
    assert (seen["attributes"], seen["pdl"], "cluster" in seen, "policy" in seen) == ("1", "0", False, False)


def test_parameters_arrive_byte_for_byte(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.launch(0)
    assert standin.call("cuLaunchKernelEx")["parameter0"] == LAYOUT.pack({**VALUES, "k": ENCODED}).hex()


def test_patched_fields_stay_patched(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.patch("batch", 9)
    prepared.launch(0)
    prepared.launch(0)
    assert [sent(standin, i)["batch"] for i in (0, 1)] == [9, 9]


def test_only_the_patched_field_changes(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.launch(0)
    prepared.launch(0, {"lengths": 0xABCDEF})
    assert sent(standin, 1) == {**sent(standin, 0), "lengths": 0xABCDEF}


def test_a_patched_descriptor_is_encoded(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.patch("k", SPEC.moved(0x1230))
    prepared.launch(0)
    descriptor = sent(standin)["k"]
    assert isinstance(descriptor, bytes)
    assert descriptor[:8] == (0x1230).to_bytes(8, "little")


def test_descriptors_are_shared_through_the_cache(driver: Driver, kernel: LoadedKernel, standin: StandIn) -> None:
    cache = TensorMapCache(driver)
    PreparedLaunch(plan(), kernel, driver, cache)
    PreparedLaunch(plan(), kernel, driver, cache)
    assert len(standin.calls("cuTensorMapEncodeTiled")) == 1


def test_a_descriptor_that_breaks_a_rule_is_refused(prepared: PreparedLaunch) -> None:
    with pytest.raises(TensorMapError, match="address-alignment"):
        prepared.patch("k", SPEC.moved(8))


def test_one_bad_value_changes_nothing(prepared: PreparedLaunch, standin: StandIn) -> None:
    before = prepared.parameters
    with pytest.raises(UsageError, match="batch='x'"):
        prepared.launch(0, {"out": 1, "batch": "x"})
    assert prepared.parameters == before
    assert standin.calls("cuLaunchKernelEx") == []


def test_an_unknown_field_is_refused(prepared: PreparedLaunch) -> None:
    with pytest.raises(UsageError, match="no field 'nope'"):
        prepared.patch("nope", 1)


def test_describe_shows_what_would_be_sent(prepared: PreparedLaunch) -> None:
    prepared.patch("out", 0xBEEF)
    rows = {row.name: row.text for row in prepared.describe()}
    assert (rows["out"], rows["batch"], rows["group"]) == ("0xbeef", "7", "/ 3")


class OnStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x5009


def test_any_kind_of_stream_is_taken(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.launch(OnStream())
    prepared.launch(None)
    assert [call.seen["stream"] for call in standin.calls("cuLaunchKernelEx")] == ["0x5009", "(nil)"]


def test_a_stepper_sets_its_fields_and_launches(prepared: PreparedLaunch, standin: StandIn) -> None:
    step = prepared.stepper("out", "scale", "batch")
    step(0x5001, 0xAA, 0.5, 3)
    step(0x5002, 0xBB, 0.25, 4)
    assert [sent(standin, i)["out"] for i in (0, 1)] == [0xAA, 0xBB]
    assert [(sent(standin, i)["scale"], sent(standin, i)["batch"]) for i in (0, 1)] == [(0.5, 3), (0.25, 4)]
    assert [call.seen["stream"] for call in standin.calls("cuLaunchKernelEx")] == ["0x5001", "0x5002"]


@pytest.mark.parametrize("values", [(), (1, 2), ("x",), (2**64,), (-1,)])
def test_a_stepper_refuses_values_that_do_not_fit(prepared: PreparedLaunch, values: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="expected out"):
        prepared.stepper("out")(0, *values)


@pytest.mark.parametrize("name", ["k", "group"])
def test_a_stepper_takes_scalar_fields_only(prepared: PreparedLaunch, name: str) -> None:
    with pytest.raises(UsageError, match=f"stepper field '{name}'"):
        prepared.stepper(name)


def test_a_stepper_reports_what_the_driver_refuses(prepared: PreparedLaunch, standin: StandIn) -> None:
    standin.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverCallError, match="cuLaunchKernelEx returned 1"):
        prepared.stepper()(0)


def test_threads_launch_their_own_values(prepared: PreparedLaunch, standin: StandIn) -> None:
    def work(number: int) -> None:
        for i in range(100):
            prepared.launch(0x5000 + number, {"out": number << 32 | i, "lengths": number << 32 | i, "batch": number})

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


def test_a_thread_without_a_context_launches_in_the_kernels_own(prepared: PreparedLaunch, standin: StandIn) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            prepared.launch(0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert standin.call("refused") == {"call": "cuLaunchKernelEx"}
    assert standin.call("cuLaunchKernelEx")["symbol"] == SYMBOL


@pytest.mark.parametrize("way", ["launch", "step"])
@pytest.mark.parametrize("stream", [0, 2])
def test_a_default_stream_is_that_of_the_kernels_context(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn, way: str, stream: int
) -> None:
    standin.with_devices(2)
    other = driver.primary_context(1)
    with driver.using(other):
        {"launch": prepared.launch, "step": prepared.stepper()}[way](stream)
        assert driver.current_context() == other
    assert standin.calls("cuLaunchKernelEx")[-1].seen["context"] == "0xc000"


def test_a_stream_of_the_kernels_context_needs_no_current_one(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    stream = driver.create_stream()
    driver.set_current(None)
    standin.clear_log()
    prepared.launch(stream)
    assert standin.names() == ["cuLaunchKernelEx"]


@pytest.mark.parametrize("way", ["launch", "step"])
def test_a_stream_of_another_device_is_refused_with_both_named(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn, way: str
) -> None:
    standin.with_devices(2)
    with driver.using(driver.primary_context(1)):
        stream = driver.create_stream()
    with pytest.raises(UsageError, match="of device 1, the kernel is loaded on device 0"):
        {"launch": prepared.launch, "step": prepared.stepper()}[way](stream)
    assert standin.calls("cuLaunchKernelEx") == []


def test_a_fault_names_the_launches_of_its_context_alone(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    standin.with_devices(2)
    other = driver.primary_context(1)
    prepared.launch(0x5001)
    standin.fault(700)
    with driver.using(other), pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert caught.value.launches == ()
    with pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert len(caught.value.launches) == 1


def test_a_stepper_on_a_thread_without_a_context_uses_the_kernels_own(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    driver.set_current(None)
    prepared.stepper("batch")(0x5001, 4)
    assert sent(standin)["batch"] == 4
    assert driver.current_context() is None


def test_launching_allocates_waits_and_loads_nothing(prepared: PreparedLaunch, standin: StandIn) -> None:
    standin.clear_log()
    prepared.launch(0, {"out": 1, "batch": 2})
    assert standin.names() == ["cuLaunchKernelEx"]


def test_a_launch_inside_a_capture_goes_to_the_capturing_stream(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    prepared.launch(stream)
    assert driver.end_capture(stream)
    assert standin.call("cuLaunchKernelEx")["stream"] == hex(stream)


def test_a_fault_that_surfaces_later_names_the_last_launches(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    for number in range(20):
        prepared.launch(0x5000 + number, {"batch": number})
    standin.fault(700)
    with pytest.raises(DriverCallError, match="last launches, newest last") as caught:
        driver.synchronize(0)
    records = caught.value.launches
    assert [LAYOUT.unpack(record.parameters)["batch"] for record in records] == list(range(4, 20))
    assert (records[-1].stream, records[-1].sha256, records[-1].grid) == (0x5013, DIGEST, (132, 2, 3))


def test_a_fault_names_kernel_digest_grid_attributes_and_pointers(
    prepared: PreparedLaunch, driver: Driver, standin: StandIn
) -> None:
    prepared.launch(0x5001)
    standin.fault(719)
    with pytest.raises(DriverCallError) as caught:
        driver.synchronize(0)
    assert str(caught.value).splitlines()[-1] == (
        "  paged_decode_d128 (decode, sha256 abababababab) grid (132, 2, 3) block (384, 1, 1) shared 200000 "
        "cluster (2, 1, 1), policy spread, pdl on stream 0x5001 pointers: out=0x1000 lengths=0x2000"
    )


def test_a_refused_launch_does_not_name_earlier_ones(prepared: PreparedLaunch, standin: StandIn) -> None:
    prepared.launch(0)
    standin.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverCallError) as caught:
        prepared.launch(0)
    assert (caught.value.sticky, caught.value.launches) == (False, ())


def test_the_history_can_be_cleared(prepared: PreparedLaunch, driver: Driver) -> None:
    history = driver.history(prepared.kernel.context)
    prepared.launch(0)
    assert len(history.records()) == 1
    history.clear()
    assert history.records() == ()


SHORT = StructLayout.declare("Short", [Field("a", "int32")])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sha256": "00" * 32}, "sha256 000000000000"),
        ({"symbol": "other"}, "plan for 'other'"),
        ({"layout": SHORT, "values": {"a": 1}}, "struct Short .* struct DecodeParams"),
        ({"block": (512, 1, 1)}, "512 threads a block; 'decode' takes 384"),
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
        PreparedLaunch(made, kernel, driver)


def test_a_value_that_does_not_fit_is_refused_when_prepared(driver: Driver, kernel: LoadedKernel) -> None:
    with pytest.raises(UsageError, match="batch=None: expected int32"):
        PreparedLaunch(plan(values={**VALUES, "batch": None}), kernel, driver)
