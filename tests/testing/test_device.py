"""Arrays and times of a device: what is freed, what is measured, and what the stand-in's kernels accept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.driver_api import FUNC_MAX_THREADS
from cubin_runtime.testing import CubinUnderTest, Device, StandIn, StandInDevice


def test_a_closed_device_has_freed_each_array_once(cubin_standin: StandIn) -> None:
    driver = Driver(cubin_standin.path)
    with Device(driver, computes=False) as device:
        addresses = {device.array([1.0], "float32").pointer, device.poisoned((2, 3), "bfloat16").pointer}
    device.close()
    freed = [int(call.seen["address"], 16) for call in cubin_standin.calls("cuMemFree")]
    assert sorted(freed) == sorted(addresses)


def test_a_device_that_is_closed_behind_a_fault_restores_the_context(cubin_standin: StandIn) -> None:
    driver = Driver(cubin_standin.path)
    device = Device(driver, computes=False)
    device.array([1.0], "float32")
    cubin_standin.fault(700)
    with pytest.raises(DriverCallError, match="a fault of earlier asynchronous work"):
        device.close()
    assert driver.current_context() is None


@pytest.mark.parametrize(("times", "median"), [([5e-3, 1e-3, 3e-3], 3.0), ([4e-3, 2e-3], 4.0), ([7e-3], 7.0)])
def test_the_median_of_times_is_in_microseconds(
    cubin_standin_device: StandInDevice, monkeypatch: pytest.MonkeyPatch, times: list[float], median: float
) -> None:
    left = iter(times)
    monkeypatch.setattr(type(cubin_standin_device.driver), "elapsed_ms", lambda *_: next(left))
    runs = list[int]()
    measured = cubin_standin_device.median_microseconds(lambda: runs.append(1), repeats=len(times))
    assert (measured, len(runs)) == (pytest.approx(median), len(times))


@pytest.mark.parametrize(("limit", "threads"), [(256, 256), (None, 1024)])
def test_the_stand_in_launches_as_many_threads_as_a_cubin_allows(
    cubin_standin: StandIn, limit: int | None, threads: int
) -> None:
    facts = SimpleNamespace(parameters=(SimpleNamespace(size=8),), max_threads=limit)
    cubin_standin.add_cubin(cast("CubinUnderTest", SimpleNamespace(symbol="limited", facts=facts)))
    driver = Driver(cubin_standin.path)
    driver.set_current(driver.primary_context(0))
    function = driver.get_function(driver.load_module(b"any"), "limited")
    assert driver.function_attribute(function, FUNC_MAX_THREADS) == threads
    driver.set_current(None)
