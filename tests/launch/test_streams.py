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


class CUstream:
    """A stream as cuda.bindings has it: no protocol, but a handle as int()."""

    def __int__(self) -> int:
        return 0x5005


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
    "stream", [-1, "0", 1.0, object(), TorchLike(None), Protocol((1, 0x42)), Protocol(0x42), Protocol((0,))]
)
def test_refuses(stream: Any) -> None:
    with pytest.raises(UsageError, match="stream"):
        stream_handle(stream)


def test_a_stream_of_the_bindings_is_read() -> None:
    assert stream_handle(CUstream()) == 0x5005


def test_a_python_without_its_lock_is_refused() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import cubin_runtime.launch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: cubin_runtime launches kernels" in done.stderr
