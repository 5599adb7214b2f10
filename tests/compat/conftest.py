"""The operators under FlashInfer's names on a recording driver: as SM100 without any release, as SM90 with stubs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import RELEASE_NAME
from tests.attention.stub_release import build_stub_release
from tests.attention.trtllm_calls import MadeUpMemory


@pytest.fixture
def standin(standin: StandIn) -> StandIn:
    standin.pose_as(10, 0)
    return standin


@pytest.fixture
def memory() -> MadeUpMemory:
    return MadeUpMemory()


@pytest.fixture
def runtime(
    standin: StandIn, memory: MadeUpMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    config = Config(store=tmp_path / "store", sources=(), offline=True)
    made = Runtime(config, driver=GraphDriver(standin.path), memory=memory)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def hopper(
    stubs: tuple[Path, Path],
    standin: StandIn,
    memory: MadeUpMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runtime]:
    """A runtime on SM90 that launches stubs of our decode kernels."""
    standin.pose_as(9, 0)
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)
