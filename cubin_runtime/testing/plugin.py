"""Fixtures and a marker for pytest, which finds them by the entry point ``cubin_runtime``.

A project that uses none of them pays for one light import: only the fixtures import numpy, the driver and the
artifacts. All names begin with ``cubin_``, so that they do not hide a project's own.

- ``cubin_device``: a ``Device`` on the first GPU; the test is skipped, with the reason, where there is none.
- ``cubin_standin``: the controls of a driver without a GPU, whose kernels do nothing and whose calls are recorded;
  ``cubin_standin.pose_as(10, 0)`` makes it another SM. Needs a C compiler and cuda.h of CUDA 13.
- ``cubin_standin_device``: a ``StandInDevice``, which takes any cubin and returns what was launched.
- ``cubin_runtime_at``: makes a ``Runtime`` on a temporary store and the sources that it is given.
- ``cubin_under_test``: the ``CubinUnderTest`` of the test's marker ``cubin(path, struct, symbol=None)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..attention import Runtime
    from ..launch.driver import Driver
    from ..launch.structs import StructLayout
    from .cubin_under_test import CubinUnderTest
    from .device import Device
    from .standin import StandIn
    from .standin_device import StandInDevice


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "cubin(path, struct, symbol=None): the kernel that the fixture cubin_under_test gives"
    )


@pytest.fixture(scope="session")
def cubin_numpy() -> None:
    """Fail with the command that installs numpy, which devices need."""
    if find_spec("numpy") is None:
        pytest.fail("cubin_runtime.testing needs numpy: pip install 'cubin-runtime[testing]'", pytrace=False)


@pytest.fixture
def cubin_device(cubin_numpy: None) -> Iterator[Device]:
    """The first GPU; afterwards the guard after each array is checked, and all arrays are freed."""
    from .device import Device, missing_device
    from .graph_driver import GraphDriver

    driver = GraphDriver()
    if reason := missing_device(driver):
        pytest.skip(reason)
    with Device(driver) as device:
        yield device
        device.assert_guards()


@pytest.fixture(scope="session")
def cubin_standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda, compiled once per session."""
    from .standin import build_standin

    try:
        return build_standin(tmp_path_factory.mktemp("standin"))
    except FileNotFoundError as error:
        pytest.skip(f"needs the stand-in driver: {error}")


@pytest.fixture
def cubin_standin(cubin_standin_library: Path) -> Iterator[StandIn]:
    """The controls of the stand-in, which is reset before and after each test."""
    from .standin import StandIn

    control = StandIn(cubin_standin_library)
    control.reset()
    yield control
    control.reset()


@pytest.fixture
def cubin_standin_device(cubin_numpy: None, cubin_standin: StandIn) -> Iterator[StandInDevice]:
    """A device of the stand-in: arrays are memory of the host, launches are recorded, kernels do nothing."""
    from .standin_device import StandInDevice

    with StandInDevice(cubin_standin) as device:
        yield device


@pytest.fixture
def cubin_runtime_at(tmp_path: Path) -> Callable[..., Runtime]:
    """Make a runtime on a temporary store, which never uses the network.

    ``cubin_runtime_at(*sources, pins=(), driver=None, **options)``: folders, wheels or stores; pin files that trust
    them; the driver of a device; further arguments of ``Runtime``.
    """

    def make(
        *sources: str | Path, pins: tuple[Path, ...] = (), driver: Driver | None = None, **options: Any
    ) -> Runtime:
        from ..attention import Runtime
        from ..config import Config

        places = tuple(map(str, sources)) or None
        config = Config(store=tmp_path / "store", sources=places, pin_files=tuple(pins), offline=True)
        return Runtime(config, driver=driver, **options)

    return make


@pytest.fixture
def cubin_under_test(request: pytest.FixtureRequest) -> CubinUnderTest:
    """The kernel of the marker ``cubin``; a relative path starts at the test's own folder."""
    from .cubin_under_test import CubinUnderTest

    marker = request.node.get_closest_marker("cubin")
    if marker is None:
        pytest.fail("cubin_under_test: mark the test with @pytest.mark.cubin(path, struct)")

    def cubin(path: str | Path, struct: StructLayout, symbol: str | None = None) -> CubinUnderTest:
        return CubinUnderTest(request.path.parent / path, struct, symbol)

    return cubin(*marker.args, **marker.kwargs)
