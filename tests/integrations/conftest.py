"""A runtime on the stand-in driver for torch tensors of the host, which it takes for tensors of device 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attention_examples import RELEASE_NAME
from stub_release import build_stub_release

from cubin_runtime import Config
from cubin_runtime import tensor as tensors_module
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.memory import TorchMemory
from cubin_runtime.testing import GraphDriver, StandIn


class OnDevice:
    """A tensor of the host that says to be on device 0."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_stub_release(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def hopper(
    stubs: tuple[Path, Path], standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    """The process's default, on SM90, with kernels without code."""
    import torch

    standin.pose_as(9, 0)
    tree, pins = stubs
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    memory = TorchMemory()
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    original = tensors_module._from_torch
    monkeypatch.setattr(tensors_module, "_from_torch", lambda tensor, name: original(OnDevice(tensor), name))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(memory, "stream_query", lambda: lambda device: 0)
    monkeypatch.setattr(memory, "current_stream", lambda like: 0)
    monkeypatch.setattr("cubin_runtime.attention.process.default.runtime", made)
    made.driver.set_current(made.driver.primary_context(0))
    yield made
    made.driver.set_current(None)
