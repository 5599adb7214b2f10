from __future__ import annotations

from collections.abc import Iterator

import pytest
from extended_driver import ExtendedDriver
from standin_build import StandIn

from cubin_runtime.launch.driver import Driver


@pytest.fixture
def driver(standin: StandIn) -> Driver:
    return ExtendedDriver(standin.path)


@pytest.fixture
def context(driver: Driver) -> Iterator[int]:
    handle = driver.primary_context(0)
    driver.set_current(handle)
    yield handle
    driver.set_current(None)
