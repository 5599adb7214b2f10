"""The catalog of a pinned release: its files with each kernel's metadata, which filters work on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from ...errors import CorruptError, CubinRuntimeError, StoreError, UsageError
from ...values import dataclass
from ..path import ArtifactPath
from ..tables.kernel_filter import KernelFilter, KernelRow, architecture_of_name, is_stated, why_nothing_passes
from ..tables.metadata import HEADER_PATH
from ..tables.metadata_index import MetadataIndex, index_of_header
from ..tables.native_kernels import FILE_NAME, NativeKernel, parse_native_kernels

if TYPE_CHECKING:
    from ..library import Library
    from ..manifest import Manifest
    from ..pins.pin import Pin

MAX_INDEX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a release: path, digest in the manifest, and its metadata row if it has one."""

    path: ArtifactPath
    sha256: str
    row: KernelRow | None


class Catalog:
    """Files and kernels of one release.

    ``row_of`` gives the metadata of a file by its path relative to the release; ``has_metadata`` is False
    for a release that states nothing about its kernels (only globs can filter it).
    """

    def __init__(self, manifest: Manifest, row_of: Callable[[str], KernelRow | None], *, has_metadata: bool) -> None:
        self.manifest = manifest
        self.row_of = row_of
        self.has_metadata = has_metadata

    def __iter__(self) -> Iterator[Entry]:
        """All files in the manifest's order, rows decoded one by one."""
        skip = len(self.manifest.folder.text) + 1
        for path, digest in self.manifest.digests.items():
            yield Entry(path, digest, self.row_of(path.text[skip:]))

    def kept_by(self, kernel_filter: KernelFilter) -> tuple[Entry, ...]:
        """Files of the kernels that a filter keeps; an empty filter keeps every file, metadata included.

        Raises:
            UsageError: the filter looks at metadata and the release has none.
        """
        if kernel_filter.is_empty:
            return tuple(self)
        if (
            kernel_filter.needs_metadata
            and not self.has_metadata
            and (kernel_filter.needs_rows or not self._names_targets())
        ):
            raise UsageError(f"{self.manifest.folder}: has no kernel metadata, only globs (match) can filter it")
        entries = tuple(self)
        if not is_stated(kernel_filter, (entry.row for entry in entries if entry.row is not None)):
            return ()
        return tuple(entry for entry in entries if self._keeps(kernel_filter, entry))

    def _names_targets(self) -> bool:
        return any(architecture_of_name(path.name) is not None for path in self.manifest.digests)

    def chosen_by(self, kernel_filter: KernelFilter) -> tuple[Entry, ...]:
        """As ``kept_by``, but an error if the result is empty.

        Raises:
            UsageError: nothing passes; the message names the value that no kernel has, and the existing values.
        """
        if not (entries := self.kept_by(kernel_filter)):
            rows = [entry.row for entry in self if entry.row is not None]
            raise UsageError(f"{self.manifest.folder}: {why_nothing_passes(kernel_filter, rows)}")
        return entries

    def _keeps(self, kernel_filter: KernelFilter, entry: Entry) -> bool:
        if entry.row is not None:
            return kernel_filter.keeps(entry.row)
        relative = entry.path.relative_to(self.manifest.folder)
        by_name = not kernel_filter.needs_metadata if self.has_metadata else not kernel_filter.needs_rows
        return by_name and kernel_filter.keeps_file(relative)


def open_catalog(library: Library, pin: Pin, *, fetch: bool) -> Catalog:
    """The catalog of a release, from its pinned manifest and verified metadata.

    Raises:
        PinError, MissingError, SourceError: manifest or metadata are not available.
        CorruptError: the metadata cannot be parsed.
    """
    manifest = library.manifest(pin)
    if pin.path.child(FILE_NAME) in manifest.digests:
        kernels = {kernel.file: kernel for kernel in open_native_kernels(library, pin, fetch=fetch)}
        return Catalog(manifest, kernels.get, has_metadata=True)
    if pin.path.child(HEADER_PATH) in manifest.digests:
        index = open_kernel_index(library, pin, fetch=fetch)
        return Catalog(manifest, lambda file: _row_of_file(index, file), has_metadata=True)
    return Catalog(manifest, lambda _: None, has_metadata=False)


def manifest_at_hand(library: Library, pin: Pin) -> Manifest:
    """The pinned manifest from the store or a local source; neither asks a network nor makes a store.

    Raises:
        MissingError, SourceError: it is not available locally.
        PinError: what is available locally is not the pinned one.
    """
    return library.manifest(pin, network=False)


def open_native_kernels(library: Library, pin: Pin, *, fetch: bool) -> tuple[NativeKernel, ...]:
    """The rows of a native release, from its verified ``kernels.json``."""
    artifact = library.load(pin.path.child(FILE_NAME), fetch=fetch)
    return parse_native_kernels(artifact.data, artifact.path.text)


def open_kernel_index(library: Library, pin: Pin, *, fetch: bool) -> MetadataIndex:
    """The metadata index of a trtllm-gen release.

    The store's object under the pin's ``index_sha256`` if it is there (hashed when read); else the index is
    rebuilt in memory from the verified header, and kept in the store when it is the pinned one and the
    store takes it.

    Raises:
        MissingError, SourceError: neither index nor header can be had.
        CorruptError: the header does not read.
    """
    if pin.index_sha256 is not None:
        with suppress(CubinRuntimeError):  # absent, damaged or unreadable: the header decides
            return MetadataIndex(library.store.read(pin.index_sha256, MAX_INDEX_BYTES))
    header = library.load(pin.path.child(HEADER_PATH), fetch=fetch)
    data = index_of_header(header.data, header.path.text)
    if pin.index_sha256 == sha256(data).hexdigest() and os.path.isdir(library.store.root):
        with suppress(StoreError):  # a store that cannot be written only costs the next reader the same work
            library.store.put(pin.index_sha256, data)
    return MetadataIndex(data)


def chosen_paths(
    library: Library, pin: Pin, kernel_filter: KernelFilter, *, fetch: bool
) -> tuple[ArtifactPath, ...] | None:
    """Paths that a filter keeps, for fetch and verify; None for all. Metadata always comes along.

    Raises:
        UsageError: the filter keeps no kernel at all, or the release has no metadata to filter by.
    """
    if kernel_filter.is_empty:
        return None
    try:
        catalog = open_catalog(library, pin, fetch=fetch)
    except CorruptError:
        if pin.abi is not None or kernel_filter.needs_rows:
            raise
        # metadata in a form of later releases: file names tell the target
        catalog = Catalog(library.manifest(pin), lambda _: None, has_metadata=False)
    paths = [entry.path for entry in catalog.chosen_by(kernel_filter)]
    metadata = (pin.path.child(name) for name in (FILE_NAME, HEADER_PATH))
    paths += [path for path in metadata if path in catalog.manifest.digests and path not in set(paths)]
    return tuple(paths)


def _row_of_file(index: MetadataIndex, file: str) -> KernelRow | None:
    symbol = file.removesuffix(".cubin")
    return index.find(symbol) if symbol != file and symbol in index else None
