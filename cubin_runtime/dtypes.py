"""The dtypes of tensors, as every layer names, sizes and numbers them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import TypeGuard

    from .protocols import DTypeName


class DType(NamedTuple):
    """One dtype.

    ``name`` is torch's word, ``short`` that of kernels' metadata and the command line, ``stored`` that of safetensors.
    ``map_type`` is what TMA descriptors call the elements (``launch.tensormap``), which move e4m3 as bytes. The codes
    are its numbers in structs of native kernels: ``attention_code`` in q_type and out_type of decodes and MLA,
    ``merge_code`` in out_type of ``MergeStatesParams``; None where they do not take it.
    """

    name: str
    short: str
    nbytes: int
    map_type: str
    stored: str
    attention_code: int | None = None
    merge_code: int | None = None


_TABLE = (
    DType("bfloat16", "bf16", 2, "bfloat16", "BF16", 0, 0),
    DType("float16", "fp16", 2, "float16", "F16", 1, 1),
    DType("float8_e4m3fn", "e4m3", 1, "uint8", "F8_E4M3", 2),
    DType("float32", "fp32", 4, "float32", "F32", None, 2),
    DType("float64", "fp64", 8, "float64", "F64"),
    DType("bool", "bool", 1, "uint8", "BOOL"),
    DType("int8", "int8", 1, "uint8", "I8"),
    DType("uint8", "uint8", 1, "uint8", "U8"),
    DType("int16", "int16", 2, "uint16", "I16"),
    DType("uint16", "uint16", 2, "uint16", "U16"),
    DType("int32", "int32", 4, "int32", "I32"),
    DType("uint32", "uint32", 4, "uint32", "U32"),
    DType("int64", "int64", 8, "int64", "I64"),
    DType("uint64", "uint64", 8, "uint64", "U64"),
)
DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
BY_SHORT: Mapping[str, DType] = MappingProxyType({dtype.short: dtype for dtype in _TABLE})
ITEM_BYTES: Mapping[str, int] = MappingProxyType({dtype.name: dtype.nbytes for dtype in _TABLE})


def is_dtype(name: str) -> TypeGuard[DTypeName]:
    """Return whether a tensor here may have this dtype."""
    return name in ITEM_BYTES
