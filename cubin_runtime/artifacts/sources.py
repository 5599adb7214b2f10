"""Where bytes come from: http(s), a directory tree, a store, a ``.zip`` or ``.whl``, an installed package.

No source is trusted: what it delivers counts only after its digest was compared, which is the caller's work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

from ..errors import (
    CorruptError,
    MissingError,
    SourceError,
    UsageError,
)
from .manifest import MANIFEST_NAME
from .path import ArtifactPath
from .reading import NotRegularError, open_regular, read_bounded

Kind = Literal["http", "tree", "archive", "package"]
ABSENT_SECONDS = 1.0
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


class PackageSource:
    """Any installed distribution that carries the release's tree; found by metadata, never imported."""

    local = True
    label = "package"

    def __init__(self) -> None:
        self._roots: dict[ArtifactPath, tuple[DirectorySource, ...]] = {}
        self._absent_until: dict[ArtifactPath, float] = {}

    def roots(self, folder: ArtifactPath) -> tuple[DirectorySource, ...]:
        """The trees of installed distributions that list a manifest of ``folder``.

        Remembered once found; that there is none for a second, since a look at every distribution takes a tenth.
        """
        found = self._roots.get(folder, ())
        if not found and time.monotonic() >= self._absent_until.get(folder, 0.0):
            found = tuple(DirectorySource(root) for root in _installed_roots(folder))
            if found:
                self._roots[folder] = found
            else:
                self._absent_until[folder] = time.monotonic() + ABSENT_SECONDS
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
