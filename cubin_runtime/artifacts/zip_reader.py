"""Members of a zip, read by position and unpacked in pieces; what an archive says of itself is not trusted."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping

from ..errors import CorruptError
from ..values import dataclass
from .bounded_read import TooLargeError
from .path import ArtifactPath, PathError

MAX_DIRECTORY_BYTES = 32 << 20
MAX_MEMBERS = 1 << 18  # a manifest of the largest size lists fewer files

_PIECE = 1 << 18
_PLACE = struct.Struct("<QQQIHH")  # the kept facts of a member: tuples and numbers would take five times the memory
_ENTRY = b"PK\x01\x02"
_LOCAL_HEADER = b"PK\x03\x04"
_UTF8_FLAG = 8  # in the high byte of the flags


class ZipError(CorruptError):
    """A zip, or a member of it, cannot be read."""


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The members of an archive by name, of several of one name the last, as whoever unpacks it ends up with.

    ``odd`` names what would lead astray whoever unpacks it: a name listed twice, one that climbs or is absolute, and a
    link.
    """

    places: Mapping[str, bytes]
    odd: frozenset[str]


class _Bounded(io.BufferedReader):
    """A file of which no read takes more than a central directory may have, whatever the archive says."""

    def read(self, size: int | None = -1, /) -> bytes:
        """See ``io.BufferedReader.read``."""
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a central directory of {size} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        data = super().read(MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else size)
        if len(data) > len(_ENTRY) * MAX_MEMBERS and data.count(_ENTRY) > MAX_MEMBERS:
            raise zipfile.BadZipFile(f"a central directory of at least {MAX_MEMBERS} members")
        return data


def read_directory(descriptor: int, where: str) -> ZipDirectory:
    """The central directory of an open archive; the descriptor stays open.

    Raises:
        ZipError: it cannot be read, or is larger than any release needs.
    """
    try:
        raw = io.FileIO(os.dup(descriptor), "rb")
        with _Bounded(raw) as stream, zipfile.ZipFile(stream) as archive:
            listed = archive.infolist()
            files = (one for one in listed if not one.is_dir())
            places = {
                one.filename: _PLACE.pack(
                    one.header_offset, one.compress_size, one.file_size, one.CRC, one.flag_bits, one.compress_type
                )
                for one in files
            }
            odd = {one.orig_filename for one in listed if _is_odd(one)}
            if len(places) < len(listed):
                twice = (name for name, count in Counter(one.filename for one in listed).items() if count > 1)
                odd |= {f"{name} (listed more than once)" for name in twice}
            return ZipDirectory(places, frozenset(odd))
    except Exception as error:  # the standard library's reader lets errors of many kinds through
        raise ZipError(f"{where}: not a readable zip: {error or type(error).__name__}") from None


def read_member(descriptor: int, name: str, place: bytes, limit: int, where: str, *, check: bool = False) -> bytes:
    """The bytes of a stored or deflated member, in memory once.

    ``check`` compares its checksum, for bytes whose digest nobody compares.

    Raises:
        TooLargeError: it has more than ``limit`` bytes.
        ZipError: it is damaged, encrypted or compressed in another way.
    """
    offset, packed_size, size, checksum, flags, kind = _PLACE.unpack(place)
    if size > limit:
        raise TooLargeError(f"{where} is {size} bytes, at most {limit} are allowed")
    if flags & 1 or kind not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ZipError(f"{where} is encrypted or compressed in a way that is not supported")
    if packed_size > limit + limit // 16 + 1024:
        raise ZipError(f"{where}: the archive is damaged: {packed_size} compressed bytes, expected at most {limit}")
    whole = io.BytesIO()  # which hands its memory over in the end instead of copying it
    try:
        packed = _packed(descriptor, name, offset, packed_size)
        for piece in packed if kind == zipfile.ZIP_STORED else _inflated(packed):
            if whole.tell() + len(piece) > limit:
                raise TooLargeError(f"{where} unpacks to over {limit} bytes")
            whole.write(piece)
    except (OSError, OverflowError, struct.error, zlib.error) as error:
        raise ZipError(f"{where}: the archive is damaged: {error}") from None
    data = whole.getvalue()
    if check and (len(data) != size or zlib.crc32(data) != checksum):
        raise ZipError(f"{where}: the archive is damaged: another checksum than the directory states")
    return data


def _packed(descriptor: int, name: str, offset: int, size: int) -> Iterator[bytes]:
    """The member as it lies in the archive: after a header of 30 bytes, a name and an extra field."""
    header = os.pread(descriptor, 30, offset)
    if header[:4] != _LOCAL_HEADER:
        raise OSError("no local header at the offset that the directory states")
    name_size, extra_size = struct.unpack("<HH", header[26:30])
    stated = os.pread(descriptor, name_size, offset + 30)
    if stated.decode("utf-8" if header[7] & _UTF8_FLAG else "cp437", "replace") != name:
        raise OSError("its local header has another name than the directory")
    start = offset + 30 + name_size + extra_size
    end = start + size
    while start < end:
        piece = os.pread(descriptor, min(_PIECE, end - start), start)
        if not piece:
            raise OSError("truncated")
        start += len(piece)
        yield piece


def _inflated(packed: Iterator[bytes]) -> Iterator[bytes]:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    for piece in packed:
        while piece and not stream.eof:
            yield stream.decompress(piece, _PIECE)
            piece = stream.unconsumed_tail
    while not stream.eof and (rest := stream.decompress(b"", _PIECE)):
        yield rest


def _is_odd(member: zipfile.ZipInfo) -> bool:
    """Return whether a member's name is not a plain relative path, or the member is a link or another special file."""
    name = member.orig_filename
    kind = stat.S_IFMT(member.external_attr >> 16) if member.create_system == 3 else 0
    try:
        ArtifactPath(name.removesuffix("/"))
    except PathError:
        return True
    return kind not in (0, stat.S_IFREG, stat.S_IFDIR)
