"""A runtime on the stand-in driver with freshly built kernels, and tensors made of made-up addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import RELEASE_NAME, build_release, describe_release
from tests.attention.latent_examples import E4M3_KERNELS
from tests.attention.stub_release import build_stub_release
from tests.kernels.context_examples import KERNELS as CONTEXT_KERNELS
from tests.kernels.decode_kernels import HOPPER
from tests.kernels.mla_examples import KERNELS as MLA_KERNELS
from tests.kernels.mla_examples import OTHER_COLUMNS as OTHER_MLA_KERNELS
from tests.kernels.mla_examples import PORTABLE as PORTABLE_MLA_KERNELS
from tests.kernels.mla_examples import SEPARATE as SEPARATE_MLA_KERNEL


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree with the sm_90a kernels, and the pin file that trusts it."""
    return build_release(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def described(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree that says to have sm_90a kernels for all dtypes and head dimensions, and its pin file."""
    return describe_release(
        tmp_path_factory.mktemp("described"),
        (
            *HOPPER,
            *MLA_KERNELS,
            *OTHER_MLA_KERNELS,
            SEPARATE_MLA_KERNEL,
            *PORTABLE_MLA_KERNELS,
            *E4M3_KERNELS,
            *CONTEXT_KERNELS,
        ),
    )


@pytest.fixture
def planner(described: tuple[Path, Path], tmp_path: Path) -> Runtime:
    """A runtime that plans with all kernels for a described device and has no driver."""
    tree, pins = described
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    return Runtime(config, driver=Driver("/nonexistent/libcuda.so.1"), release=RELEASE_NAME)


@pytest.fixture
def config(release: tuple[Path, Path], tmp_path: Path) -> Config:
    tree, pins = release
    return Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)


@pytest.fixture
def runtime(config: Config, standin: StandIn) -> Iterator[Runtime]:
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree with kernels that do nothing, MLA among them, and its pin file."""
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def stub_runtime(stubs: tuple[Path, Path], standin: StandIn, tmp_path: Path) -> Iterator[Runtime]:
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)
