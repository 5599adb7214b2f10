"""A directory as a source: a tree of release folders, a store, or both."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from ...errors import SourceError
from ..bounded_read import NotRegularError, TooLargeError, read_regular
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath
from .source import FileRequest, NotHereError, TooMuchError


class DirectorySource:
    """A directory that holds release folders as a tree, or a store (objects by digest), or both."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.label = str(root)

    def read(self, request: FileRequest) -> bytes:
        """See ``Source.read``; links are followed (a tree may be a link farm) to regular files alone."""
        tried = [self.root / request.path.text]
        if request.sha256 is not None:
            tried.append(self.root / "sha256" / request.sha256[:2] / request.sha256)
        for file in tried:
            try:
                return _read_file(file, request.limit)
            except NotHereError:
                continue
        if not os.path.isdir(self.root):
            raise NotHereError(f"{self.root} is not a directory")
        raise NotHereError(f"{self.root} has no {request.path}")

    def names(self, folder: ArtifactPath) -> set[str]:
        """All names below the folder, links and special files included, directories not.

        Raises:
            SourceError: a folder cannot be read, so that nobody knows what is in it.
        """
        return _names_below(str(self.root / folder.text))

    def outside(self, folders: Iterable[ArtifactPath]) -> set[str]:
        """Names of all files that lie in none of the folders; one whose manifest is not here counts as absent.

        Raises:
            SourceError: a folder cannot be read.
        """
        present = {folder.text for folder in folders if os.path.isfile(self.root / folder.text / MANIFEST_NAME)}
        return _names_below(str(self.root), present)

    def where(self, path: ArtifactPath, folder: ArtifactPath) -> str | None:
        """See ``Listing.where``."""
        file = self.root / path.text
        return str(file) if os.path.isfile(file) else None

    def forget(self) -> None:
        """Do nothing: this source keeps nothing."""

    def close(self) -> None:
        """Do nothing: this source holds nothing open."""


def _names_below(base: str, without: Collection[str] = ()) -> set[str]:
    """Names of files and links below a folder; the folders ``without`` are left out."""
    names: set[str] = set()
    for directory, folders, files in os.walk(base, onerror=_fail_unless_absent):
        prefix = "" if directory == base else f"{os.path.relpath(directory, base)}/"
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        names.update(f"{prefix}{name}" for name in (*files, *links))
        folders[:] = [name for name in folders if f"{prefix}{name}" not in without]
    return names


def _fail_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise SourceError(f"{error.filename}: {error.strerror}") from None


def _read_file(file: Path, limit: int) -> bytes:
    try:
        return read_regular(file, limit)
    except (FileNotFoundError, NotADirectoryError):
        raise NotHereError(f"{file} does not exist") from None
    except TooLargeError as error:
        raise TooMuchError(str(error)) from None
    except NotRegularError as error:
        raise SourceError(str(error)) from None
    except OSError as error:
        raise SourceError(f"{file}: {error.strerror}") from None
