"""Bounds-checked parsing of 64-bit little-endian CUDA ELF files from untrusted bytes.

Records are those of elf(5). Every offset, count and name is checked before anything follows it: a hostile file costs
no more than one pass over its bytes. Limits are far above what a compiler writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from ...errors import CorruptError
from ...values import dataclass

MAX_SECTIONS = 4096
MAX_SYMBOLS = 65536
MAX_KERNELS = 1024
MAX_NAME_BYTES = 4096

_IDENT = b"\x7fELF\x02\x01\x01"
_EM_CUDA = 190
_HEADER = Struct("<16xHHIQQQIHHHHHH")  # Elf64_Ehdr behind e_ident
_SECTION = Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = Struct("<IBBHQQ")  # Elf64_Sym
_NULL, _NOBITS = 0, 8  # sections without bytes
_FUNCTION = 2
_ENTRY_BIT = 0x10


class CubinFormatError(CorruptError):
    """The bytes are not a well-formed CUDA ELF file."""


class _SectionHeader(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class Section:
    """One section header; ``offset`` and ``size`` lie within the file unless it has no bytes there."""

    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """The symbol of a kernel: its number in the symbol table, its name and the number of its section."""

    index: int
    name: str
    section: int


@dataclass(frozen=True, slots=True)
class Elf:
    """Header fields and sections of one file."""

    data: bytes
    abi_version: int
    flags: int
    sections: tuple[Section, ...]
    by_name: Mapping[str, Section]

    def content(self, section: Section) -> bytes:
        """The bytes of a section; empty for one that occupies none."""
        if section.kind == _NOBITS:
            return b""
        return self.data[section.offset : section.offset + section.size]

    def entry_points(self) -> tuple[EntryPoint, ...]:
        """The kernels in the order of the symbol table; empty without one."""
        symbols = self.by_name.get(".symtab")
        return () if symbols is None else _entry_points(self, symbols)


def read_elf(data: bytes) -> Elf:
    """Read the header and section table.

    Raises:
        CubinFormatError: wrong magic, class or machine, or an offset, count or name out of bounds.
    """
    if len(data) < _HEADER.size:
        raise CubinFormatError(f"not a cubin: {len(data)} bytes, an ELF header takes {_HEADER.size}")
    if data[: len(_IDENT)] != _IDENT:
        raise CubinFormatError(f"not a cubin: starts with {data[:7].hex()}, expected {_IDENT.hex()}")
    _, machine, _, _, _, first, flags, _, _, _, section_bytes, count, names_at = _HEADER.unpack_from(data)
    if machine != _EM_CUDA:
        raise CubinFormatError(f"not a cubin: ELF machine {machine}, CUDA is {_EM_CUDA}")
    if section_bytes != _SECTION.size:
        raise CubinFormatError(f"section headers of {section_bytes} bytes, expected {_SECTION.size}")
    if not 1 <= count <= MAX_SECTIONS or names_at >= count:
        raise CubinFormatError(f"{count} sections, names in section {names_at}; expected 1 to {MAX_SECTIONS}")
    end = first + count * _SECTION.size
    if first < _HEADER.size or end > len(data):
        raise CubinFormatError(f"section table of {count} at {first} ends beyond the file's {len(data)} bytes")
    raw = [_SectionHeader._make(record) for record in _SECTION.iter_unpack(data[first:end])]
    names = _section_names(data, raw[names_at])
    sections = tuple(_section(data, names, h) for h in raw)
    by_name: dict[str, Section] = {}
    for section in sections:
        if section.name and by_name.setdefault(section.name, section) is not section:
            raise CubinFormatError(f"two sections are called {section.name!r}")
    return Elf(data, data[8], flags, sections, by_name)


def _section(data: bytes, names: bytes, header: _SectionHeader) -> Section:
    name, end = _name(names, header.name), header.offset + header.size
    if header.kind not in (_NULL, _NOBITS) and end > len(data):
        raise CubinFormatError(f"section {name!r} ends at {end}, the file at {len(data)}")
    return Section(name, header.kind, header.offset, header.size, header.link, header.info)


def _entry_points(elf: Elf, table: Section) -> tuple[EntryPoint, ...]:
    if table.size % _SYMBOL.size or table.size // _SYMBOL.size > MAX_SYMBOLS:
        raise CubinFormatError(f"symbol table of {table.size} bytes, at most {MAX_SYMBOLS} x {_SYMBOL.size}")
    if table.link >= len(elf.sections):
        raise CubinFormatError(f"symbol names in section {table.link} of {len(elf.sections)}")
    names = elf.content(elf.sections[table.link])
    sections = [
        (index, at, section)
        for index, (at, info, other, section, _, _) in enumerate(_SYMBOL.iter_unpack(elf.content(table)))
        if info & 15 == _FUNCTION and other & _ENTRY_BIT and section
    ]
    if len(sections) > MAX_KERNELS:
        raise CubinFormatError(f"{len(sections)} kernels, at most {MAX_KERNELS} are read")
    return tuple(EntryPoint(index, _name(names, at), section) for index, at, section in sections)


def _section_names(data: bytes, header: _SectionHeader) -> bytes:
    end = header.offset + header.size
    if end > len(data):
        raise CubinFormatError(f"section names end at {end}, the file at {len(data)}")
    return data[header.offset : end]


def _name(table: bytes, at: int) -> str:
    end = table.find(b"\0", at, at + MAX_NAME_BYTES) if at < len(table) else -1
    if end < 0:
        raise CubinFormatError(f"name at {at} does not end within {MAX_NAME_BYTES} bytes or its table")
    try:
        return table[at:end].decode("ascii")
    except UnicodeDecodeError as error:
        raise CubinFormatError(f"name at {at} is not ASCII") from error
