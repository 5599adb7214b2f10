"""A folder that FlashInfer reads its artifacts from, and the environment variables that point it there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingError, StoreError, UsageError
from ..manifest import MANIFEST_NAME
from ..path import ArtifactPath, PathError
from ..store.leftovers import is_temporary

if TYPE_CHECKING:
    from ..library import Library

_MADE_BY_FLASHINFER = (".lock", ".tmp")


def refuse_shared_folder(library: Library, folder: Path) -> None:
    """FlashInfer's downloader removes files that it does not know, so the folder must hold nothing else.

    Raises:
        UsageError: it holds files that no pinned release covers, or is the store.
        StoreError: it cannot be read.
    """
    real, store = (Path(os.path.realpath(one)) for one in (folder, library.store.root))
    if real.is_relative_to(store) or store.is_relative_to(real):
        raise UsageError(f"{folder}: FlashInfer may delete files in it, and it contains or is inside the store")
    releases = [pin.path for pin in library.pins]
    for place, _, names in os.walk(folder, onerror=_fail_unless_absent):
        below = Path(place).relative_to(folder).as_posix()
        for name in names:
            if is_temporary(name) or name.endswith(_MADE_BY_FLASHINFER):
                continue
            if not _is_covered(below, releases):
                raise UsageError(
                    f"{folder}: FlashInfer may delete files in it, and it contains {Path(place, name)}, which "
                    "belongs to no pinned release; use a separate folder"
                )


def _fail_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _is_covered(below: str, releases: list[ArtifactPath]) -> bool:
    try:
        path = ArtifactPath(below)
    except PathError:
        return False
    return any(path == release or path.is_below(release) for release in releases)


def flashinfer_variables(folder: Path) -> dict[str, str]:
    """Names and values: its folder, its repository pointed at the same tree, downloads off.

    Raises:
        MissingError: no release lies there.
        StoreError: the folder cannot be read.
        UsageError: the folder's name has characters that FlashInfer takes for parts of a URL.
    """
    if set(str(folder)) & set("?#;") or "//" in str(folder):
        raise UsageError(f"{folder}: FlashInfer handles it like a URL; expected a path without '?', '#', ';' and '//'")
    if not any(MANIFEST_NAME in names for _, _, names in os.walk(folder, onerror=_fail_unless_absent)):
        raise MissingError(f"{folder}: contains no release; 'export --layout flashinfer --out {folder}' writes them")
    return {
        "FLASHINFER_CUBIN_DIR": str(folder),
        "FLASHINFER_CUBINS_REPOSITORY": str(folder),
        "FLASHINFER_NO_DOWNLOAD": "1",
    }
