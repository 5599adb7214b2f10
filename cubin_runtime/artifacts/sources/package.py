"""An installed distribution as a source, found by its metadata."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SourceError
from ..bounded_read import NotRegularError, TooLargeError, read_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath
from .directory import DirectorySource
from .source import NotHereError, TooMuchError, Wanted

if TYPE_CHECKING:
    from importlib.metadata import Distribution

ABSENT_SECONDS = 1.0
MAX_RECORD_BYTES = 64 << 20


class PackageSource:
    """Any installed distribution that contains the release's tree; found by metadata, never imported."""

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
            except TooMuchError:
                raise
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
        record = _record_of(distribution)
        # searched as text first: building the file objects of every installed package takes a second
        if record is not None and tail not in record:
            continue
        for file in distribution.files or ():
            if file.as_posix() == tail or file.as_posix().endswith("/" + tail):
                located = str(distribution.locate_file(file))
                roots.append(Path(located.removesuffix(tail) or "/"))
    return list(dict.fromkeys(roots))


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
