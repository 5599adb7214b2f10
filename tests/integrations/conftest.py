"""A runtime on the stand-in driver for torch tensors of the host, which it takes for tensors of device 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import RELEASE_NAME
from tests.attention.host_tensors import memory_of_host_tensors
from tests.attention.stub_release import build_stub_release


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def hopper(
    stubs: tuple[Path, Path], standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    """The process's default, on SM90, with kernels without code."""
    standin.pose_as(9, 0)
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    memory = memory_of_host_tensors(monkeypatch)
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)
