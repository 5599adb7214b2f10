from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.tensor import TensorView, _DLTensor, _DLVersioned, view_of

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class DLPackArray:
    """Speaks DLPack for made-up device memory: bf16 ``[2, 3]`` on device 1, offset by 4 bytes."""

    def __init__(
        self, strides: tuple[int, int] | None = None, code: int = 4, device_type: int = 2, bits: int = 16
    ) -> None:
        self.device_type = device_type
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.strides = (ctypes.c_int64 * 2)(*strides) if strides else None
        self.tensor = _DLTensor(0x1000, device_type, 1, 2, code, bits, 1, self.shape, self.strides, 4)
        self.asked: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 1

    def __dlpack__(self, stream: Any = None) -> Any:
        self.asked = stream
        return _new_capsule(ctypes.addressof(self.tensor), b"dltensor", None)


class VersionedArray(DLPackArray):
    """The same of DLPack's version 1, with ``flags``."""

    def __init__(self, flags: int = 0, major: int = 1, **changes: Any) -> None:
        super().__init__(**changes)
        self.managed = _DLVersioned(major, 0, None, None, flags, self.tensor)

    def __dlpack__(self, stream: Any = None, max_version: Any = None) -> Any:
        self.asked = stream, max_version
        return _new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)


class TorchLike:
    """What ``view_of`` asks of a torch tensor."""

    dtype = "torch.bfloat16"
    shape = (2, 3)

    def __init__(self, device: str = "cuda", index: int | None = 1) -> None:
        self.device = SimpleNamespace(type=device, index=index)

    def data_ptr(self) -> int:
        return 0x2000

    def stride(self) -> tuple[int, int]:
        return (3, 1)


def array_interface(**changes: Any) -> SimpleNamespace:
    described = {"shape": (2, 3), "typestr": "<f4", "data": (0x3000, False), "version": 3, **changes}
    return SimpleNamespace(__cuda_array_interface__=described)


def test_a_view_is_itself() -> None:
    view = TensorView.contiguous(0x1000, "int32", (4,))
    assert view_of(view, "q") is view


def test_contiguous_strides_are_row_major() -> None:
    assert TensorView.contiguous(0, "int32", (2, 3, 4)).strides == (12, 4, 1)


def test_a_torch_tensor() -> None:
    assert view_of(TorchLike(), "q") == TensorView(0x2000, "bfloat16", (2, 3), (3, 1), 1)


def test_a_torch_tensor_on_the_host_is_refused() -> None:
    with pytest.raises(UsageError, match=r"q: is on .*cpu.*expected a CUDA device"):
        view_of(TorchLike("cpu"), "q")


def test_an_array_interface_without_strides_is_contiguous() -> None:
    assert view_of(array_interface(), "q") == TensorView(0x3000, "float32", (2, 3), (3, 1), 0)


def test_an_array_interface_with_strides_in_bytes() -> None:
    assert view_of(array_interface(strides=(4, 8)), "q").strides == (1, 2)


def test_an_array_interface_of_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="q: typestr '<c8'"):
        view_of(array_interface(typestr="<c8"), "q")


def test_dlpack_without_strides_is_contiguous_behind_its_offset() -> None:
    assert view_of(DLPackArray(), "q") == TensorView(0x1004, "bfloat16", (2, 3), (3, 1), 1)


def test_dlpack_with_strides() -> None:
    assert view_of(DLPackArray(strides=(1, 2)), "q").strides == (1, 2)


def test_dlpack_is_asked_not_to_synchronise() -> None:
    array = DLPackArray()
    view_of(array, "q")
    assert array.asked == -1


def test_dlpack_of_e4m3_without_infinities() -> None:
    assert view_of(DLPackArray(code=10, bits=8), "k_cache").dtype == "float8_e4m3fn"


@pytest.mark.parametrize("code", [8, 12])
def test_dlpack_of_another_float_of_8_bits_is_refused(code: int) -> None:
    with pytest.raises(UsageError, match=f"q: DLPack type {code}8"):
        view_of(DLPackArray(code=code, bits=8), "q")


@pytest.mark.parametrize("mask", [array_interface(typestr="|b1"), DLPackArray(code=6, bits=8)])
def test_bools_of_any_library_are_read(mask: Any) -> None:
    assert view_of(mask, "mask").dtype == "bool"


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [((2, 3), (3, 1), True), ((1, 3), (7, 1), True), ((2, 1), (1, 9), True), ((2, 3), (4, 1), False), ((), (), True)],
)
def test_a_view_knows_whether_it_has_gaps(shape: tuple[int, ...], strides: tuple[int, ...], contiguous: bool) -> None:
    assert TensorView(0x1000, "int32", shape, strides).is_contiguous is contiguous


def test_dlpack_of_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="q: DLPack type 5"):
        view_of(DLPackArray(code=5), "q")


def test_a_host_array_is_refused() -> None:
    with pytest.raises(UsageError, match="q: DLPack device type 1, expected 2"):
        view_of(np.zeros(3, dtype=np.float32), "q")


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="q: got list, expected a TensorView"):
        view_of([1, 2], "q")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype='complex64'"):
        TensorView(0, "complex64", (1,), (1,))


class Index:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_lists_and_integers_of_other_libraries_become_a_tuple_of_integers() -> None:
    view = TensorView(0x1000, "int32", [2, Index(3)], [Index(3), 1])  # type: ignore[arg-type, list-item]
    assert view == TensorView.contiguous(0x1000, "int32", [2, 3])  # type: ignore[arg-type]
    assert {*map(type, (*view.shape, *view.strides))} == {int}
    assert hash(view) == hash(TensorView(0x1000, "int32", (2, 3), (3, 1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": None}, "shape: got NoneType, expected a tuple of integers"),
        ({"shape": 4}, "shape: got int, expected a tuple"),
        ({"shape": (2, 3.0)}, "shape: got float, expected an integer"),
        ({"strides": "31"}, "strides: got str, expected an integer"),
        ({"pointer": None}, "pointer: got NoneType, expected an integer"),
        ({"device": "cuda:0"}, "device: got str, expected an integer"),
    ],
)
def test_what_is_no_integer_is_named(changes: dict[str, Any], message: str) -> None:
    good = {"pointer": 0x1000, "dtype": "int32", "shape": (2, 3), "strides": (3, 1), "device": 0}
    with pytest.raises(UsageError, match=f"^{message}"):
        TensorView(**{**good, **changes})
    if "shape" in changes:
        with pytest.raises(UsageError, match=f"^{message}"):
            TensorView.contiguous(0x1000, "int32", changes["shape"])


@pytest.mark.parametrize("make", [TensorView.contiguous, lambda *given: TensorView(*given, (8, 1))])
def test_a_size_below_0_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match=r"^shape=\(-3, 8\): expected no size below 0"):
        make(0x1000, "float32", (-3, 8))


def test_shape_and_strides_of_other_lengths_are_refused() -> None:
    with pytest.raises(UsageError, match="expected equal lengths"):
        TensorView(0, "int32", (1, 2), (1,))


def test_strides_that_are_no_multiple_of_an_element_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^q: strides \(14, 4\) in bytes, expected multiples of 4"):
        view_of(array_interface(strides=(14, 4)), "q")


@pytest.mark.parametrize("typestr", [">f4", "|f4", "=f4", ">i4"])
def test_an_array_interface_of_another_byte_order_is_refused(typestr: str) -> None:
    with pytest.raises(UsageError, match=f"^q: typestr .{re.escape(typestr)}., expected .* little-endian"):
        view_of(array_interface(typestr=typestr), "q")


def test_single_bytes_have_no_order() -> None:
    assert view_of(array_interface(typestr="|u1"), "q").dtype == "uint8"


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^q: a masked array"):
        view_of(array_interface(mask=array_interface()), "q")
    assert view_of(array_interface(mask=None), "q").dtype == "float32"


@pytest.mark.parametrize(
    "changes",
    [{"data": None}, {"data": 0x3000}, {"shape": None}, {"typestr": "f"}, {"typestr": None}, {"typestr": "<f"}],
)
def test_a_malformed_array_interface_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^q: __cuda_array_interface__ \{.*\}, expected data, shape, typestr"):
        view_of(array_interface(**changes), "q")


READ_ONLY = {
    "array interface": array_interface(data=(0x3000, True)),
    "DLPack": VersionedArray(flags=1),
}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only_memory_is_read_but_not_written(kind: str) -> None:
    assert view_of(READ_ONLY[kind], "q").shape == (2, 3)
    with pytest.raises(UsageError, match=r"^out: is read-only, expected memory that the kernel may write"):
        view_of(READ_ONLY[kind], "out", written=True)


def test_writable_memory_is_written() -> None:
    assert view_of(array_interface(), "out", written=True).pointer == 0x3000
    assert view_of(VersionedArray(), "out", written=True).pointer == 0x1004


def test_dlpack_of_version_1_is_asked_for() -> None:
    array = VersionedArray(strides=(1, 2))
    assert view_of(array, "q") == TensorView(0x1004, "bfloat16", (2, 3), (1, 2), 1)
    assert array.asked == (-1, (1, 0))


def test_a_copy_that_dlpack_made_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^q: DLPack gave a copy"):
        view_of(VersionedArray(flags=2), "q")


def test_a_later_version_of_dlpack_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^q: DLPack version 2\.0, expected 1"):
        view_of(VersionedArray(major=2), "q")


@pytest.mark.parametrize("lanes", [0, 2, 4])
def test_vectors_of_dlpack_are_refused(lanes: int) -> None:
    array = DLPackArray()
    array.tensor.lanes = lanes
    with pytest.raises(UsageError, match=f"^q: DLPack type bfloat16 x {lanes}"):
        view_of(array, "q")


@pytest.mark.parametrize(("field", "other"), [("device_type", 1), ("device_id", 0)])
def test_a_dlpack_tensor_of_another_device_than_named_is_refused(field: str, other: int) -> None:
    array = DLPackArray()
    setattr(array.tensor, field, other)
    with pytest.raises(UsageError, match=r"^q: DLPack device \(.*\), but __dlpack_device__ gave \(2, 1\)"):
        view_of(array, "q")


@pytest.mark.parametrize("kind", [1, 3, 10, 13])
def test_dlpack_of_another_kind_of_memory_is_refused(kind: int) -> None:
    with pytest.raises(UsageError, match=f"^q: DLPack device type {kind}, expected 2"):
        view_of(DLPackArray(device_type=kind), "q")


def test_what_dlpack_cannot_export_is_refused() -> None:
    array = DLPackArray()

    def fail(**_: Any) -> Any:
        raise BufferError("read-only")

    array.__dlpack__ = fail  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"^q: a DLPackArray that DLPack cannot export \(read-only\)"):
        view_of(array, "q")


def test_a_consumed_capsule_is_refused() -> None:
    array = DLPackArray()
    array.__dlpack__ = lambda **_: _new_capsule(0x1000, b"used_dltensor", None)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"^q: __dlpack__ gave .*used_dltensor.*, expected a capsule"):
        view_of(array, "q")
