"""Types of what operators accept besides numbers: tensors of any library, streams, and values of options."""

from __future__ import annotations

from typing import Any, Literal, Protocol

LseBase = Literal["2", "e"]
KvLayout = Literal["NHD", "HND"]
DraftPosition = Literal["depth", "index"]
DTypeName = Literal[
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float32",
    "float64",
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
]
DecodeBackend = Literal["auto", "native", "hopper"]  # hopper: the former name of native
TrtllmGenBackend = Literal["auto", "trtllm-gen"]
CompatBackend = Literal["auto", "xqa", "trtllm-gen"]
CompatContextBackend = Literal["auto", "native", "trtllm-gen", "hopper"]


class DLPackTensor(Protocol):
    """A tensor that implements DLPack, like those of torch, CuPy and JAX."""

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        """The capsule of its memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """The type and the number of its device."""


class CudaArray(Protocol):
    """A tensor that implements ``__cuda_array_interface__``, version 2 or 3, like those of CuPy and Numba."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """The address, shape, strides and element type."""


class CudaStream(Protocol):
    """A stream with ``__cuda_stream__``, version 0, as in cuda.core; a method or an attribute."""

    @property
    def __cuda_stream__(self) -> Any:
        """``(0, handle)``."""


class TorchStream(Protocol):
    """A stream like torch's."""

    @property
    def cuda_stream(self) -> int:
        """The handle."""


class BindingsStream(Protocol):
    """A stream handle of cuda.bindings, ``CUstream`` or ``cudaStream_t``."""

    def __int__(self) -> int:
        """The handle."""

    def getPtr(self) -> int:
        """The address where the handle lies, by which it differs from a number."""


class BindingsDevice(Protocol):
    """A ``CUdevice`` of cuda.bindings."""

    def __int__(self) -> int:
        """The ordinal."""


class TorchDevice(Protocol):
    """A device like torch's, of the type ``cuda``."""

    @property
    def type(self) -> str:
        """The kind of the device."""

    @property
    def index(self) -> int | None:
        """The ordinal; None: the first."""


class CudaCoreDevice(Protocol):
    """A ``Device`` of cuda.core."""

    @property
    def device_id(self) -> int:
        """The ordinal."""


Device = int | TorchDevice | CudaCoreDevice | BindingsDevice
Stream = int | CudaStream | TorchStream | BindingsStream
"""A stream of any library: torch, cuda.core (``__cuda_stream__``), cuda.bindings, or its handle as a number; 0 is the
default stream."""
