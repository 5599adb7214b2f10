"""The sources of bytes: http(s), a directory tree, a store, a ``.zip`` or ``.whl``, an installed package.

No source is trusted: what it delivers counts only after its digest was compared, which is the caller's work.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal, Protocol
from urllib.parse import urlsplit, urlunsplit

from ...config import local_path
from ...errors import MissingError, SourceError, UsageError
from ...values import dataclass
from ..path import ArtifactPath

Kind = Literal["http", "tree", "archive", "package"]
ARCHIVE_SUFFIXES = (".zip", ".whl")
_LIKE_A_URL = re.compile(r"[a-z][a-z0-9+.-]+:/|https?:|//[^/]*@|[^/]*:[^/]*@", re.IGNORECASE)


class NotHereError(MissingError):
    """A source does not have the file; a retry cannot help."""


class RetryableError(SourceError):
    """A temporary failure of a source; ``retry_after`` is the delay that it requested, in seconds."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooMuchError(SourceError):
    """A source has more bytes for a file than its limit."""


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One file to read: ``path`` inside the release ``folder``, at most ``limit`` bytes.

    ``sha256`` is the digest that the bytes must have; None only while a release is being pinned for the first
    time.
    """

    path: ArtifactPath
    folder: ArtifactPath
    sha256: str | None
    limit: int


class Source(Protocol):
    """The methods of every source; all methods may be called from several threads."""

    label: str
    local: bool

    def read(self, request: FileRequest) -> bytes:
        """The bytes, unverified.

        Raises:
            NotHereError: the source does not have them.
            RetryableError: a temporary failure.
            TooMuchError: it has more than ``request.limit`` bytes for it.
            SourceError: a permanent failure.
        """

    def forget(self) -> None:
        """Drop what is kept of a file that broke off, as its rest will not be asked for."""

    def close(self) -> None:
        """Close what the source has open."""


class Listing(Source, Protocol):
    """A source whose files can be listed, so that a published tree can be checked for extra ones."""

    def names(self, folder: ArtifactPath) -> set[str]:
        """Names of all files below ``folder``, relative to it."""

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """The file's location for messages; None if it does not exist."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source as text and kind; picklable, so that a worker of any sort can open it."""

    kind: Kind
    text: str = field(repr=False)

    @property
    def label(self) -> str:
        """The text with user info and query removed."""
        return redact(self.text) if self.kind == "http" else self.text


def redact(url: str) -> str:
    """A URL without user info, query and fragment.

    >>> redact("https://user:secret@host.example/root?token=1")
    'https://host.example/root'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a URL that cannot be parsed"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def may_hold_secrets(source: str) -> bool:
    """Return whether a source's text has parts that may be credentials, so that it must not be stored."""
    return "://" in source and redact(source) != source


def parse_source(text: str) -> SourceSpec:
    """Determine the kind of source that a text names, from the text alone.

    Raises:
        UsageError: a scheme that is neither http nor https, user info in a URL, no host, or a URL that lacks a slash.
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
    if _LIKE_A_URL.match(text):
        raise UsageError(
            "source: looks like a URL without '://' (not shown, it may hold secrets); expected 'https://HOST/...', or "
            "'./' in front of a folder of that name"
        )
    if not text or "\0" in text:
        raise UsageError(f"source {text!r}: expected a URL, a directory, a .zip or .whl, or 'package'")
    path = str(local_path(text, "source"))
    return SourceSpec("archive" if path.lower().endswith(ARCHIVE_SUFFIXES) else "tree", path)
