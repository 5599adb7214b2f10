"""A runtime on the stand-in driver with freshly built kernels, and tensors made of made-up addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_examples import RELEASE_NAME, build_release
from standin_build import StandIn

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.launch.driver import Driver


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree with the sm_90a kernels, and the pin file that trusts it."""
    return build_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def config(release: tuple[Path, Path], tmp_path: Path) -> Config:
    tree, pins = release
    return Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)


@pytest.fixture
def runtime(config: Config, standin: StandIn) -> Iterator[Runtime]:
    made = Runtime(config, driver=Driver(standin.path), release=RELEASE_NAME)
    for kernel in made.own_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    yield made
    made.driver.set_current(None)
