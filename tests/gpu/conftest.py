"""A runtime on the first device, with our kernels from a built tree; what is marked gpu skips without a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before numpy is there: the references of several workers share the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

import pytest

from cubin_runtime import Config, CubinRuntimeError
from cubin_runtime.attention.runtime import OWN_RELEASE, Runtime
from cubin_runtime.launch.driver import Driver

# Kernels that no device has run may hang it or take its context down: other tests do not share a run with them
# unasked.
FIRST_RUN = "CUBIN_RUNTIME_FIRST_RUN"
BUILT = Path(__file__).resolve().parents[2] / "build" / "artifacts"


def _missing_device() -> str:
    try:
        return "" if Driver().device_count() else "the driver sees no device"
    except CubinRuntimeError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    marked = [item for item in items if here in item.path.parents and item.get_closest_marker("gpu")]
    reason = _missing_device() if marked else ""
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {reason}"))
        elif item.get_closest_marker("first_run") and not os.environ.get(FIRST_RUN):
            item.add_marker(pytest.mark.skip(reason=f"of kernels built, not run: {FIRST_RUN}=1 runs it"))


@pytest.fixture(scope="session")
def runtime_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    sources = os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT))
    return Config(store=tmp_path_factory.mktemp("store"), sources=tuple(sources.split()), offline=True)


@pytest.fixture(scope="session")
def runtime(runtime_config: Config) -> Iterator[Runtime]:
    made = Runtime(runtime_config)
    made.library.fetch(made.library.pins.get(OWN_RELEASE))
    yield made
    made.modules.close()
