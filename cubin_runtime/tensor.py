"""Conversion of callers' tensors of any library into a pointer with a dtype, a shape and strides."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

from .dtypes import ITEM_BYTES, is_dtype
from .errors import UsageError
from .protocols import CudaArray, DLPackTensor, DTypeName
from .values import dataclass

_CUDA_DEVICE = 2  # kDLCUDA
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_DLPACK_E4M3FN = 10  # a code that says the width itself
_ARRAY_KINDS = {"i": "int", "u": "uint", "f": "float", "b": "bool"}
_BOOL = "bool8"  # what a kind with its width makes of bool


class TensorSpec(NamedTuple):
    """The form of a tensor: all but its address. ``strides`` in elements, ``device`` the ordinal."""

    dtype: DTypeName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """Device memory as a tensor: ``strides`` in elements, ``device`` the ordinal. It keeps nothing alive."""

    pointer: int
    dtype: DTypeName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0

    def __post_init__(self) -> None:
        if not is_dtype(self.dtype):
            raise UsageError(f"dtype={self.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
        if len(self.shape) != len(self.strides):
            raise UsageError(f"shape={self.shape} with strides={self.strides}: expected equal lengths")

    @classmethod
    def contiguous(cls, pointer: int, dtype: DTypeName, shape: tuple[int, ...], device: int = 0) -> TensorView:
        """A row-major tensor at ``pointer``."""
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(pointer, dtype, shape, strides, device)

    @property
    def spec(self) -> TensorSpec:
        """Its form."""
        return TensorSpec(self.dtype, self.shape, self.strides, self.device)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major without gaps; what a dimension of size 1 has for a stride does not matter."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride != step and size > 1:
                return False
            step *= size
        return True


Tensor = TensorView | DLPackTensor | CudaArray
Scale = float | TensorView | DLPackTensor | CudaArray  # a number, or one on the device
# What an operator returns: the caller's output, or one of the library that the query is of.
QueryT = TypeVar("QueryT", bound=Tensor)
OutT = TypeVar("OutT", bound=Tensor)


def view_of(tensor: Tensor, name: str) -> TensorView:
    """The view of a CUDA tensor: a ``TensorView``, a torch tensor, or anything that implements
    ``__cuda_array_interface__`` (version 2 or 3) or DLPack.

    No stream is synchronised: the data must be ready on the stream that the kernel runs on.

    Raises:
        UsageError: ``tensor`` is none of these or is not on a CUDA device; the message begins with ``name``.
    """
    if isinstance(tensor, TensorView):
        return tensor
    if is_torch(tensor):
        return _from_torch(tensor, name)
    if hasattr(tensor, "__cuda_array_interface__"):
        return _from_array_interface(tensor, name)
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(tensor, name)
    raise UsageError(
        f"{name}: got {type(tensor).__name__}, expected a TensorView, a torch tensor or an object with "
        "__cuda_array_interface__ or __dlpack__"
    )


def is_torch(tensor: Any) -> bool:
    """Whether ``tensor`` is torch's, or has the same interface."""
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "stride")


def _from_torch(tensor: Any, name: str) -> TensorView:
    device = tensor.device
    if device.type != "cuda":
        raise UsageError(f"{name}: is on {device}, expected a CUDA device")
    dtype = _torch_dtype(tensor.dtype)
    if not is_dtype(dtype):
        raise UsageError(f"{name}: dtype {dtype}, expected one of {', '.join(ITEM_BYTES)}")
    if getattr(tensor, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise UsageError(f"{name}: requires grad, but no operator has a backward pass: call it under torch.no_grad()")
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise UsageError(f"{name}: a {type(tensor).__name__} without memory of its own ({error})") from error
    return TensorView(address, dtype, tuple(tensor.shape), tensor.stride(), device.index or 0)


@lru_cache(maxsize=64)
def _torch_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _from_array_interface(tensor: Any, name: str) -> TensorView:
    described = tensor.__cuda_array_interface__
    kind, size = described["typestr"][1], int(described["typestr"][2:])
    dtype = f"{_ARRAY_KINDS.get(kind, kind)}{size * 8}"
    if dtype == _BOOL:
        dtype = "bool"
    if not is_dtype(dtype):
        raise UsageError(f"{name}: typestr {described['typestr']!r}, expected one of {', '.join(ITEM_BYTES)}")
    shape = tuple(described["shape"])
    view = TensorView.contiguous(described["data"][0], dtype, shape, _device_of(tensor))
    strides = described.get("strides")
    if strides is None:
        return view
    return TensorView(view.pointer, dtype, shape, tuple(s // size for s in strides), view.device)


def _device_of(tensor: Any) -> int:
    # The interface itself names no device; its speakers do so through DLPack.
    return int(tensor.__dlpack_device__()[1]) if hasattr(tensor, "__dlpack_device__") else 0


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, whose managed form begins with it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _from_dlpack(tensor: Any, name: str) -> TensorView:
    kind, device = tensor.__dlpack_device__()
    if int(kind) != _CUDA_DEVICE:
        raise UsageError(f"{name}: DLPack device type {int(kind)}, expected {_CUDA_DEVICE} (CUDA)")
    capsule = tensor.__dlpack__(stream=-1)  # -1: no synchronisation
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # The capsule stays unconsumed, so its own destructor gives the memory back; the caller keeps the tensor.
    managed = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    dtype = f"{_DLPACK_CODES.get(managed.code, managed.code)}{managed.bits}"
    if (managed.code, managed.bits) == (_DLPACK_E4M3FN, 8):
        dtype = "float8_e4m3fn"
    if dtype == _BOOL:
        dtype = "bool"
    if not is_dtype(dtype) or managed.lanes != 1:
        raise UsageError(f"{name}: DLPack type {dtype} x {managed.lanes}, expected one of {', '.join(ITEM_BYTES)}")
    shape = tuple(managed.shape[i] for i in range(managed.ndim))
    pointer = (managed.data or 0) + managed.byte_offset
    if not managed.strides:
        return TensorView.contiguous(pointer, dtype, shape, int(device))
    return TensorView(pointer, dtype, shape, tuple(managed.strides[i] for i in range(managed.ndim)), int(device))
