"""A ``.zip`` or ``.whl`` as a source: read by position, so that threads share it without a lock."""

from __future__ import annotations

import io
import os
import stat
import struct
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import MissingError, SourceError
from ..bounded_read import NotRegularError, open_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath, PathError
from .source import NotHereError, TooMuchError, Wanted

MAX_DIRECTORY_BYTES = 64 << 20


class _Bounded(io.BufferedReader):
    """A file of which no read takes more than a central directory may have, whatever the archive says."""

    def read(self, size: int | None = -1, /) -> bytes:
        """See ``io.BufferedReader.read``."""
        wanted = MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else size
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a central directory of {size} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        return super().read(wanted)


class ArchiveSource:
    """A ``.zip`` or ``.whl`` that holds release folders at any depth; found by the manifest's place in it."""

    local = True

    def __init__(self, file: Path) -> None:
        self.file = file
        self.label = str(file)
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._prefixes: dict[ArtifactPath, str | None] = {}
        self._odd: set[str] = set()

    def _open(self) -> int:
        """Read the central directory once; later reads are ``pread``, which threads share without a lock."""
        with self._lock:
            if self._descriptor is not None:
                return self._descriptor
            try:
                descriptor, _ = open_regular(str(self.file), str(self.file), follow=True)
            except FileNotFoundError:
                raise NotHereError(f"{self.file} does not exist") from None
            except NotRegularError as error:
                raise SourceError(str(error)) from None
            except OSError as error:
                raise SourceError(f"{self.file}: {error.strerror}") from None
            try:
                raw = io.FileIO(os.dup(descriptor), "rb")
                with _Bounded(raw) as stream, zipfile.ZipFile(stream) as archive:
                    self._list(archive.infolist())
            except Exception as error:  # the standard library's reader lets errors of many kinds through
                os.close(descriptor)
                raise SourceError(f"{self.file}: not a readable zip: {error or type(error).__name__}") from None
            self._descriptor = descriptor
            return descriptor

    def _list(self, listed: Sequence[zipfile.ZipInfo]) -> None:
        """Members by name; of several of one name the last, as whoever unpacks it ends up with."""
        self._members = {one.filename: one for one in listed if not one.is_dir()}
        twice = (name for name, count in Counter(one.filename for one in listed).items() if count > 1)
        self._odd = {f"{name} (listed more than once)" for name in twice}
        self._odd |= {one.orig_filename for one in listed if _is_odd(one)}

    def _member(self, path: ArtifactPath, folder: ArtifactPath) -> zipfile.ZipInfo | None:
        if folder not in self._prefixes:
            tail = f"{folder}/{MANIFEST_NAME}"
            found = [n for n in self._members if n == tail or n.endswith("/" + tail)]
            self._prefixes[folder] = min(found, key=len)[: -len(tail)] if found else None
        prefix = self._prefixes[folder]
        return None if prefix is None else self._members.get(prefix + path.text)

    def read(self, wanted: Wanted) -> bytes:
        """See ``Source.read``; stored or deflated members of at most ``wanted.limit`` bytes."""
        descriptor = self._open()
        member = self._member(wanted.path, wanted.folder)
        if member is None:
            raise NotHereError(f"{self.file} has no {wanted.path}")
        where = f"{self.file}: {wanted.path}"
        if member.file_size > wanted.limit:
            raise TooMuchError(f"{where} is {member.file_size} bytes, at most {wanted.limit} are allowed")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SourceError(f"{where} is encrypted or compressed in a way that is not supported")
        try:
            packed = _packed_bytes(descriptor, member, wanted.limit)
            if member.compress_type == zipfile.ZIP_STORED:
                return packed
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, wanted.limit + 1)
        except (OSError, OverflowError, struct.error, zlib.error) as error:
            raise SourceError(f"{where}: the archive is damaged: {error}") from None
        if len(data) > wanted.limit:
            raise TooMuchError(f"{where} unpacks to over {wanted.limit} bytes")
        return data

    def names(self, folder: ArtifactPath) -> set[str]:
        """See ``Listing.names``; what would lead astray whoever unpacks the archive is listed wherever it lies in it.

        That is a name listed twice, one that climbs or is absolute, and a link.
        """
        self._open()
        manifest = self._member(folder.child(MANIFEST_NAME), folder)
        if manifest is None:
            return set()
        base = manifest.filename.removesuffix(MANIFEST_NAME)
        return {name[len(base) :] for name in self._members if name.startswith(base)} | self._odd

    def outside(self, folders: Iterable[ArtifactPath]) -> set[str]:
        """Names of all files that lie in none of the folders; one whose manifest is not here counts as absent."""
        self._open()
        found = (self._member(folder.child(MANIFEST_NAME), folder) for folder in folders)
        bases = tuple(one.filename.removesuffix(MANIFEST_NAME) for one in found if one is not None)
        return {name for name in self._members if not name.startswith(bases)}

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        try:
            self._open()
        except (MissingError, SourceError):
            return None
        member = self._member(path, folder)
        return f"{self.file}!{member.filename}" if member else None

    def close(self) -> None:
        """Close the archive."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _is_odd(member: zipfile.ZipInfo) -> bool:
    """Whether a member's name is not a plain relative path, or the member is a link or another special file."""
    name = member.orig_filename
    kind = stat.S_IFMT(member.external_attr >> 16) if member.create_system == 3 else 0
    try:
        ArtifactPath(name.removesuffix("/"))
    except PathError:
        return True
    return kind not in (0, stat.S_IFREG, stat.S_IFDIR)


def _packed_bytes(descriptor: int, member: zipfile.ZipInfo, limit: int) -> bytes:
    """The member as it lies in the archive: after a header of 30 bytes, a name and an extra field."""
    header = os.pread(descriptor, 30, member.header_offset)
    if header[:4] != b"PK\x03\x04":
        raise OSError("no local header at the offset that the directory states")
    name_size, extra_size = struct.unpack("<HH", header[26:30])
    name = os.pread(descriptor, name_size, member.header_offset + 30)
    if name.decode("utf-8" if header[7] & 8 else "cp437", "replace") != member.orig_filename:
        raise OSError("its local header has another name than the directory")
    if member.compress_size > limit + limit // 16 + 1024:
        raise OSError(f"{member.compress_size} compressed bytes, expected at most {limit}")
    data = os.pread(descriptor, member.compress_size, member.header_offset + 30 + name_size + extra_size)
    if len(data) != member.compress_size:
        raise OSError("truncated")
    return data
