"""A runtime on the first device, with our kernels from a built tree; what is marked gpu skips without a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before numpy is there: the references of several workers share the cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

import numpy as np
import pytest

from cubin_runtime import Config
from cubin_runtime.attention.backends import NATIVE, TABLE
from cubin_runtime.attention.runtime import NATIVE_RELEASE, Runtime
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing import GraphDriver, missing_device

BUILT = Path(__file__).resolve().parents[2] / "build" / "artifacts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    marked = [item for item in items if here in item.path.parents and item.get_closest_marker("gpu")]
    if not marked:
        return
    reason = missing_device(Driver())
    alone = not reason and Driver().device_count() < 2
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif alone and item.get_closest_marker("multi_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices, there is one"))


@pytest.fixture(scope="session")
def runtime_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    sources = os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT))
    return Config(store=tmp_path_factory.mktemp("store"), sources=tuple(sources.split()), offline=True)


@pytest.fixture(scope="session")
def runtime(runtime_config: Config) -> Iterator[Runtime]:
    made = Runtime(runtime_config, driver=GraphDriver())
    made.library.fetch(made.library.pins.get(NATIVE_RELEASE))
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.modules.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """From the ``SEED`` of the test's module, which is shown with a failure; from 1 where it has none."""
    seed = getattr(request.module, "SEED", 1)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def mla_backend(runtime: Runtime) -> None:
    """Skip on a device that our MLA kernels are not for."""
    support = TABLE["mla_decode"][NATIVE]
    if runtime.driver.device(0).capability not in support.automatic:
        pytest.skip(f"our MLA kernels: {support}")


@pytest.fixture
def context_backend(runtime: Runtime) -> None:
    """Skip on a device that our context attention kernels are not for."""
    support = TABLE["context_attention"][NATIVE]
    if runtime.driver.device(0).capability not in support.automatic:
        pytest.skip(f"our context attention kernels: {support}")
