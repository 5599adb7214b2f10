from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_build import StandIn, build_standin

from cubin_runtime.launch.driver import Driver


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def standin(standin_library: Path) -> Iterator[StandIn]:
    control = StandIn(standin_library)
    control.reset()
    yield control
    control.reset()


@pytest.fixture
def driver(standin: StandIn) -> Driver:
    return Driver(standin.path)


@pytest.fixture
def context(driver: Driver) -> Iterator[int]:
    handle = driver.ensure_context()
    yield handle
    driver.set_current(None)
