from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing import GraphDriver, StandIn


@pytest.fixture
def driver(standin: StandIn) -> Driver:
    return GraphDriver(standin.path)


@pytest.fixture
def context(driver: Driver) -> Iterator[int]:
    handle = driver.primary_context(0)
    driver.set_current(handle)
    yield handle
    driver.set_current(None)
