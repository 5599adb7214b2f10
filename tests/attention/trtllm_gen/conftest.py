"""The operators on a recording driver that poses as SM100 and SM103, with releases of cubins without code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.both_releases import both_releases_in
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.trtllm_operators import Spy
from tests.golden.adapter import NATIVE, PUBLISHED

HEAD_DIMS = ((128, 128), (512, 512), (576, 512), (320, 256), (192, 128))
PAGES = (0, 1, 32, 64, 128)


def is_used(row: Mapping[str, Any]) -> bool:
    """Whether a published kernel has the sizes and types of the calls here; there are eight times as many."""
    sizes = (row["head_dim_qk"], row["head_dim_v"]) in HEAD_DIMS and row["tokens_per_page"] in PAGES
    return sizes and row["dtype_o"] != "fp16" and not row["skips_softmax"]


@pytest.fixture(scope="session")
def both_releases(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Native kernels and published ones by their traits, in one store, which keeps the metadata's index."""
    return both_releases_in(tmp_path_factory.mktemp("releases"), is_used)


@pytest.fixture(params=[(10, 0), (10, 3)], ids=["sm100", "sm103"])
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def standin(standin: StandIn, capability: tuple[int, int]) -> StandIn:
    standin.pose_as(*capability)
    standin.accept_kernels(KERNEL_PARAMS.size)
    return standin


@pytest.fixture
def memory() -> MadeUpMemory:
    return MadeUpMemory()


@pytest.fixture
def runtime(
    both_releases: Config, standin: StandIn, memory: MadeUpMemory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    driver = GraphDriver(standin.path)
    made = Runtime(both_releases, driver=driver, release=NATIVE, trtllm_release=PUBLISHED, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "trtllm_gen_.* was built for SM")
        driver.set_current(driver.primary_context(0))
        yield made
    driver.set_current(None)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)
