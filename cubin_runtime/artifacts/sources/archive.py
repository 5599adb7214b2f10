"""A ``.zip`` or ``.whl`` as a source: read by position, so that threads share it without a lock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import MissingError, SourceError
from ..bounded_read import NotRegularError, TooLargeError, open_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath
from ..zip_reader import ZipDirectory, ZipError, read_directory, read_member
from .source import FileRequest, NotHereError, TooMuchError


class ArchiveSource:
    """A ``.zip`` or ``.whl`` that holds release folders at any depth; found by the manifest's place in it."""

    local = True

    def __init__(self, file: Path) -> None:
        self.file = file
        self.label = str(file)
        self._lock = threading.RLock()
        self._descriptor: int | None = None
        self._closing: weakref.finalize[[int], ArchiveSource] | None = None
        self._directory = ZipDirectory({}, frozenset())
        self._manifests: tuple[str, ...] = ()
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
                self._directory = read_directory(descriptor, str(self.file))
            except ZipError as error:
                os.close(descriptor)
                raise SourceError(str(error)) from None
            self._manifests = tuple(n for n in self._directory.places if n.rpartition("/")[2] == MANIFEST_NAME)
            self._descriptor = descriptor
            self._closing = weakref.finalize(self, os.close, descriptor)  # a library that goes away closes nothing
            return descriptor

    def _prefix(self, folder: ArtifactPath) -> str | None:
        """Return what stands in front of the paths of a release; None if its manifest is not here."""
        if folder not in self._prefixes:
            tail = f"{folder}/{MANIFEST_NAME}"
            members = [n for n in self._manifests if n == tail or n.endswith("/" + tail)]
            self._prefixes[folder] = min(members, key=len)[: -len(tail)] if members else None
        return self._prefixes[folder]

    def _member(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        prefix = self._prefix(folder)
        name = None if prefix is None else prefix + path.text
        return name if name in self._directory.places else None

    def read(self, request: FileRequest) -> bytes:
        """See ``Source.read``; stored or deflated members of at most ``request.limit`` bytes."""
        descriptor = self._open()
        name = self._member(request.path, request.folder)
        if name is None:
            raise NotHereError(f"{self.file} has no {request.path}")
        where = f"{self.file}: {request.path}"
        try:
            return read_member(descriptor, name, self._directory.places[name], request.limit, where)
        except TooLargeError as error:
            raise TooMuchError(str(error)) from None
        except ZipError as error:
            raise SourceError(str(error)) from None

    def names(self, folder: ArtifactPath) -> set[str]:
        """See ``Listing.names``; what would lead astray whoever unpacks the archive is listed wherever it lies in it.

        See ``ZipDirectory.odd``.
        """
        self._open()
        prefix = self._prefix(folder)
        if prefix is None:
            return set()
        base = f"{prefix}{folder}/"
        return {name[len(base) :] for name in self._directory.places if name.startswith(base)} | self._directory.odd

    def outside(self, folders: Iterable[ArtifactPath]) -> set[str]:
        """Names of all files that lie in none of the folders; one whose manifest is not here counts as absent."""
        self._open()
        folder_names = {folder.text for folder in folders}
        shortest: dict[str, str] = {}
        for manifest in sorted(self._manifests, key=len, reverse=True):
            base = manifest.rpartition("/")[0]
            shortest.update((tail, base) for tail in _tails(base) if tail in folder_names)
        bases = set(shortest.values())
        return {name for name in self._directory.places if bases.isdisjoint(_above(name))}

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        try:
            self._open()
        except (MissingError, SourceError):
            return None
        name = self._member(path, folder)
        return f"{self.file}!{name}" if name else None

    def forget(self) -> None:
        """Do nothing: this source keeps nothing."""

    def close(self) -> None:
        """Close the archive."""
        with self._lock:
            if self._closing is not None:
                self._closing()
                self._descriptor = self._closing = None


def _tails(folder: str) -> Iterator[str]:
    """The folder's path, and that path less its first parts."""
    while folder:
        yield folder
        folder = folder.partition("/")[2]


def _above(name: str) -> Iterator[str]:
    """The folders that hold a file."""
    while name := name.rpartition("/")[0]:
        yield name
