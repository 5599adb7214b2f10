"""The element types of parameter structs, with the sizes and alignments that C gives them."""

from __future__ import annotations

import re
import struct
from functools import cache

from ..errors import UsageError
from ..values import dataclass

TENSOR_MAP_BYTES = 128
SCALARS = {
    "bool": struct.Struct("<?"),
    "int32": struct.Struct("<i"),
    "uint32": struct.Struct("<I"),
    "int64": struct.Struct("<q"),
    "uint64": struct.Struct("<Q"),
    "float": struct.Struct("<f"),
    "ptr": struct.Struct("<Q"),
}
_C_NAMES = {
    "bool": "bool",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "float": "float",
    "ptr": "void*",
    "CUtensorMap": "CUtensorMap",
    "FastModDiv": "FastModDiv",
}
_ARRAY = re.compile(r"([a-z0-9]+)\[([1-9][0-9]{0,5})\]\Z")


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type by its base name; ``count`` is None for a single element. Sizes and alignments in bytes."""

    name: str
    count: int | None
    size: int
    alignment: int

    @property
    def c_name(self) -> str:
        """The base type as C and C++ spell it."""
        return _C_NAMES[self.name]


@cache
def element_type(text: str) -> ElementType:
    """Read a type's name, such as ``int32`` or ``ptr[4]``; a CUtensorMap's alignment here is the least, 64.

    Raises:
        UsageError: the name is unknown.
    """
    if text == "CUtensorMap":
        return ElementType(text, None, TENSOR_MAP_BYTES, 64)
    if text == "FastModDiv":
        return ElementType(text, None, 16, 4)
    array = _ARRAY.match(text)
    base, count = (array[1], int(array[2])) if array else (text, None)
    if base not in SCALARS:
        names = ", ".join(["CUtensorMap", "FastModDiv", *SCALARS])
        raise UsageError(f"type {text!r}: expected {names} or an array T[N]")
    size = SCALARS[base].size
    return ElementType(base, count, size * (count or 1), size)
