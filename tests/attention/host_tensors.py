"""torch tensors of the host, which a runtime on the stand-in driver takes for tensors of device 0."""

from __future__ import annotations

import pytest

from cubin_runtime import tensor as tensors_module
from cubin_runtime.attention.torch_memory import TorchMemory


def memory_of_host_tensors(monkeypatch: pytest.MonkeyPatch) -> TorchMemory:
    """The memory of a runtime for whose calls host tensors are on device 0, from now on."""
    import torch

    monkeypatch.setattr(tensors_module, "_torch_device", lambda tensor, name: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    memory = TorchMemory()
    monkeypatch.setattr(memory, "stream_query", lambda device: 0, raising=False)  # where torch has no GPU
    monkeypatch.setattr(memory, "current_stream", lambda like: 0)
    return memory
