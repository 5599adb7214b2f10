"""Where bytes come from: http(s), a directory tree, a store, a ``.zip`` or ``.whl``, an installed package.

No source is trusted: what it delivers counts only after its digest was compared, which is the caller's work.
"""

from __future__ import annotations

import os
import struct
import threading
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

from ..errors import CorruptError, MissingError, SourceError, UsageError
from .manifest import MANIFEST_NAME
from .path import ArtifactPath
from .reading import NotRegularError, open_regular, read_bounded

Kind = Literal["http", "tree", "archive", "package"]
ARCHIVE_SUFFIXES = (".zip", ".whl")


class NotHereError(MissingError):
    """A source does not have what was asked for; asking it again cannot help."""


class RetryableError(SourceError):
    """A source failed in a way that may pass; ``retry_after`` is the wait that it asked for, in seconds."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing to get: ``path`` inside the release ``folder``, at most ``limit`` bytes.

    ``sha256`` is the digest that the bytes must have; None only while a release is being pinned for the first
    time.
    """

    path: ArtifactPath
    folder: ArtifactPath
    sha256: str | None
    limit: int


class Source(Protocol):
    """What every source can do; all methods may be called from several threads."""

    label: str
    local: bool

    def read(self, wanted: Wanted) -> bytes:
        """The bytes, unverified.

        Raises:
            NotHereError: the source does not have them.
            RetryableError: it failed in a way that may pass.
            SourceError: it failed in a way that will not pass.
        """

    def close(self) -> None:
        """Give back what the source holds open."""


class Listing(Protocol):
    """A source whose files can be listed, so that a published tree can be checked for extra ones."""

    def names(self, folder: ArtifactPath) -> set[str]:
        """Names of all files below ``folder``, relative to it."""

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """Where the file lies, for people; None if it is not there."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source as text and kind; picklable, so that a worker of any sort can open it."""

    kind: Kind
    text: str

    @property
    def label(self) -> str:
        """The text with user info and query removed."""
        return redact(self.text) if self.kind == "http" else self.text


def redact(url: str) -> str:
    """A URL without user info, query and fragment.

    >>> redact("https://user:secret@host.example/root?token=1")
    'https://host.example/root'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def parse_source(text: str) -> SourceSpec:
    """Tell what sort of source a text names; looks at nothing but the text.

    Raises:
        UsageError: a scheme that is neither http nor https, user info in a URL, or no host.
    """
    if text == "package":
        return SourceSpec("package", text)
    if "://" in text:
        try:
            parts = urlsplit(text)
            port_fault = parts.port == 0
        except ValueError:
            raise UsageError("source: a URL cannot be parsed (not shown, it may hold secrets)") from None
        if parts.scheme not in ("http", "https"):
            raise UsageError(f"source {redact(text)!r}: scheme {parts.scheme!r}, expected http or https")
        if not parts.hostname or port_fault:
            raise UsageError(f"source {redact(text)!r}: names no host and port")
        if "@" in parts.netloc:
            raise UsageError(f"source {redact(text)!r}: credentials belong in netrc, not in the URL")
        return SourceSpec("http", text)
    if not text or "\0" in text:
        raise UsageError(f"source {text!r}: expected a URL, a directory, a .zip or .whl, or 'package'")
    path = str(Path(text).expanduser().absolute())
    return SourceSpec("archive" if path.lower().endswith(ARCHIVE_SUFFIXES) else "tree", path)


class DirectorySource:
    """A directory that holds release folders as a tree, or a store (objects by digest), or both."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.label = str(root)

    def read(self, wanted: Wanted) -> bytes:
        """See ``Source.read``; links are followed (a tree may be a link farm) to regular files alone."""
        tried = [self.root / wanted.path.text]
        if wanted.sha256 is not None:
            tried.append(self.root / "sha256" / wanted.sha256[:2] / wanted.sha256)
        for file in tried:
            try:
                return _read_file(file, wanted.limit)
            except NotHereError:
                continue
        if not self.root.is_dir():
            raise NotHereError(f"{self.root} is no directory")
        raise NotHereError(f"{self.root} has no {wanted.path}")

    def names(self, folder: ArtifactPath) -> set[str]:
        """All names below the folder, links and special files included, directories not."""
        base = str(self.root / folder.text)
        found: set[str] = set()
        for directory, folders, files in os.walk(base):
            prefix = os.path.relpath(directory, base)
            links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
            found.update(name if prefix == "." else f"{prefix}/{name}" for name in (*files, *links))
        return found

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        file = self.root / path.text
        return str(file) if file.is_file() else None

    def close(self) -> None:
        """Nothing is held open."""


def _read_file(file: Path, limit: int) -> bytes:
    try:
        descriptor, status = open_regular(str(file), str(file), follow=True)
        try:
            return read_bounded(descriptor, status.st_size, limit, str(file))
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        raise NotHereError(f"{file} does not exist") from None
    except (NotRegularError, CorruptError) as error:
        raise SourceError(str(error)) from None
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from None


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
                with os.fdopen(os.dup(descriptor), "rb") as stream, zipfile.ZipFile(stream) as archive:
                    self._members = {i.filename: i for i in archive.infolist() if not i.is_dir()}
            except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
                os.close(descriptor)
                raise SourceError(f"{self.file}: no readable zip: {error}") from None
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
            raise SourceError(f"{where} is {member.file_size} bytes, at most {wanted.limit} are allowed")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SourceError(f"{where} is encrypted or compressed in a way that is not supported")
        try:
            packed = _packed_bytes(descriptor, member, wanted.limit)
            if member.compress_type == zipfile.ZIP_STORED:
                return packed
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, wanted.limit + 1)
        except (OSError, struct.error, zlib.error) as error:
            raise SourceError(f"{where}: the archive is damaged: {error}") from None
        if len(data) > wanted.limit:
            raise SourceError(f"{where} unpacks to over {wanted.limit} bytes")
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


class PackageSource:
    """Any installed distribution that carries the release's tree; found by metadata, never imported."""

    local = True
    label = "package"

    def __init__(self) -> None:
        self._roots: dict[ArtifactPath, tuple[DirectorySource, ...]] = {}

    def roots(self, folder: ArtifactPath) -> tuple[DirectorySource, ...]:
        """The trees of installed distributions that list a manifest of ``folder``; remembered once found."""
        found = self._roots.get(folder) or tuple(DirectorySource(root) for root in _installed_roots(folder))
        if found:
            self._roots[folder] = found
        return found

    def read(self, wanted: Wanted) -> bytes:
        """See ``Source.read``."""
        reasons: list[str] = []
        for root in self.roots(wanted.folder):
            try:
                return root.read(wanted)
            except (NotHereError, SourceError) as error:
                reasons.append(str(error))
        raise NotHereError("; ".join(reasons) or f"no installed package carries {wanted.folder}")

    def names(self, folder: ArtifactPath) -> set[str]:
        """See ``Listing.names``."""
        return {name for root in self.roots(folder) for name in root.names(folder)}

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        return next((place for r in self.roots(folder) if (place := r.where(path, folder))), None)

    def close(self) -> None:
        """Nothing is held open."""


def _installed_roots(folder: ArtifactPath) -> list[Path]:
    from importlib import metadata

    tail = f"{folder}/{MANIFEST_NAME}"
    roots: list[Path] = []
    for distribution in metadata.distributions():
        record = distribution.read_text("RECORD")
        # searched as text first: building the file objects of every installed package takes a second
        if record is not None and tail not in record:
            continue
        for file in distribution.files or ():
            if file.as_posix() == tail or file.as_posix().endswith("/" + tail):
                located = str(distribution.locate_file(file))
                roots.append(Path(located.removesuffix(tail) or "/"))
    return list(dict.fromkeys(roots))
