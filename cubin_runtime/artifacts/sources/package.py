"""An installed distribution as a source, found by its metadata."""

from __future__ import annotations

import csv
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SourceError
from ..bounded_read import NotRegularError, TooLargeError, read_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath
from .directory import DirectorySource
from .source import FileRequest, NotHereError, TooMuchError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

ABSENT_SECONDS = 1.0
MAX_RECORD_BYTES = 64 << 20
_log = logging.getLogger("cubin_runtime")


class PackageSource:
    """Any installed distribution that contains the release's tree; found by metadata, never imported."""

    local = True
    label = "package"

    def __init__(self) -> None:
        self._roots: dict[ArtifactPath, tuple[DirectorySource, ...]] = {}
        self._installed: tuple[str, ...] = ()
        self._installed_until = 0.0
        self._lock = threading.Lock()

    def roots(self, folder: ArtifactPath) -> tuple[DirectorySource, ...]:
        """The trees of installed distributions that list a manifest of ``folder``.

        Remembered once found. What is installed is looked up at most once a second, for all folders together, since a
        look at every distribution takes a tenth.
        """
        with self._lock:
            roots = self._roots.get(folder, ())
            if not roots:
                if time.monotonic() >= self._installed_until:
                    self._installed = tuple(_installed_manifests())
                    self._installed_until = time.monotonic() + ABSENT_SECONDS
                tail = f"/{folder}/{MANIFEST_NAME}"
                places = dict.fromkeys(file.removesuffix(tail) for file in self._installed if file.endswith(tail))
                roots = tuple(DirectorySource(Path(place or "/")) for place in places)
                if roots:
                    self._roots[folder] = roots
            return roots

    def read(self, request: FileRequest) -> bytes:
        """See ``Source.read``."""
        reasons: list[str] = []
        for root in self.roots(request.folder):
            try:
                return root.read(request)
            except TooMuchError:
                raise
            except (NotHereError, SourceError) as error:
                reasons.append(str(error))
        raise NotHereError("; ".join(reasons) or f"no installed package carries {request.folder}")

    def names(self, folder: ArtifactPath) -> set[str]:
        """See ``Listing.names``."""
        return {name for root in self.roots(folder) for name in root.names(folder)}

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        return next((place for r in self.roots(folder) if (place := r.where(path, folder))), None)

    def forget(self) -> None:
        """Do nothing: this source keeps nothing."""

    def close(self) -> None:
        """Do nothing: this source holds nothing open."""


def _installed_manifests() -> Iterator[str]:
    """The paths of all files of installed distributions that have a manifest's name.

    Metadata of any package may be damaged in any way: that package then carries nothing.
    """
    from importlib import metadata

    distributions = iter(metadata.distributions())
    while True:
        try:
            distribution = next(distributions, None)
            if distribution is None:
                return
            yield from list(_manifests_of(distribution))
        except Exception as error:
            _log.debug("the metadata of an installed package cannot be read: %s", error)


def _manifests_of(distribution: Distribution) -> Iterator[str]:
    record = _record_of(distribution)
    if record is None:
        names = [file.as_posix() for file in distribution.files or ()]
    else:
        # searched as text first: building the file objects of every installed package takes a second
        names = [row[0] for row in csv.reader(line for line in record.splitlines() if MANIFEST_NAME in line) if row]
    for name in names:
        if name.rpartition("/")[2] == MANIFEST_NAME:
            yield str(Path(str(distribution.locate_file(name))).absolute())


def _record_of(distribution: Distribution) -> str | None:
    """The text of RECORD; None if there is none, nothing if it cannot be read: importlib would wait for a FIFO."""
    folder = getattr(distribution, "_path", None)
    if not isinstance(folder, Path):  # in a zip
        return distribution.read_text("RECORD")
    try:
        return read_regular(folder / "RECORD", MAX_RECORD_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):  # the metadata of an egg
        return None
    except (OSError, NotRegularError, TooLargeError):
        return ""
