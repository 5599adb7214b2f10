"""The driver layer on a real device: descriptor rules, memory, streams, graphs, errors; no torch.

CUBIN_RUNTIME_GPU_OUT names a folder for ``tensor_map_rules.json``: what the driver said to each descriptor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.errors import AbiError, DriverError, FrozenError, WorkspaceError
from cubin_runtime.launch import driver_api as api
from cubin_runtime.launch.abi import LaunchNeeds
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.modules import KernelRequest, ModuleCache
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.launch.tensormap import TensorMapSpec
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import GraphDriver
from tests.launch.tensormap_cases import ACCEPTED, BASE, BROKEN

pytestmark = pytest.mark.gpu
FIXTURES = Path(__file__).parents[1] / "fixtures"
KIB = 1024


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = GraphDriver()
    try:
        made.set_current(made.primary_context(0))
    except DriverError as error:
        pytest.skip(f"needs a CUDA device: {error}")
    yield made
    made.release_primary_context()


@pytest.fixture
def stream(driver: Driver) -> Iterator[int]:
    made = driver.create_stream()
    yield made
    driver.destroy_stream(made)


@pytest.fixture
def memory(driver: Driver) -> Iterator[int]:
    made = driver.allocate(64 * KIB)
    yield made
    driver.free(made)


@pytest.fixture(scope="module")
def verdicts(driver: Driver) -> Iterator[dict[str, dict[str, object]]]:
    """What the driver said to each descriptor; written out at the end, so that a rule can be judged by it."""
    found: dict[str, dict[str, object]] = {}
    yield found
    device = driver.device(driver.context_device())
    report = {
        "device": device.name,
        "capability": list(device.capability),
        "driver": device.driver_version,
        "cases": found,
        "accepted_though_we_refuse": [n for n, v in found.items() if v["rule"] and v["driver"] == "accepted"],
        "refused_though_we_accept": [n for n, v in found.items() if not v["rule"] and v["driver"] != "accepted"],
    }
    print(json.dumps(report, indent=1))
    if "CUBIN_RUNTIME_GPU_OUT" in os.environ:
        folder = Path(os.environ["CUBIN_RUNTIME_GPU_OUT"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tensor_map_rules.json").write_text(json.dumps(report, indent=1) + "\n")


def ask_driver(driver: Driver, spec: TensorMapSpec, memory: int) -> str:
    """The driver's own answer to a descriptor of real memory with the low address bits of ``spec``."""
    try:
        spec._replace(address=memory + spec.address % 256).encode_unchecked(driver)
    except DriverCallError as error:
        return error.name
    return "accepted"


def beyond_this_device(driver: Driver, spec: TensorMapSpec) -> bool:
    """Packed types and swizzle atoms came with compute capability 10."""
    major, _ = driver.device(driver.context_device()).capability
    return major < 10 and (spec.dtype.startswith("16u") or "atom" in spec.swizzle)


def skip_if_beyond(driver: Driver, spec: TensorMapSpec, answer: str) -> None:
    if beyond_this_device(driver, spec):
        pytest.skip(f"{spec.dtype}, swizzle {spec.swizzle} is newer than this device; the driver said {answer}")


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_driver_takes_what_we_take(
    driver: Driver, memory: int, verdicts: dict[str, dict[str, object]], case: str
) -> None:
    answer = ask_driver(driver, ACCEPTED[case], memory)
    verdicts[case] = {"rule": None, "driver": answer}
    skip_if_beyond(driver, ACCEPTED[case], answer)
    assert answer == "accepted"


@pytest.mark.parametrize("case", BROKEN)
def test_the_driver_refuses_what_we_refuse(
    driver: Driver, memory: int, verdicts: dict[str, dict[str, object]], case: str
) -> None:
    rule, spec = BROKEN[case]
    answer = ask_driver(driver, spec, memory)
    verdicts[case] = {"rule": rule, "driver": answer}
    skip_if_beyond(driver, spec, answer)
    assert answer == "CUDA_ERROR_INVALID_VALUE"


def test_one_spec_always_encodes_to_the_same_bytes(driver: Driver, memory: int) -> None:
    spec = BASE._replace(address=memory)
    assert spec.encode(driver) == spec.encode(driver)


def test_another_address_encodes_to_other_bytes(driver: Driver, memory: int) -> None:
    assert BASE._replace(address=memory).encode(driver) != BASE._replace(address=memory + 256).encode(driver)


def test_device_facts_are_plausible(driver: Driver) -> None:
    facts = driver.device(driver.context_device())
    assert facts.name
    assert facts.capability >= (7, 0)
    assert facts.multiprocessors > 1
    assert 48 * KIB <= facts.shared_bytes_per_block_optin <= facts.shared_bytes_per_multiprocessor
    assert facts.l2_bytes > KIB
    assert facts.driver_version >= 12000


def test_bytes_come_back_as_they_were_copied(driver: Driver, memory: int) -> None:
    data = os.urandom(64 * KIB)
    driver.copy_to_device(memory, data)
    assert driver.read(memory, len(data)) == data


def test_fills_set_bytes_and_words(driver: Driver, stream: int, memory: int) -> None:
    driver.fill(memory, 0xAB, KIB, stream)
    driver.fill_words(memory + KIB, 0x01020304, KIB // 4, stream)
    driver.synchronize(stream)
    assert driver.read(memory, 2 * KIB) == b"\xab" * KIB + b"\4\3\2\1" * (KIB // 4)


def test_an_allocation_takes_free_memory(driver: Driver) -> None:
    before, total = driver.memory_info()
    taken = driver.allocate(64 * KIB * KIB)
    after, _ = driver.memory_info()
    driver.free(taken)
    assert after < before <= total


def test_events_measure_milliseconds(driver: Driver, stream: int, memory: int) -> None:
    start, end = driver.create_event(), driver.create_event()
    driver.record(start, stream)
    driver.fill(memory, 0, 64 * KIB, stream)
    driver.record(end, stream)
    driver.synchronize_event(end)
    assert 0 < driver.elapsed_ms(start, end) < 1000
    driver.destroy_event(start)
    driver.destroy_event(end)


def test_a_captured_graph_runs_when_launched_and_not_before(driver: Driver, stream: int, memory: int) -> None:
    driver.fill(memory, 0, KIB, stream)
    driver.synchronize(stream)
    driver.begin_capture(stream)
    assert driver.is_capturing(stream)
    assert driver.capture_id(stream) is not None
    driver.fill(memory, 7, KIB, stream)
    graph = driver.end_capture(stream)
    assert driver.read(memory, KIB) == bytes(KIB)
    executable = driver.instantiate(graph)
    driver.destroy_graph(graph)
    driver.launch_graph(executable, stream)
    driver.synchronize(stream)
    driver.destroy_executable(executable)
    assert driver.read(memory, KIB) == b"\7" * KIB


def test_two_captures_have_two_numbers(driver: Driver, stream: int) -> None:
    seen = []
    for _ in range(2):
        driver.begin_capture(stream)
        seen.append(driver.capture_id(stream))
        driver.destroy_graph(driver.end_capture(stream))
    assert seen[0] != seen[1]
    assert driver.capture_id(stream) is None


def test_the_default_stream_tells_of_a_capture_on_a_blocking_stream(driver: Driver) -> None:
    blocking = driver.create_stream(blocking=True)
    driver.begin_capture(blocking)
    told = driver.is_capturing(0)
    driver.destroy_graph(driver.end_capture(blocking))
    driver.destroy_stream(blocking)
    assert told


def test_a_workspace_starts_at_zero_and_is_not_made_in_a_capture(driver: Driver, stream: int) -> None:
    context = driver.primary_context(0)
    workspace = Workspace.allocate(driver, context, 64 * KIB, stream)
    driver.synchronize(stream)
    assert driver.read(workspace.address, 64 * KIB) == bytes(64 * KIB)
    workspace.close()
    driver.begin_capture(stream)
    with pytest.raises(WorkspaceError, match="captures"):
        Workspace.allocate(driver, context, KIB, stream)
    driver.destroy_graph(driver.end_capture(stream))


def test_memory_that_is_not_there_is_refused_with_its_cause(driver: Driver) -> None:
    with pytest.raises(DriverCallError, match=r"cuMemAlloc returned 2 CUDA_ERROR_OUT_OF_MEMORY .*exhausted") as caught:
        driver.allocate(1 << 50)
    assert not caught.value.sticky


def test_bytes_that_are_no_cubin_are_refused(driver: Driver) -> None:
    with pytest.raises(DriverCallError, match="cuModuleLoadData returned") as caught:
        driver.load_module(b"no cubin" * 100)
    assert caught.value.text != "unknown"


def test_an_ordinal_that_does_not_exist_is_refused(driver: Driver) -> None:
    with pytest.raises(DriverCallError, match=r"CUDA_ERROR_INVALID_DEVICE .*no such device ordinal"):
        driver.device(1000)


def test_a_forbidden_call_breaks_a_capture_with_a_clear_error(driver: Driver, stream: int) -> None:
    driver.begin_capture(stream)
    with pytest.raises(DriverCallError, match="returned 900 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        driver.synchronize(stream)
    with pytest.raises(DriverCallError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        driver.end_capture(stream)


@pytest.fixture
def hopper_image(driver: Driver) -> bytes:
    if driver.device(driver.context_device()).capability != (9, 0):
        pytest.skip("the fixture cubin is built for sm_90a")
    return (FIXTURES / "facts_sm_90a.cubin").read_bytes()


@pytest.mark.parametrize("symbol", ["block", "large", "empty", "stack"])
def test_the_driver_agrees_with_the_elf(driver: Driver, hopper_image: bytes, symbol: str) -> None:
    facts = parse_cubin(hopper_image).kernels[symbol]
    module = driver.load_module(hopper_image)
    function = driver.get_function(module, symbol)
    parameters = driver.parameters(function, len(facts.parameters))
    registers = driver.function_attribute(function, api.FUNC_REGISTERS)
    most_threads = driver.function_attribute(function, api.FUNC_MAX_THREADS)
    driver.unload_module(module)
    assert [size for _, size in parameters or ()] == [p.size for p in facts.parameters]
    assert registers == facts.registers
    assert most_threads == facts.max_threads or facts.max_threads is None


def test_a_symbol_that_is_not_there_is_refused(driver: Driver, hopper_image: bytes) -> None:
    module = driver.load_module(hopper_image)
    with pytest.raises(DriverCallError, match=r"CUDA_ERROR_NOT_FOUND .*no symbol of that name"):
        driver.get_function(module, "nope")
    driver.unload_module(module)


def test_a_cubin_for_another_architecture_is_refused_by_the_driver_too(driver: Driver, hopper_image: bytes) -> None:
    with pytest.raises(DriverCallError, match=r"CUDA_ERROR_NO_BINARY_FOR_GPU .*another architecture"):
        driver.load_module((FIXTURES / "facts_sm_100f.cubin").read_bytes())


def needs_of(size: int) -> LaunchNeeds:
    """What launching a struct of ``size`` bytes with 96 threads needs."""
    return LaunchNeeds(StructLayout.declare("S", [Field("a", f"int32[{size // 4}]")]), 96)


def test_the_gate_refuses_a_cubin_for_another_architecture(driver: Driver) -> None:
    image = (FIXTURES / "facts_sm_80.cubin").read_bytes()
    if driver.device(driver.context_device()).capability[0] == 8:
        pytest.skip("the fixture cubin runs here")
    with pytest.raises(AbiError, match="built for sm_80"):
        ModuleCache(driver).kernel(
            KernelRequest(driver.primary_context(0), "0" * 64, "block", lambda: image, needs_of(1280))
        )


def test_the_gate_refuses_a_kernel_with_other_parameters(driver: Driver, hopper_image: bytes) -> None:
    with pytest.raises(AbiError, match=r"takes 2 of \[1280, 8\] bytes"):
        ModuleCache(driver).kernel(
            KernelRequest(driver.primary_context(0), "0" * 64, "block", lambda: hopper_image, needs_of(1280))
        )


def test_a_load_during_a_capture_is_refused_and_leaves_the_capture_intact(
    driver: Driver, hopper_image: bytes, stream: int
) -> None:
    driver.begin_capture(stream)
    with pytest.raises(FrozenError, match=r"preload\(\)"):
        ModuleCache(driver).kernel(
            KernelRequest(driver.primary_context(0), "0" * 64, "block", lambda: hopper_image, needs_of(1280)),
            stream=stream,
        )
    graph = driver.end_capture(stream)
    driver.destroy_graph(graph)
    assert graph
