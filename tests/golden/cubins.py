"""Cubins without code, and the releases that hold them: all that a kernel's file is asked before it is launched."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_EM_CUDA, _ABI = 190, 8
_PROGBITS, _SYMTAB, _STRTAB = 1, 2, 3
_FUNCTION, _ENTRY = 2, 0x10
_PARAMETER, _MAX_THREADS = 0x17, 0x05


def cubin_of(symbol: str, sm: int, parameter_bytes: int, threads: int) -> bytes:
    """An ELF file that says to hold one kernel with one parameter, for compute capability ``sm / 10``.

    It does not tell the architecture's suffix, as published cubins do not.
    """
    names = f"\0.strtab\0.symtab\0.text.{symbol}\0.nv.info.{symbol}\0{symbol}\0".encode()
    info = struct.pack("<BBHIHHI", 4, _PARAMETER, 12, 0, 0, 0, parameter_bytes << 18)
    info += struct.pack("<BBHIII", 4, _MAX_THREADS, 12, threads, 1, 1)
    entry = _SYMBOL.pack(names.rindex(symbol.encode()), _FUNCTION, _ENTRY, 3, 0, 0)
    parts = (
        (".strtab", _STRTAB, names, 0),
        (".symtab", _SYMTAB, bytes(_SYMBOL.size) + entry, 1),
        (f".text.{symbol}", _PROGBITS, b"", 0),
        (f".nv.info.{symbol}", _PROGBITS, info, 0),
    )
    body, sections = b"", [bytes(_SECTION.size)]
    for name, kind, data, link in parts:
        at = names.index(f"\0{name}\0".encode()) + 1
        sections.append(_SECTION.pack(at, kind, 0, 0, _HEADER.size + len(body), len(data), link, 0, 1, 0))
        body += data
    ident = b"\x7fELF\x02\x01\x01\0" + bytes([_ABI]) + bytes(7)
    flags, first = sm << 8, _HEADER.size + len(body)
    count = len(sections)
    header = _HEADER.pack(ident, 2, _EM_CUDA, 1, 0, 0, first, flags, _HEADER.size, 0, 0, _SECTION.size, count, 1)
    return b"".join((header, body, *sections))


def write_release(folder: Path, name: str, abi: str, files: Mapping[str, bytes]) -> str:
    """Write the release ``name`` as ``folder/name.zip``; the pin that trusts it, for a pin file."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items())]
    manifest = "".join(lines).encode()
    with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
        for path, data in {**files, "checksums.txt": manifest}.items():
            archive.writestr(f"{name}/{path}", data)
    return (
        f'[[pin]]\nname = "{name}"\npath = "{name}"\nmanifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\n'
        f"files = {len(files)}\nbytes = {sum(map(len, files.values()))}\nmax_file_bytes = 8388608\n"
        f'abi = "{abi}"\nlicence = "Apache-2.0"\nsources = []\n\n'
    )
