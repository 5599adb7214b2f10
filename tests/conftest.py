from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin_build import StandIn, build_standin


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an ordinary user can reach, which pytest's own are not; what is made in it is readable too."""
    place = Path(tempfile.mkdtemp(prefix="cubin-runtime-test-"))
    place.chmod(0o755)
    before = os.umask(0o022)
    yield place
    os.umask(before)
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def no_configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, for tests that must not read the pins of whoever runs them."""
    return tmp_path_factory.mktemp("no-configuration")


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda, compiled once."""
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def standin(standin_library: Path) -> Iterator[StandIn]:
    """The control panel of a stand-in that begins and ends without kernels, faults or a log."""
    control = StandIn(standin_library)
    control.reset()
    yield control
    control.reset()
