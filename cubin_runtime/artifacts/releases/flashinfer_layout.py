"""A folder that FlashInfer reads its artifacts from, and the environment variables that point it there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CubinRuntimeError, MissingError, StoreError, UsageError
from ..manifest import MANIFEST_NAME
from ..store.leftovers import is_temporary
from .catalog import manifest_at_hand

if TYPE_CHECKING:
    from ..library import Library
    from ..pins.pin import Pin

_MADE_BY_FLASHINFER = (".lock", ".tmp")


def refuse_shared_folder(library: Library, folder: Path) -> None:
    """FlashInfer's downloader removes files that it does not know, so the folder must hold nothing else.

    Raises:
        UsageError: it holds links or files of no pinned release, or is the store.
        StoreError: it cannot be read.
    """
    real, store = (Path(os.path.realpath(one)) for one in (folder, library.store.root))
    if real.is_relative_to(store) or store.is_relative_to(real):
        raise UsageError(f"{folder}: FlashInfer may delete files in it, and it contains or is inside the store")
    releases = {pin.path.text: pin for pin in library.pins}
    for place, folders, names in os.walk(folder, onerror=_fail_unless_absent):
        below = Path(place).relative_to(folder).as_posix()
        listed = _listed(library, below, releases)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*links, *names):
            if is_temporary(name) or name.endswith(_MADE_BY_FLASHINFER):
                continue
            file = Path(place, name)
            if file.is_symlink():
                raise UsageError(f"{folder}: FlashInfer may delete files in it, and {file} is a link to another place")
            if not listed(f"{below}/{name}"):
                raise UsageError(
                    f"{folder}: FlashInfer may delete files in it, and it contains {file}, which "
                    "belongs to no pinned release; use a separate folder"
                )


def _fail_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _listed(library: Library, below: str, releases: Mapping[str, Pin]) -> Callable[[str], bool]:
    """Return whether a path belongs to the release of a folder; every path does where the manifest is not available."""
    pin = None
    while pin is None and below:
        pin, below = releases.get(below), below.rpartition("/")[0]
    if pin is None:
        return lambda path: False
    try:
        listed = manifest_at_hand(library, pin).digests
    except CubinRuntimeError:
        return lambda path: True
    paths, manifest = {path.text for path in listed}, pin.path.child(MANIFEST_NAME).text
    return lambda path: path in paths or path == manifest


def flashinfer_variables(folder: Path) -> dict[str, str]:
    """Names and values: its folder, its repository pointed at the same tree, downloads off; and vLLM's switch.

    vLLM leaves FlashInfer out where it sees neither the package flashinfer-cubin nor nvcc, unless the last one is set.

    Raises:
        MissingError: no release lies there.
        StoreError: the folder cannot be read.
        UsageError: the folder's name has characters that FlashInfer takes for parts of a URL, or that a line of shell
            cannot show.
    """
    if not str(folder).isprintable():
        raise UsageError(f"{folder}: expected a path of printable characters, as its name becomes a line of shell")
    if set(str(folder)) & set("?#;") or "//" in str(folder):
        raise UsageError(f"{folder}: FlashInfer handles it like a URL; expected a path without '?', '#', ';' and '//'")
    if not any(MANIFEST_NAME in names for _, _, names in os.walk(folder, onerror=_fail_unless_absent)):
        raise MissingError(f"{folder}: contains no release; 'export --layout flashinfer --out {folder}' writes them")
    return {
        "FLASHINFER_CUBIN_DIR": str(folder),
        "FLASHINFER_CUBINS_REPOSITORY": str(folder),
        "FLASHINFER_NO_DOWNLOAD": "1",
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
    }
