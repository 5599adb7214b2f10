"""Facts about a cubin: its architecture and each kernel's parameters, threads, registers and memory.

The facts come from the ELF sections that the CUDA toolchain writes (``.nv.info.<kernel>``, ``.nv.info``,
``.nv.shared.<kernel>``, ``.note.nv.tkinfo``). The bytes are untrusted: see ``elf``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from struct import Struct
from types import MappingProxyType

from ...values import dataclass
from .architecture import Architecture
from .elf import CubinFormatError, Elf, EntryPoint, read_elf

__all__ = [
    "Architecture",
    "Cubin",
    "CubinFormatError",
    "KernelFacts",
    "Parameter",
    "kernel_code",
    "parse_cubin",
]

# Attribute numbers of `.nv.info` as `cuobjdump -elf` names them (EIATTR_...).
_MAX_THREADS = 0x05
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_PARAMETER = 0x17
_REGISTERS = 0x2F
_LARGE_PARAMETER = 0x45
_LARGE_SIZE_MASK = 0xFFFF  # above it lie flags (0x05 for a pointer from sm_100 on); the limit is 32764 bytes
_SIZED_VALUE = 4  # format byte: a 16-bit length and that many bytes follow

_TWO_WORDS = Struct("<II")
_THREE_WORDS = Struct("<III")
_PARAMETER_RECORD = Struct("<IHHI")
_ARCH_OPTION = re.compile(rb"-arch[ =]\s*sm_([1-9][0-9]{1,2})([af]?)(?![0-9A-Za-z])")
_MAX_BLOCK_THREADS = 1024
_MAX_SHARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: position in the signature, offset in the parameter block, exact size, in bytes.

    The first offset is not always 0: up to sm_90 a 128-byte aligned parameter starts at byte 112.
    """

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The facts that the ELF states about one kernel.

    ``parameters`` are in signature order. ``max_threads`` is a block's limit, ``None`` if not declared.
    ``registers`` is a thread's count, ``None`` where not recorded. ``static_shared_bytes`` is the size of
    ``.nv.shared.<kernel>``, which from sm_90 on includes the 1024 bytes that CUDA keeps for itself.
    ``stack_bytes`` is a thread's stack, ``None`` where not recorded.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None
    registers: int | None
    static_shared_bytes: int
    stack_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cubin:
    """Facts of one cubin; ``kernels`` maps symbol to facts in the file's order."""

    sha256: str
    architecture: Architecture
    kernels: Mapping[str, KernelFacts]


def parse_cubin(data: bytes) -> Cubin:
    """Read the facts of a cubin.

    Args:
        data: the whole file; at most one pass over it is made, whatever it holds.

    Raises:
        CubinFormatError: not a CUDA ELF file, or one whose records contradict each other.
    """
    elf = read_elf(data)
    described = sum(s.size for s in elf.sections if s.name.startswith(".nv.info"))
    if described > len(data):
        raise CubinFormatError(f"attributes take {described} bytes of {len(data)}: their sections overlap")
    per_symbol = _per_symbol(elf)
    facts: dict[str, KernelFacts] = {}
    for symbol in elf.entry_points():
        if not symbol.name or symbol.name in facts:
            raise CubinFormatError(f"kernel symbol {symbol.name!r} is empty or occurs twice")
        facts[symbol.name] = _kernel(elf, symbol, per_symbol)
    return Cubin(sha256(data).hexdigest(), _architecture(elf), MappingProxyType(facts))


def kernel_code(data: bytes, symbol: str) -> bytes:
    """The machine code of one kernel (``.text.<symbol>``).

    Raises:
        CubinFormatError: not a CUDA ELF file, or it has no code under that name.
    """
    elf = read_elf(data)
    section = elf.by_name.get(f".text.{symbol}")
    if section is None:
        raise CubinFormatError(f"no code for {symbol!r}")
    return elf.content(section)


def _kernel(elf: Elf, symbol: EntryPoint, per_symbol: Mapping[tuple[int, int], int]) -> KernelFacts:  # noqa: C901
    name = symbol.name
    if symbol.section >= len(elf.sections) or elf.sections[symbol.section].name != f".text.{name}":
        raise CubinFormatError(f"kernel {name!r} does not lie in its own .text section")
    parameters: dict[int, Parameter] = {}
    max_threads = None
    info = elf.by_name.get(f".nv.info.{name}")
    if info is None:
        raise CubinFormatError(f"kernel {name!r} has no .nv.info section")
    for attribute, value in _attributes(elf.content(info), info.name):
        if attribute in (_PARAMETER, _LARGE_PARAMETER):
            _, ordinal, offset, last = _unpack(_PARAMETER_RECORD, value, info.name)
            size = last >> 18 if attribute == _PARAMETER else last & _LARGE_SIZE_MASK
            if ordinal in parameters:
                raise CubinFormatError(f"{info.name}: parameter {ordinal} occurs twice")
            if size == 0:
                raise CubinFormatError(f"{info.name}: parameter {ordinal} has no bytes")
            parameters[ordinal] = Parameter(ordinal, offset, size)
        elif attribute == _MAX_THREADS:
            x, y, z = _unpack(_THREE_WORDS, value, info.name)
            max_threads = x * y * z
            if not 1 <= max_threads <= _MAX_BLOCK_THREADS:
                raise CubinFormatError(f"{info.name}: at most {x} x {y} x {z} threads, expected 1 to 1024")
    if sorted(parameters) != list(range(len(parameters))):
        raise CubinFormatError(f"{info.name}: parameters {sorted(parameters)[:8]} leave gaps")
    shared = elf.by_name.get(f".nv.shared.{name}")
    if shared is not None and shared.size > _MAX_SHARED_BYTES:
        raise CubinFormatError(f"{shared.name}: {shared.size} bytes, no device has {_MAX_SHARED_BYTES}")
    frame = per_symbol.get((_FRAME_SIZE, symbol.index))
    return KernelFacts(
        symbol=name,
        parameters=tuple(parameters[i] for i in range(len(parameters))),
        max_threads=max_threads,
        registers=per_symbol.get((_REGISTERS, symbol.index)) or _registers_of_old_abi(elf, symbol),
        static_shared_bytes=0 if shared is None else shared.size,
        stack_bytes=per_symbol.get((_MIN_STACK_SIZE, symbol.index), frame),
    )


def _per_symbol(elf: Elf) -> dict[tuple[int, int], int]:
    """``.nv.info`` holds (symbol index, value) pairs for all functions of the file."""
    section = elf.by_name.get(".nv.info")
    if section is None:
        return {}
    ranges: dict[tuple[int, int], int] = {}
    for attribute, value in _attributes(elf.content(section), section.name):
        if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
            index, number = _unpack(_TWO_WORDS, value, section.name)
            ranges[attribute, index] = number
    return ranges


def _registers_of_old_abi(elf: Elf, symbol: EntryPoint) -> int | None:
    # ABI 7 and below kept the count in the high byte of .text's sh_info; in ABI 8 that byte is 0.
    return elf.sections[symbol.section].info >> 24 or None


def _attributes(data: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    at, end = 0, len(data)
    while at < end:
        if end - at < 4:
            raise CubinFormatError(f"{where}: truncated attribute at byte {at} of {end}")
        form, attribute = data[at], data[at + 1]
        size = int.from_bytes(data[at + 2 : at + 4], "little")
        at += 4
        if not 1 <= form <= _SIZED_VALUE:
            raise CubinFormatError(f"{where}: attribute format {form} at byte {at - 4}, expected 1 to 4")
        if form == _SIZED_VALUE:
            if size > end - at:
                raise CubinFormatError(f"{where}: attribute of {size} bytes at {at} extends beyond the section")
            yield attribute, data[at : at + size]
            at += size


def _unpack(record: Struct, value: bytes, where: str) -> tuple[int, ...]:
    if len(value) != record.size:
        raise CubinFormatError(f"{where}: an attribute of {len(value)} bytes, expected {record.size}")
    return record.unpack(value)


def _architecture(elf: Elf) -> Architecture:
    # ABI 8 keeps the number in the second byte of e_flags, older ones in the first.
    number = (elf.flags >> 8 if elf.abi_version >= 8 else elf.flags) & 0xFF
    note = elf.by_name.get(".note.nv.tkinfo")
    named = set() if note is None else set(_ARCH_OPTION.findall(elf.content(note)))
    if not named:
        return Architecture(number, None)
    if len(named) > 1:
        raise CubinFormatError(f".note.nv.tkinfo names {len(named)} architectures")
    digits, suffix = named.pop()
    if int(digits) != number:
        raise CubinFormatError(f".note.nv.tkinfo says sm_{digits.decode()}, the ELF header {number}")
    return Architecture(number, suffix.decode())
