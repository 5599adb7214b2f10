from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.streams import stream_handle


class Protocol:
    """A stream as cuda.core and CuPy offer it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __cuda_stream__(self) -> Any:
        return self._answer


class TorchLike:
    def __init__(self, handle: Any) -> None:
        self.cuda_stream = handle


class AttributeProtocol:
    __cuda_stream__ = (0, 0x42)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (0x5001, 0x5001),
        (Protocol((0, 0x42)), 0x42),
        (AttributeProtocol(), 0x42),
        (TorchLike(0x43), 0x43),
    ],
)
def test_reads(stream: Any, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize(
    "stream",
    [
        -1,
        1 << 64,
        Protocol((0, "handle")),
        Protocol((0, -1)),
        "0",
        1.0,
        object(),
        TorchLike(None),
        Protocol((1, 0x42)),
        Protocol(0x42),
        Protocol((0,)),
    ],
)
def test_refuses(stream: Any) -> None:
    with pytest.raises(UsageError, match="stream"):
        stream_handle(stream)


@pytest.mark.parametrize(("module", "name"), [("driver", "CUstream"), ("runtime", "cudaStream_t")])
@pytest.mark.parametrize(("given", "handle"), [(0x5005, 0x5005), (0, 0), (1, 0), (2, 2)])
def test_a_stream_of_cuda_bindings_is_read(module: str, name: str, given: int, handle: int) -> None:
    bindings = pytest.importorskip(f"cuda.bindings.{module}", reason="needs cuda-bindings")
    assert stream_handle(getattr(bindings, name)(given)) == handle


@pytest.mark.parametrize("name", ["CUevent", "CUcontext", "CUdeviceptr"])
def test_another_handle_of_cuda_bindings_is_no_stream(name: str) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    with pytest.raises(UsageError, match=f"stream: got {name}"):
        stream_handle(getattr(bindings, name)(5))


def test_a_python_without_its_lock_is_refused() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import cubin_runtime.launch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: cubin_runtime launches kernels" in done.stderr
