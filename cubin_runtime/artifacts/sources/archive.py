"""A ``.zip`` or ``.whl`` as a source: read by position, so that threads share it without a lock."""

from __future__ import annotations

import io
import os
import struct
import threading
import zipfile
import zlib
from pathlib import Path

from ...errors import MissingError, SourceError
from ..bounded_read import NotRegularError, open_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath
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
                    self._members = {i.filename: i for i in archive.infolist() if not i.is_dir()}
            except Exception as error:  # the standard library's reader lets errors of many kinds through
                os.close(descriptor)
                raise SourceError(f"{self.file}: no readable zip: {error or type(error).__name__}") from None
            self._descriptor = descriptor
            return descriptor

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
            raise NotHereError(f"{self.file} holds no {wanted.path}")
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
        """See ``Listing.names``."""
        self._open()
        manifest = self._member(folder.child(MANIFEST_NAME), folder)
        if manifest is None:
            return set()
        base = manifest.filename.removesuffix(MANIFEST_NAME)
        return {name[len(base) :] for name in self._members if name.startswith(base)}

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


def _packed_bytes(descriptor: int, member: zipfile.ZipInfo, limit: int) -> bytes:
    """The member as it lies in the archive: after a header of 30 bytes, a name and an extra field."""
    header = os.pread(descriptor, 30, member.header_offset)
    if header[:4] != b"PK\x03\x04":
        raise OSError("no local header where the directory says")
    name_size, extra_size = struct.unpack("<HH", header[26:30])
    if member.compress_size > limit + limit // 16 + 1024:
        raise OSError(f"{member.compress_size} packed bytes for at most {limit}")
    data = os.pread(descriptor, member.compress_size, member.header_offset + 30 + name_size + extra_size)
    if len(data) != member.compress_size:
        raise OSError("truncated")
    return data
