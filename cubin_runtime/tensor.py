"""Conversion of callers' tensors of any library into a pointer with a dtype, a shape and strides."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, NamedTuple, TypeVar

from .dtypes import ITEM_BYTES, is_dtype
from .errors import UsageError
from .protocols import CudaArray, DLPackTensor, DTypeName
from .provenance import ArgumentAddress, traced
from .values import dataclass

_CUDA_DEVICE = 2  # kDLCUDA
_DLPACK_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_DLPACK_E4M3FN = 10  # a code that says the width itself
_READ_ONLY, _COPIED = 1, 2  # flags of version 1
_ARRAY_KINDS = {"i": "int", "u": "uint", "f": "float", "b": "bool"}
_TO_PLAN = "; a plan with device_facts='H200', or of another GPU, takes it"
_INT = frozenset({int})
_BOOL = "bool8"  # the name of bool by its kind and width


class TensorSpec(NamedTuple):
    """The form of a tensor: all but its address. ``strides`` in elements, ``device`` the ordinal."""

    dtype: DTypeName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """Device memory as a tensor: ``strides`` in elements, ``device`` the ordinal. It keeps nothing alive.

    Raises:
        UsageError: the dtype is none of ``dtypes.ITEM_BYTES``, a number is no integer, a size is below 0, or shape and
            strides differ in length.
    """

    pointer: int
    dtype: DTypeName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0

    def __init__(
        self, pointer: int, dtype: DTypeName, shape: tuple[int, ...], strides: tuple[int, ...], device: int = 0
    ) -> None:
        if dtype not in ITEM_BYTES:
            raise UsageError(f"expected one of {', '.join(ITEM_BYTES)}", argument="dtype", value=repr(dtype))
        is_plain = type(shape) is tuple is type(strides) and _INT.issuperset(map(type, shape + strides))
        if not is_plain or not isinstance(pointer, int) or type(device) is not int:
            pointer, device = _integer("pointer", pointer), _integer("device", device)
            shape, strides = _integers("shape", shape), _integers("strides", strides)
        if len(shape) != len(strides):
            raise UsageError(f"shape={shape} with strides={strides}: expected equal lengths")
        if shape and min(shape) < 0:
            raise UsageError("expected no size below 0", argument="shape", value=shape)
        put = object.__setattr__
        put(self, "pointer", pointer)
        put(self, "dtype", dtype)
        put(self, "shape", shape)
        put(self, "strides", strides)
        put(self, "device", device)

    @classmethod
    def contiguous(cls, pointer: int, dtype: DTypeName, shape: tuple[int, ...], device: int = 0) -> TensorView:
        """A row-major tensor at ``pointer``; errors as those of the class."""
        if type(shape) is not tuple or not _INT.issuperset(map(type, shape)):
            shape = _integers("shape", shape)
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return cls(pointer, dtype, shape, strides, device)

    @property
    def spec(self) -> TensorSpec:
        """The dtype, shape and strides of the tensor."""
        return TensorSpec(self.dtype, self.shape, self.strides, self.device)

    @property
    def is_contiguous(self) -> bool:
        """Return whether it is row-major without gaps; what a dimension of size 1 has for a stride does not matter."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride != step and size > 1:
                return False
            step *= size
        return True


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        values = tuple(values)
    except Exception:  # whatever an object of another library raises
        raise UsageError(f"got {type(values).__name__}, expected a tuple of integers", argument=name) from None
    return tuple([_integer(name, value) for value in values])


def _integer(name: str, value: Any) -> int:
    try:
        return value if isinstance(value, int) else index(value)
    except Exception:  # as above
        raise UsageError(f"got {type(value).__name__}, expected an integer", argument=name) from None


Tensor = TensorView | DLPackTensor | CudaArray
"""A tensor on a device, of any library: torch, CuPy, JAX, cuda.core, whatever has ``__dlpack__`` or
``__cuda_array_interface__``, or a ``TensorView``."""
Scale = float | TensorView | DLPackTensor | CudaArray  # a number, or one on the device
# The types of an operator's output: the caller's tensor, or one of the library that the query is of.
QueryT = TypeVar("QueryT", bound=Tensor)
OutT = TypeVar("OutT", bound=Tensor)


def view_of(tensor: Tensor, name: str, *, written: bool = False) -> TensorView:
    """The view of a CUDA tensor: a ``TensorView``, a torch tensor, or anything that implements
    ``__cuda_array_interface__`` (version 2 or 3) or DLPack (version 1, or before versions).

    No stream is synchronised: the data must be ready on the stream that the kernel runs on. ``written``: a kernel
    writes the tensor, which must not be read-only then.

    Raises:
        UsageError: ``tensor`` is none of these, is not on a CUDA device, or is not what its memory holds (lazily
            negated, with a tangent, nested, sparse, masked, of foreign byte order); the message begins with ``name``.
    """
    if isinstance(tensor, TensorView):
        view = tensor
    elif is_torch(tensor):
        return _from_torch(tensor, name)
    elif hasattr(tensor, "__cuda_array_interface__"):
        view = _from_array_interface(tensor, name, written=written)
    elif hasattr(tensor, "__dlpack__"):
        view = _from_dlpack(tensor, name, written=written)
    else:
        raise UsageError(
            f"got {type(tensor).__name__}, expected a TensorView, a torch tensor or an object with "
            "__cuda_array_interface__ or __dlpack__",
            argument=name,
        )
    if not traced.call:
        return view
    address = _address_in(tensor, view.pointer)
    return view if address is view.pointer else TensorView(address, view.dtype, view.shape, view.strides, view.device)


def _address_in(tensor: Any, address: int) -> int:
    """The address of a tensor, which tells where it is from while a call is traced."""
    if not traced.call or (type(address) is ArgumentAddress and address.call == traced.call):
        return address
    traced_address = ArgumentAddress(address)
    traced_address.call, traced_address.tensor = traced.call, id(tensor)
    return traced_address


def is_torch(tensor: Any) -> bool:
    """Return whether ``tensor`` is torch's, or has the same interface."""
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "stride")


def check_needs_no_grad(tensor: Any, name: str) -> None:
    """Refuse a tensor of torch whose gradients are recorded.

    Raises:
        UsageError: it requires grad, and gradients are enabled.
    """
    if getattr(tensor, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
        raise UsageError(
            "requires grad, but no operator has a backward pass: call it under torch.no_grad()", argument=name
        )


def _from_torch(tensor: Any, name: str) -> TensorView:
    device = _torch_device(tensor, name)
    dtype = _torch_dtype(tensor.dtype)
    if not is_dtype(dtype):
        raise UsageError(f"dtype {dtype}, expected one of {', '.join(ITEM_BYTES)}", argument=name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        _check_of_torch(torch, tensor, name)
    check_needs_no_grad(tensor, name)
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise UsageError(f"a {type(tensor).__name__} without memory of its own ({error})", argument=name) from error
    return TensorView(_address_in(tensor, address), dtype, tuple(tensor.shape), tensor.stride(), device)


def _torch_device(tensor: Any, name: str) -> int:
    device = tensor.device
    if device.type != "cuda":
        planning = _TO_PLAN if device.type == "meta" else ""
        raise UsageError(f"is on {device}, expected a CUDA device{planning}", argument=name)
    return device.index or 0


def _check_of_torch(torch: Any, tensor: Any, name: str) -> None:
    """Check that the elements of a tensor are what its memory holds."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        planning = _TO_PLAN if kind == "FakeTensor" else ""
        raise UsageError(f"a {kind}, which need not have memory of its own: expected a Tensor{planning}", argument=name)
    if tensor.is_nested:
        raise UsageError("a nested tensor, expected one with a single shape", argument=name)
    if tensor.layout is not torch.strided:
        raise UsageError(f"layout {tensor.layout}, expected torch.strided", argument=name)
    if tensor.is_neg():
        raise UsageError("is negated lazily, its memory has the other sign: call resolve_neg() on it", argument=name)
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise UsageError(
            "has a forward-mode tangent, but no operator has a derivative: unpack its primal", argument=name
        )


def dtype_word(dtype: Any) -> str:
    """The word of a torch dtype, as in ``dtypes``; of anything else, its own."""
    return str(dtype).removeprefix("torch.")


_torch_dtype = lru_cache(maxsize=64)(dtype_word)


def _from_array_interface(tensor: Any, name: str, *, written: bool) -> TensorView:
    described = tensor.__cuda_array_interface__
    try:
        pointer, read_only = described["data"]
        typestr, shape, strides = described["typestr"], tuple(described["shape"]), described.get("strides")
        order, kind, size = typestr[0], typestr[1], int(typestr[2:])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"__cuda_array_interface__ {described!r}, expected data, shape, typestr", argument=name
        ) from error
    dtype = f"{_ARRAY_KINDS.get(kind, kind)}{size * 8}"
    if dtype == _BOOL:
        dtype = "bool"
    if not is_dtype(dtype) or (order != "<" and size > 1):
        raise UsageError(
            f"typestr {typestr!r}, expected one of {', '.join(ITEM_BYTES)} in little-endian order ('<')", argument=name
        )
    if described.get("mask") is not None:
        raise UsageError("a masked array, expected one without a mask", argument=name)
    _check_writable(name, read_only=bool(read_only), written=written)
    view = TensorView.contiguous(pointer or 0, dtype, shape, _device_of(tensor))
    if strides is None:
        return view
    if any(stride % size for stride in strides):
        raise UsageError(
            f"strides {tuple(strides)} in bytes, expected multiples of {size}, an element's size", argument=name
        )
    return TensorView(view.pointer, dtype, shape, tuple(stride // size for stride in strides), view.device)


def _check_writable(name: str, *, read_only: bool, written: bool) -> None:
    if read_only and written:
        raise UsageError("is read-only, expected memory that the kernel may write", argument=name)


def _device_of(tensor: Any) -> int:
    # The interface itself names no device; its speakers do so through DLPack.
    return int(tensor.__dlpack_device__()[1]) if hasattr(tensor, "__dlpack_device__") else 0


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, with which ``DLManagedTensor`` begins."""

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


class _DLVersioned(ctypes.Structure):
    """``DLManagedTensorVersioned`` of dlpack.h."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _from_dlpack(tensor: Any, name: str, *, written: bool) -> TensorView:
    kind, device = map(int, tensor.__dlpack_device__())
    if kind != _CUDA_DEVICE:
        raise UsageError(f"DLPack device type {kind}, expected {_CUDA_DEVICE} (CUDA)", argument=name)
    capsule = _capsule_of(tensor, name)  # which must live for as long as what it points to is read
    held, flags = _content_of(capsule, name)
    _check_writable(name, read_only=bool(flags & _READ_ONLY), written=written)
    if flags & _COPIED:
        raise UsageError("DLPack gave a copy, expected the tensor's own memory", argument=name)
    if (held.device_type, held.device_id) != (kind, device):
        raise UsageError(
            f"DLPack device {held.device_type, held.device_id}, but __dlpack_device__ gave {kind, device}",
            argument=name,
        )
    dtype = f"{_DLPACK_CODES.get(held.code, held.code)}{held.bits}"
    if (held.code, held.bits) == (_DLPACK_E4M3FN, 8):
        dtype = "float8_e4m3fn"
    if dtype == _BOOL:
        dtype = "bool"
    if not is_dtype(dtype) or held.lanes != 1:
        raise UsageError(f"DLPack type {dtype} x {held.lanes}, expected one of {', '.join(ITEM_BYTES)}", argument=name)
    shape = tuple(held.shape[i] for i in range(held.ndim))
    pointer = (held.data or 0) + held.byte_offset
    if not held.strides:
        return TensorView.contiguous(pointer, dtype, shape, device)
    return TensorView(pointer, dtype, shape, tuple(held.strides[i] for i in range(held.ndim)), device)


def _capsule_of(tensor: Any, name: str) -> Any:
    """The tensor's capsule, of DLPack's version 1 where it has that; it stays unconsumed, so its own destructor gives
    the memory back, and the caller keeps the tensor."""
    try:
        try:
            return tensor.__dlpack__(stream=-1, max_version=(1, 0))  # -1: no synchronisation
        except TypeError:  # from before versions, when a read-only tensor could not be exported
            return tensor.__dlpack__(stream=-1)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"a {type(tensor).__name__} that DLPack cannot export ({error})", argument=name) from error


def _content_of(capsule: Any, name: str) -> tuple[_DLTensor, int]:
    """The tensor that a capsule points to, and its flags."""
    if _is_capsule(capsule, b"dltensor"):
        return _DLTensor.from_address(_pointer_of(capsule, b"dltensor")), 0
    if not _is_capsule(capsule, b"dltensor_versioned"):
        raise UsageError(f"__dlpack__ gave {capsule!r}, expected a capsule that nobody has consumed", argument=name)
    managed = _DLVersioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
    if managed.major != 1:
        raise UsageError(f"DLPack version {managed.major}.{managed.minor}, expected 1", argument=name)
    return managed.tensor, managed.flags


# Objects of their own, since other packages set the argument types of those that ``ctypes.pythonapi`` keeps.
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
