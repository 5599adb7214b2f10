"""torch tensors of the host, which a runtime on the stand-in driver takes for tensors of device 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime import tensor as tensors_module
from cubin_runtime.attention.memory import TorchMemory


class _OnDevice:
    """A tensor of the host that says to be on device 0."""

    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def memory_of_host_tensors(monkeypatch: pytest.MonkeyPatch) -> TorchMemory:
    """The memory of a runtime for whose calls host tensors are on device 0, from now on."""
    import torch

    original = tensors_module._from_torch
    monkeypatch.setattr(tensors_module, "_from_torch", lambda tensor, name: original(_OnDevice(tensor), name))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    memory = TorchMemory()
    monkeypatch.setattr(memory, "stream_query", lambda: lambda device: 0)
    monkeypatch.setattr(memory, "current_stream", lambda like: 0)
    return memory
