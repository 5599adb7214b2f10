"""A runtime on the stand-in driver, with native kernels and, as SM100, trtllm-gen ones, all without code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.launch import accelerator
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.both_releases import both_releases_in
from tests.attention.fast_path_calls import Caller, FullPaths, NotingMemory
from tests.golden.adapter import NATIVE, PUBLISHED

operator_function_module = sys.modules["cubin_runtime.attention.fast_path.operator_function"]
WALKERS = ("attention.fast_path.path", "attention.fast_path.operator_function")
SIZES = ((128, 128), (576, 512), (192, 128))


def is_used(row: Any) -> bool:
    sizes = (row["head_dim_qk"], row["head_dim_v"]) in SIZES and row["tokens_per_page"] in (0, 32, 64)
    return sizes and row["dtype_o"] == "bf16" and not row["skips_softmax"]


@pytest.fixture(params=["ctypes", "accelerator"])
def sending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What sends the launches of fast paths."""
    if request.param == "ctypes":
        for module in ("launch.senders", "attention.fast_path.guards", *WALKERS):
            monkeypatch.setattr(f"cubin_runtime.{module}.accelerator", lambda: None)
    elif accelerator.accelerator() is None:
        pytest.skip("cubin_runtime_accelerator is not installed: pip install ./accelerator")
    return str(request.param)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return both_releases_in(tmp_path_factory.mktemp("releases"), is_used)


@pytest.fixture
def capability() -> tuple[int, int]:
    return 9, 0


@pytest.fixture
def memory() -> NotingMemory:
    return NotingMemory()


@pytest.fixture
def runtime(
    config: Config,
    standin: StandIn,
    memory: NotingMemory,
    sending: str,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runtime]:
    standin.pose_as(*capability)
    standin.with_devices(2)
    standin.write_whole_descriptors()
    standin.accept_kernels(KERNEL_PARAMS.size)
    made = Runtime(config, driver=GraphDriver(standin.path), release=NATIVE, trtllm_release=PUBLISHED, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.driver.set_current(made.driver.primary_context(0))
        yield made
    made.driver.set_current(None)


@pytest.fixture
def caller(runtime: Runtime, standin: StandIn, memory: NotingMemory) -> Caller:
    return Caller(runtime, standin, memory)


@pytest.fixture
def full_paths(monkeypatch: pytest.MonkeyPatch) -> FullPaths:
    counted, original = FullPaths(), operator_function_module.Notes

    def notes() -> Any:
        counted.count += 1
        return original()

    monkeypatch.setattr(operator_function_module, "Notes", notes)
    return counted
