"""The parts of a 64-bit little-endian CUDA ELF file, read within bounds from bytes that nobody vouches for.

``pyelftools`` declares the records; every offset, count and name is checked here before anything follows it:
a hostile file costs no more than one pass over its bytes. Limits are far above what a compiler writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from struct import Struct
from typing import Any

from ...errors import CorruptError
from ...values import dataclass

MAX_SECTIONS = 4096
MAX_SYMBOLS = 65536
MAX_KERNELS = 1024
MAX_NAME_BYTES = 4096

_IDENT = b"\x7fELF\x02\x01\x01"
_HEADER_BYTES = 64
_SECTION_BYTES = 64
_EM_CUDA = 190
# pyelftools drops the bits of st_other that mark an entry point, so symbols are unpacked here.
_SYMBOL = Struct("<IBBHQQ")
_NOBITS = 8
_FUNCTION = 2
_ENTRY_BIT = 0x10


class CubinFormatError(CorruptError):
    """The bytes are no well-formed CUDA ELF file."""


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
        found = self.by_name.get(".symtab")
        return () if found is None else _entry_points(self, found)


def read_elf(data: bytes) -> Elf:
    """Read the header and section table.

    Raises:
        CubinFormatError: wrong magic, class or machine, or an offset, count or name out of bounds.
    """
    if len(data) < _HEADER_BYTES:
        raise CubinFormatError(f"not a cubin: {len(data)} bytes, an ELF header takes {_HEADER_BYTES}")
    if data[: len(_IDENT)] != _IDENT:
        raise CubinFormatError(f"not a cubin: starts with {data[:7].hex()}, expected {_IDENT.hex()}")
    machine = int.from_bytes(data[18:20], "little")
    if machine != _EM_CUDA:
        raise CubinFormatError(f"not a cubin: ELF machine {machine}, CUDA is {_EM_CUDA}")
    stream = BytesIO(data)
    header = _parse("Elf_Ehdr", stream, 0)
    first, count, names_at = header["e_shoff"], header["e_shnum"], header["e_shstrndx"]
    if header["e_shentsize"] != _SECTION_BYTES:
        raise CubinFormatError(f"section headers of {header['e_shentsize']} bytes, expected {_SECTION_BYTES}")
    if not 1 <= count <= MAX_SECTIONS or names_at >= count:
        raise CubinFormatError(f"{count} sections, names in section {names_at}; expected 1 to {MAX_SECTIONS}")
    if first < _HEADER_BYTES or first + count * _SECTION_BYTES > len(data):
        raise CubinFormatError(f"section table of {count} at {first} ends beyond the file's {len(data)} bytes")
    raw = [_parse("Elf_Shdr", stream, first + i * _SECTION_BYTES) for i in range(count)]
    names = _bounded(data, raw[names_at], "section names")
    sections = tuple(_section(data, names, h) for h in raw)
    by_name: dict[str, Section] = {}
    for section in sections:
        if section.name and by_name.setdefault(section.name, section) is not section:
            raise CubinFormatError(f"two sections are called {section.name!r}")
    return Elf(data, data[8], header["e_flags"], sections, by_name)


def _section(data: bytes, names: bytes, header: Any) -> Section:
    name = _name(names, header["sh_name"])
    kind = _number(header["sh_type"])
    offset, size = header["sh_offset"], header["sh_size"]
    if kind not in (0, _NOBITS) and offset + size > len(data):
        raise CubinFormatError(f"section {name!r} ends at {offset + size}, the file at {len(data)}")
    return Section(name, kind, offset, size, header["sh_link"], header["sh_info"])


def _entry_points(elf: Elf, table: Section) -> tuple[EntryPoint, ...]:
    if table.size % _SYMBOL.size or table.size // _SYMBOL.size > MAX_SYMBOLS:
        raise CubinFormatError(f"symbol table of {table.size} bytes, at most {MAX_SYMBOLS} x {_SYMBOL.size}")
    if table.link >= len(elf.sections):
        raise CubinFormatError(f"symbol names in section {table.link} of {len(elf.sections)}")
    names = elf.content(elf.sections[table.link])
    found = [
        (index, at, section)
        for index, (at, info, other, section, _, _) in enumerate(_SYMBOL.iter_unpack(elf.content(table)))
        if info & 15 == _FUNCTION and other & _ENTRY_BIT and section
    ]
    if len(found) > MAX_KERNELS:
        raise CubinFormatError(f"{len(found)} kernels, at most {MAX_KERNELS} are read")
    return tuple(EntryPoint(index, _name(names, at), section) for index, at, section in found)


def _bounded(data: bytes, header: Any, what: str) -> bytes:
    start, size = header["sh_offset"], header["sh_size"]
    if start + size > len(data):
        raise CubinFormatError(f"{what} end at {start + size}, the file at {len(data)}")
    return data[start : start + size]


def _name(table: bytes, at: int) -> str:
    end = table.find(b"\0", at, at + MAX_NAME_BYTES) if at < len(table) else -1
    if end < 0:
        raise CubinFormatError(f"name at {at} does not end within {MAX_NAME_BYTES} bytes or its table")
    try:
        return table[at:end].decode("ascii")
    except UnicodeDecodeError as error:
        raise CubinFormatError(f"name at {at} is not ASCII") from error


def _parse(record: str, stream: BytesIO, at: int) -> Any:
    from elftools.common.exceptions import ELFError
    from elftools.common.utils import struct_parse

    try:
        return struct_parse(getattr(_structs(), record), stream, stream_pos=at)
    except (ELFError, ValueError, OverflowError) as error:
        raise CubinFormatError(f"{record} at {at}: {error}") from error


@lru_cache(maxsize=1)
def _structs() -> Any:
    from elftools.elf.structs import ELFStructs

    structs = ELFStructs(little_endian=True, elfclass=64)
    structs.create_basic_structs()
    structs.create_advanced_structs(e_type="ET_EXEC", e_machine="EM_CUDA")
    return structs


def _number(value: object) -> int:
    """pyelftools gives known section types by name; only those without bytes matter here."""
    if isinstance(value, int):
        return value
    return {"SHT_NULL": 0, "SHT_NOBITS": _NOBITS}.get(str(value), 1)
