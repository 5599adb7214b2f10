"""The operators over torch tensors on a real device that has no trtllm-gen kernels, and what torch makes for them."""

from __future__ import annotations

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention.backends import BackendError
from cubin_runtime.attention.torch_memory import TorchMemory
from cubin_runtime.compat import flashinfer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def elsewhere(runtime: Runtime) -> None:
    if runtime.driver.device(0).capability[0] == 10:
        pytest.skip("trtllm-gen kernels run on this device")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")


def test_torch_tensors_reach_the_refusal_of_the_device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    with pytest.raises(BackendError, match=r"trtllm-gen: published for 10\.0, 10\.3"):
        flashinfer.trtllm_batch_decode_with_kv_cache(
            torch.zeros(4, 32, 128, dtype=torch.bfloat16, device="cuda"),
            torch.zeros(64, 2, 4, 32, 128, dtype=torch.bfloat16, device="cuda"),
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda"),
            torch.zeros(4, 16, dtype=torch.int32, device="cuda"),
            torch.ones(4, dtype=torch.int32, device="cuda"),
            512,
            backend="trtllm-gen",
            bmm1_scale=torch.tensor([0.1], device="cuda"),
        )


def test_what_torch_makes_is_on_the_device_of_its_model() -> None:
    memory, model = TorchMemory(), torch.ones(2, dtype=torch.bfloat16, device="cuda")
    made = memory.empty(model, (3, 4), None), memory.zeros(model, (8,), "int32"), memory.scaled(model, 0.5)
    assert [tensor.device for tensor in made] == [model.device] * 3
    assert made[1].tolist() == [0] * 8
    assert made[2].tolist() == [0.5, 0.5]


def test_integers_come_back_from_the_device() -> None:
    assert TorchMemory().to_host(torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")) == (0, 3, 7)


def test_the_current_stream_is_torch_s() -> None:
    model, stream = torch.ones(1, device="cuda"), torch.cuda.Stream()
    assert TorchMemory().current_stream(model) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.stream(stream):
        assert TorchMemory().current_stream(model) == stream.cuda_stream
