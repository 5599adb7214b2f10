"""Parameter structs: one declaration gives the layout, the bytes, the C text and the fingerprint."""

from __future__ import annotations

import hashlib
import operator
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field
from functools import cache, lru_cache
from typing import Any

from ..errors import UsageError
from ..values import dataclass

__all__ = ["FastModDiv", "Field", "FieldRow", "PlacedField", "StructLayout"]

TENSOR_MAP_BYTES = 128
INT32_MAX = 2**31 - 1
_WORDS = struct.Struct("<iIIi")  # of a FastModDiv
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
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FAST_MOD_DIV = """
#ifndef CUBIN_RUNTIME_FAST_MOD_DIV
#define CUBIN_RUNTIME_FAST_MOD_DIV
struct FastModDiv { int32_t divisor; uint32_t multiplier; uint32_t add; int32_t shift; };
#ifndef __cplusplus
typedef struct FastModDiv FastModDiv;
#endif
#endif
"""
# A 64-aligned struct must not depend on the toolkit: cuda.h of CUDA 13 aligns its own type to 128.
_TENSOR_MAP_64 = """
#ifndef CUBIN_RUNTIME_TENSOR_MAP_64
#define CUBIN_RUNTIME_TENSOR_MAP_64
typedef struct TensorMap64 { alignas(64) uint64_t opaque[16]; } TensorMap64;
#endif
"""


@dataclass(frozen=True, slots=True)
class FastModDiv:
    """Division by a fixed number with one multiply-high and one shift, as ``cuda::fast_mod_div<int32_t>`` does.

    It is the four 32-bit words that a kernel needs to divide a non-negative int32 by ``divisor``.

    In memory (16 bytes, alignment 4): divisor int32, multiplier uint32, add uint32, shift int32.
    For divisor 1 the shift is -1, which tells the kernel to return the dividend itself.
    """

    divisor: int
    multiplier: int
    add: int
    shift: int

    SIZE = 16
    ALIGNMENT = 4

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, divisor: int) -> FastModDiv:
        """The words for ``divisor``, 1 to 2**31 - 1.

        Raises:
            UsageError: the divisor is outside that range.
        """
        if not 1 <= divisor <= INT32_MAX:
            raise UsageError(f"expected 1 to {INT32_MAX}", argument="divisor", value=divisor)
        # With l = ceil(log2 divisor), ceil(2**(31+l) / divisor) has an error too small to matter below 2**31.
        bits = (divisor - 1).bit_length()
        return cls(divisor, -(-(1 << (31 + bits)) // divisor), 0, bits - 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> FastModDiv:
        """Read the 16 bytes back as they stand; nothing is recomputed."""
        return cls(*_WORDS.unpack(data))

    def to_bytes(self) -> bytes:
        """The 16 bytes as a kernel reads them."""
        return _WORDS.pack(self.divisor, self.multiplier, self.add, self.shift)

    def divide(self, dividend: int) -> int:
        """``dividend // divisor`` by the words alone, as a kernel does; ``dividend`` 0 to 2**31 - 1."""
        if self.shift < 0:
            return dividend
        return (((dividend + self.add) * self.multiplier) >> 32) >> self.shift

    def modulo(self, dividend: int) -> int:
        """``dividend % divisor`` by the words alone."""
        return dividend - self.divide(dividend) * self.divisor


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type by its base name; ``count`` is None for a single element. Sizes and alignments in bytes."""

    name: str
    count: int | None
    size: int
    alignment: int


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


@dataclass(frozen=True, slots=True)
class Field:
    """One member as declared: a C identifier, an element type and what the kernel does with it.

    Types: ``bool``, ``int32``, ``uint32``, ``int64``, ``uint64``, ``float`` (32 bits), ``ptr`` (64 bits),
    ``CUtensorMap`` (128 bytes), ``FastModDiv`` (16 bytes), and arrays of the scalars such as ``int32[4]``.
    """

    name: str
    type: str
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class PlacedField:
    """One member with the offset and size in bytes that the C ABI gives it."""

    name: str
    type: str
    meaning: str
    offset: int
    size: int

    def encode(self, value: object) -> bytes:
        """The member's bytes for ``value``; ``None`` is all zeros for pointers and descriptors.

        Raises:
            UsageError: the value does not fit the type; the message names the member.
        """
        kind = element_type(self.type)
        try:
            if kind.name == "CUtensorMap":
                data = bytes(TENSOR_MAP_BYTES) if value is None else value
                if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) != TENSOR_MAP_BYTES:
                    raise TypeError(f"expected {TENSOR_MAP_BYTES} encoded bytes or None")
                return bytes(data)
            if kind.name == "FastModDiv":
                words = value if isinstance(value, FastModDiv) else FastModDiv.of(_as_int(value))
                return words.to_bytes()
            if kind.count is None:
                return SCALARS[kind.name].pack(_plain(kind.name, value))
            if not isinstance(value, Sequence) or len(value) != kind.count:
                raise TypeError(f"expected a sequence of {kind.count}")
            return b"".join(SCALARS[kind.name].pack(_plain(kind.name, item)) for item in value)
        except (struct.error, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"expected {self.type} ({error})", argument=self.name, value=repr(value)) from error

    def decode(self, data: bytes) -> object:
        """The member's value: a number, FastModDiv, a tuple for arrays, bytes for descriptors."""
        kind = element_type(self.type)
        if kind.name == "CUtensorMap":
            return bytes(data)
        if kind.name == "FastModDiv":
            return FastModDiv.from_bytes(data)
        packer = SCALARS[kind.name]
        items = tuple(packer.unpack_from(data, i * packer.size)[0] for i in range(kind.count or 1))
        return items[0] if kind.count is None else items


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One line of a struct's description; ``text`` is the value as a person reads it."""

    name: str
    type: str
    offset: int
    value: object
    meaning: str

    @property
    def text(self) -> str:
        """Pointers in hexadecimal, descriptors as their first bytes, the rest as Python shows it."""
        if self.type == "ptr":
            return f"{self.value:#x}" if isinstance(self.value, int) and self.value else "null"
        if isinstance(self.value, bytes):
            return f"{self.value[:8].hex()}... ({len(self.value)} bytes)" if any(self.value) else "not built"
        if isinstance(self.value, FastModDiv):
            return f"/ {self.value.divisor}"
        return str(self.value)


@dataclass(frozen=True, slots=True)
class StructLayout:
    """A parameter struct placed by the C rules of x86-64 and CUDA; equal for host and device.

    ``fingerprint`` is the SHA-256 (hex) of the lines ``name:type:offset`` in order, then that of the size; ``names``
    are those of the members, ``pointers`` and ``descriptors`` of those that are addresses and tensor maps.
    """

    name: str
    fields: tuple[PlacedField, ...]
    size: int
    alignment: int
    tensor_map_alignment: int
    fingerprint: str
    pointers: tuple[str, ...] = field(repr=False, compare=False)
    descriptors: tuple[str, ...] = field(repr=False, compare=False)
    names: Set[str] = field(repr=False, compare=False)
    _by_name: Mapping[str, PlacedField] = field(repr=False, compare=False)
    _packer: struct.Struct = field(repr=False, compare=False)  # of all members, those of _apart as their bytes
    _apart: tuple[tuple[int, PlacedField], ...] = field(repr=False, compare=False)

    @classmethod
    def declare(cls, name: str, fields: Sequence[Field | PlacedField], tensor_map_alignment: int = 64) -> StructLayout:
        """Place ``fields`` in order, those of another layout anew.

        ``tensor_map_alignment``: 128 where CUtensorMap is CUDA 13's, 64 before.

        Raises:
            UsageError: a name is no C identifier or occurs twice, a type is unknown, or there is no ``Field``.
        """
        if tensor_map_alignment not in (64, 128):
            raise UsageError("expected 64 or 128", argument="tensor_map_alignment", value=tensor_map_alignment)
        if not _IDENTIFIER.match(name) or not fields:
            raise UsageError(f"struct {name!r}, {len(fields)} fields: expected a C identifier and some fields")
        placed: dict[str, PlacedField] = {}
        offset, widest = 0, 1
        for item in fields:
            if not isinstance(item, Field | PlacedField):
                raise UsageError(f"struct {name!r}: fields: got {type(item).__name__}, expected Field(name, type)")
            if not _IDENTIFIER.match(item.name) or item.name in placed:
                raise UsageError(f"{name}.{item.name}: expected a C identifier that occurs once")
            kind = element_type(item.type)
            alignment = tensor_map_alignment if kind.name == "CUtensorMap" else kind.alignment
            offset = _round_up(offset, alignment)
            placed[item.name] = PlacedField(item.name, item.type, item.meaning, offset, kind.size)
            offset, widest = offset + kind.size, max(widest, alignment)
        size = _round_up(offset, widest)
        members = tuple(placed.values())
        lines = "".join(f"{m.name}:{m.type}:{m.offset}\n" for m in members) + f"{size}\n"
        digest = hashlib.sha256(lines.encode()).hexdigest()
        pointers, descriptors = (tuple(m.name for m in members if m.type == t) for t in ("ptr", "CUtensorMap"))
        apart = tuple((index, m) for index, m in enumerate(members) if m.type not in SCALARS or m.type == "bool")
        packer = _packer(members, size)
        return cls(
            name=name,
            fields=members,
            size=size,
            alignment=widest,
            tensor_map_alignment=tensor_map_alignment,
            fingerprint=digest,
            pointers=pointers,
            descriptors=descriptors,
            names=placed.keys(),
            _by_name=placed,
            _packer=packer,
            _apart=apart,
        )

    def __hash__(self) -> int:  # caches are asked with it
        return hash(self.fingerprint)

    def field(self, name: str) -> PlacedField:
        """The member called ``name``; UsageError if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise UsageError(f"struct {self.name} has no field {name!r}") from None

    def pack(self, values: Mapping[str, object]) -> bytes:
        """The struct's bytes, padding zero. ``values`` names every field and nothing else.

        Raises:
            UsageError: a field is missing or unknown, or a value does not fit its type.
        """
        if values.keys() != self.names:
            missing = [m.name for m in self.fields if m.name not in values]
            unknown = [name for name in values if name not in self._by_name]
            raise UsageError(f"struct {self.name}: missing {missing}, unknown {unknown}")
        numbers = list(map(values.__getitem__, self._by_name))
        for index, member in self._apart:
            numbers[index] = member.encode(numbers[index])
        try:
            return self._packer.pack(*numbers)
        except (struct.error, OverflowError):  # null pointers, and what does not fit
            return b"".join(self._in_parts(values))

    def _in_parts(self, values: Mapping[str, object]) -> Iterator[bytes]:
        """The same member by member, each checked by itself."""
        at = 0
        for member in self.fields:
            yield bytes(member.offset - at) + member.encode(values[member.name])
            at = member.offset + member.size
        yield bytes(self.size - at)

    def unpack(self, data: bytes | bytearray | memoryview) -> dict[str, object]:
        """Every field's value from ``size`` bytes; descriptors come back as their 128 bytes."""
        return {row.name: row.value for row in self.describe(data)}

    def describe(self, data: bytes | bytearray | memoryview) -> tuple[FieldRow, ...]:
        """One row a field, in the order of the struct.

        Raises:
            UsageError: ``data`` is not exactly ``size`` bytes.
        """
        raw = bytes(data)
        if len(raw) != self.size:
            raise UsageError(f"struct {self.name}: got {len(raw)} bytes, expected {self.size}")
        return tuple(
            FieldRow(m.name, m.type, m.offset, m.decode(raw[m.offset : m.offset + m.size]), m.meaning)
            for m in self.fields
        )

    def c_declaration(self) -> str:
        """A header: the struct, and static_asserts of its size, its alignment and every offset.

        Complete by itself, valid as C++11 and C11; includes ``<cuda.h>`` only for 128-aligned descriptors.
        """
        return _c_text(self)


def _packer(members: Sequence[PlacedField], size: int) -> struct.Struct:
    """The format of all members with the padding between them; members that are no plain number are their bytes."""
    text, at = "<", 0
    for member in members:
        code = (
            f"{member.size}s"
            if member.type not in SCALARS or member.type == "bool"
            else SCALARS[member.type].format[1:]
        )
        text += f"{member.offset - at}x{code}"
        at = member.offset + member.size
    return struct.Struct(f"{text}{size - at}x")


def _plain(type_name: str, value: object) -> object:
    if type_name == "ptr":
        return 0 if value is None else _as_int(value)
    if type_name == "bool" and value not in (0, 1):
        raise TypeError("expected True or False")
    return value


def _as_int(value: Any) -> int:
    return operator.index(value)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def _c_text(layout: StructLayout) -> str:
    """The whole header."""
    name, members = layout.name, [(member, element_type(member.type)) for member in layout.fields]
    types = {kind.name for _, kind in members}
    wide_maps = "CUtensorMap" in types and layout.tensor_map_alignment == 128
    out = "#pragma once\n#include <assert.h>\n#include <stddef.h>\n#include <stdint.h>\n"
    out += "#ifndef __cplusplus\n#include <stdalign.h>\n#include <stdbool.h>\n#endif\n"
    out += "#include <cuda.h>\n" if wide_maps else ""
    out += _FAST_MOD_DIV if "FastModDiv" in types else ""
    out += _TENSOR_MAP_64 if "CUtensorMap" in types and not wide_maps else ""
    out += f"\nstruct\n#ifdef __cplusplus\n    alignas({layout.alignment})\n#endif\n{name} {{\n"
    for member, kind in members:
        spelled = "TensorMap64" if kind.name == "CUtensorMap" and not wide_maps else _C_NAMES[kind.name]
        count = "" if kind.count is None else f"[{kind.count}]"
        comment = f"  // {_one_line(member.meaning)}" if member.meaning else ""
        out += f"  {spelled} {member.name}{count};{comment}\n"
    out += "};\n"
    out += f"#ifndef __cplusplus\ntypedef struct {name} {name};\n#endif\n\n"
    out += f'static_assert(sizeof({name}) == {layout.size}, "{name}: size");\n'
    out += f'static_assert(alignof({name}) == {layout.alignment}, "{name}: alignment");\n'
    for member, _ in members:
        out += f'static_assert(offsetof({name}, {member.name}) == {member.offset}, "{name}.{member.name}: offset");\n'
    return out


def _one_line(text: str) -> str:
    # A trailing backslash would pull the next member into the comment.
    return " ".join(text.split()).replace("\\", "/")
