"""Export of releases: one zip that serves as a source, or a static tree that any web server can serve.

What is written is read through the library first, so it was hashed against the pinned manifest in private
memory; and it is published whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingError, StoreError, UsageError
from ...values import dataclass
from ..atomic_write import new_file, write_all
from ..bounded_read import NotRegularError, digest_of, open_regular, read_bounded
from ..manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from ..path import ArtifactPath
from ..sources.source import ARCHIVE_SUFFIXES
from ..store.folders import open_folder
from ..store.leftovers import remove_old_temporaries
from ..store.store import Store
from ..threads import map_in_threads
from ..verification import default_jobs
from .catalog import manifest_at_hand

if TYPE_CHECKING:
    from ..library import Library
    from ..pins.pin import Pin

Chosen = Sequence[tuple["Pin", Sequence[ArtifactPath]]]
Progress = Callable[[int], None]

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """An archive of ``files`` files with ``bytes`` bytes, manifests included; ``sha256`` is the archive's own."""

    target: str
    releases: tuple[str, ...]
    files: int
    bytes: int
    archive_bytes: int
    sha256: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """A tree of ``written + kept`` files, manifests included; ``kept`` files were already there and right."""

    target: str
    releases: tuple[str, ...]
    written: int
    kept: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Item:
    path: ArtifactPath
    sha256: str
    limit: int
    pin: Pin
    is_manifest: bool


def export_zip(
    library: Library, chosen: Chosen, target: Path, *, compress: bool = False, progress: Progress | None = None
) -> ExportReport:
    """Write files of releases, each with its whole manifest, into a ``.zip`` that is a source.

    Members are sorted and carry no times, owners or extras, so the same files give the same bytes; with
    ``compress`` only as long as the compressing library stays the same.

    Raises:
        UsageError: the name ends neither in .zip nor in .whl, by which a source is recognised.
        MissingError, CorruptError: a file is missing, or not the one in the manifest; nothing is published.
        StoreError: the archive cannot be written.
    """
    if target.suffix.lower() not in ARCHIVE_SUFFIXES:
        raise UsageError(f"{target}: expected a name that ends in {' or '.join(ARCHIVE_SUFFIXES)}")
    began = time.monotonic()
    items = _items(library, chosen)
    total = 0
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with _write_errors(target), open_folder(target.parent) as folder:
        remove_old_temporaries(folder)
        with new_file(target.name, directory=folder) as descriptor:
            with (
                open(descriptor, "r+b", closefd=False) as opened,
                zipfile.ZipFile(opened, "w", kind) as archive,
            ):
                for item in items:
                    data = _read(library, items, item)
                    _write_member(archive, _member(item, kind, len(data)), data)
                    total += len(data)
                    if progress is not None:
                        progress(1)
            sha256, size = _file_digest(descriptor)
    names = tuple(pin.name for pin, _ in chosen)
    return ExportReport(str(target), names, len(items), total, size, sha256, time.monotonic() - began)


def mirror(
    library: Library,
    chosen: Chosen,
    target: Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> MirrorReport:
    """Write files of releases as a tree, each atomically; files that are already right stay.

    A rerun continues an interrupted run. A release's manifest is written last, so a tree that has one is complete.

    Raises:
        MissingError, CorruptError: a file is missing, or not the one in the manifest.
        StoreError: the tree cannot be written.
    """
    began = time.monotonic()
    items = _items(library, chosen)
    files = [item for item in items if not item.is_manifest]
    manifests = [item for item in items if item.is_manifest]
    for parts in sorted({item.path.parts[:-1] for item in items}):
        with _write_errors(target.joinpath(*parts)), open_folder(target, *parts, create=True) as folder:
            remove_old_temporaries(folder)

    def place(item: _Item) -> tuple[bool, int]:
        done = _mirror_one(library, items, item, target)
        if progress is not None:
            progress(1)
        return done

    largest = max((item.limit for item in files), default=0)
    outcomes = map_in_threads(place, files, jobs or min(4, default_jobs(largest)))
    outcomes += map(place, manifests)
    Store(target).sync()
    written = sum(is_new for is_new, _ in outcomes)
    names = tuple(pin.name for pin, _ in chosen)
    size = sum(size for _, size in outcomes)
    return MirrorReport(str(target), names, written, len(outcomes) - written, size, time.monotonic() - began)


def _items(library: Library, chosen: Chosen) -> list[_Item]:
    """The files to write, by path: the chosen files, and the manifest of each release."""
    items: dict[ArtifactPath, _Item] = {}
    for pin, paths in chosen:
        manifest = manifest_at_hand(library, pin)
        manifest_path = pin.path.child(MANIFEST_NAME)
        items[manifest_path] = _Item(manifest_path, pin.manifest_sha256, MAX_MANIFEST_BYTES, pin, True)
        for path in paths:
            items[path] = _Item(path, manifest.digests[path], pin.max_file_bytes, pin, False)
    return [items[path] for path in sorted(items)]


def _read(library: Library, items: Sequence[_Item], item: _Item) -> bytes:
    try:
        if item.is_manifest:
            return library.manifest_bytes(item.pin)
        return library.load(item.path, fetch=False).data
    except MissingError as error:
        absent = len({one.sha256 for one in items} - library.store.present(one.sha256 for one in items))
        raise MissingError(
            f"{error}; {absent} of {len(items)} files are not in the store: run 'cubin-runtime fetch' first"
        ) from None


def _write_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, data: bytes) -> None:
    """Write in pieces: bytes that are compressed at once would be in memory twice."""
    with archive.open(member, "w") as opened:
        for start in range(0, len(data), _CHUNK):
            opened.write(memoryview(data)[start : start + _CHUNK])


def _member(item: _Item, kind: int, size: int) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(item.path.text, _LONG_AGO)
    member.create_system = 3
    member.external_attr = 0o100644 << 16
    member.compress_type = kind
    member.file_size = size
    return member


def _mirror_one(library: Library, items: Sequence[_Item], item: _Item, target: Path) -> tuple[bool, int]:
    """Return whether it was written, and its size; below ``target`` no link is followed."""
    *folders, name = item.path.parts
    with _write_errors(target / item.path.text), open_folder(target, *folders) as folder:
        size = _right_size(folder, name, item)
        if size is not None:
            return False, size
        data = _read(library, items, item)
        with new_file(name, directory=folder) as descriptor:
            write_all(descriptor, data)
    return True, len(data)


def _right_size(folder: int, name: str, item: _Item) -> int | None:
    """The size of an existing file with the right bytes; None: it has to be written."""
    try:
        descriptor, status = open_regular(name, name, directory=folder)
    except (OSError, NotRegularError):
        return None
    try:
        if status.st_size > item.limit:
            return None
        data = read_bounded(descriptor, status.st_size, item.limit, name)
    finally:
        os.close(descriptor)
    return len(data) if digest_of(data) == item.sha256 else None


@contextmanager
def _write_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{where}: cannot be written: {error.strerror or error}") from None


def _file_digest(descriptor: int) -> tuple[str, int]:
    hashed = hashlib.sha256()
    size = 0
    while piece := os.pread(descriptor, _CHUNK, size):
        hashed.update(piece)
        size += len(piece)
    os.fsync(descriptor)
    return hashed.hexdigest(), size
