"""Garbage collection in a store: objects of a release that no other present release needs, and leftovers.

Only pinned releases are known: in a store that others share, pins that they alone have are not. Correct
without locks: a fetch publishes its manifest before it looks at what is there, and here an object is first
moved aside, then the manifests are looked at again, and only then is it removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING

from ...errors import CorruptError, MissingError, PinError, SourceError, StoreError
from ...values import dataclass
from ..atomic_write import temporary_name
from ..store.folders import open_folder
from ..store.leftovers import remove_quarantined, remove_temporaries
from ..store.locks import ShardLock, shard_of
from ..store.store import OBJECTS, Store
from .catalog import manifest_at_hand

if TYPE_CHECKING:
    from ..library import Library
    from ..pins.pin import Pin

LEFTOVER_SECONDS = 3600.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CollectReport:
    """The objects that were removed (in a dry run: would be): ``removed`` objects of ``bytes`` bytes.

    ``kept`` objects are shared with other releases present: how many each of them needs is in ``needed_by``.
    ``absent`` releases have no local manifest, so their objects are unknown.
    """

    releases: tuple[str, ...]
    removed: int
    bytes: int
    kept: int
    needed_by: Mapping[str, int]
    absent: tuple[str, ...]
    dry_run: bool


@dataclass(frozen=True, slots=True)
class LeftoverReport:
    """Temporary files of killed processes, and quarantined objects."""

    temporaries: int
    quarantined: int
    bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class UnreferencedReport:
    """Objects that no pinned release needs, and their bytes: removed, or in a dry run found."""

    removed: int
    bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ReleaseUsage:
    """Objects of a release in the store and their bytes; ``alone_bytes`` of them no other pinned release needs.

    None: its manifest is not available locally, so its objects are not known.
    """

    release: str
    objects: int | None
    bytes: int | None
    alone_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The store's objects by release; ``unreferenced`` objects are needed by no pinned release."""

    releases: tuple[ReleaseUsage, ...]
    objects: int
    bytes: int
    unreferenced: int
    unreferenced_bytes: int
    quarantined: int


def collect(library: Library, pins: Sequence[Pin], *, dry_run: bool = False) -> CollectReport:
    """Remove the releases' objects from the store, but none that another release present needs.

    A release is present if its manifest is in the store or a local source. Fetches that run at the same time
    are waited for, lock by lock; the manifest goes last, so that an interrupted collection can be run again.

    Raises:
        CorruptError: a release's manifest was damaged in the store, so its needs are unknown.
        SourceError: a local source cannot be read, which may have the manifest of another release.
        StoreError: the store cannot be read or written.
    """
    others = _Others(library, [pin for pin in library.pins if pin not in pins])
    candidates: set[str] = set()
    manifests: set[str] = set()
    absent: list[str] = []
    for pin in pins:
        if (needs := _needs(library, pin)) is None:
            absent.append(pin.name)
            continue
        candidates |= needs
        manifests.add(pin.manifest_sha256)
    store = library.store
    present, odd = store.look(candidates)
    there = present | odd
    doomed = sorted(digest for digest in there if digest not in others.needed)
    sizes = {digest: _size_of(store, digest) for digest in doomed}
    removed = list(doomed)
    if doomed and not dry_run:
        store.check_writable()
        removed = _remove_all(store, [one for one in doomed if one not in manifests], others)
        removed += _remove_all(store, [one for one in doomed if one in manifests], others)
    return CollectReport(
        releases=tuple(pin.name for pin in pins),
        removed=len(removed),
        bytes=sum(sizes[digest] for digest in removed),
        kept=len(there) - len(removed),
        needed_by=others.counts(there),
        absent=tuple(absent),
        dry_run=dry_run,
    )


def collect_leftovers(store: Store, *, older_than: float = LEFTOVER_SECONDS, dry_run: bool = False) -> LeftoverReport:
    """Remove temporaries and quarantined objects that nobody touched for ``older_than`` seconds.

    A running fetch writes a temporary in one go, so that an old one has lost its process; those of running
    processes of this host stay whatever their age. Lock files stay.

    Raises:
        StoreError: the store cannot be read or changed.
    """
    with _store_errors(str(store.root)):
        quarantined = remove_quarantined(store.root, older_than=older_than, dry_run=dry_run)
        temporaries = remove_temporaries(store.root, older_than=older_than, dry_run=dry_run)
    return LeftoverReport(len(temporaries), len(quarantined), sum(temporaries) + sum(quarantined), dry_run)


def collect_unreferenced(
    library: Library, *, older_than: float = LEFTOVER_SECONDS, dry_run: bool = False
) -> UnreferencedReport:
    """Remove objects that no pinned release needs, such as those of a release that was unpinned.

    Only pins known here are considered: in a store that others share, what they alone have pinned is removed, too.
    Objects that changed within ``older_than`` seconds stay, as a fetch may be about to need them.

    Raises:
        CorruptError, SourceError: what a pinned release needs is not known.
        StoreError: the store cannot be read or written.
    """
    others = _Others(library, library.pins)
    newest = time.time() - older_than
    sizes = {digest: size for digest, size, changed in library.store.objects() if changed <= newest}
    doomed = sorted(digest for digest in sizes if digest not in others.needed)
    removed = doomed
    if doomed and not dry_run:
        library.store.check_writable()
        removed = _remove_all(library.store, doomed, others)
    return UnreferencedReport(len(removed), sum(sizes[digest] for digest in removed), dry_run)


def store_usage(library: Library) -> StoreUsage:
    """The bytes that each pinned release takes of the store, and those that none of them needs.

    Raises:
        CorruptError, SourceError, StoreError: as ``collect_unreferenced``.
    """
    sizes = {digest: size for digest, size, _ in library.store.objects()}
    needs = {pin.name: _needs(library, pin) for pin in library.pins}
    shares: list[ReleaseUsage] = []
    for name, needed in needs.items():
        present = (needed or set()) & sizes.keys()
        others = set[str]().union(*(other or set() for one, other in needs.items() if one != name))
        alone = present - others
        shares.append(
            ReleaseUsage(
                release=name,
                objects=None if needed is None else len(present),
                bytes=None if needed is None else sum(sizes[digest] for digest in present),
                alone_bytes=None if needed is None else sum(sizes[digest] for digest in alone),
            )
        )
    unreferenced = sizes.keys() - set[str]().union(*(needed or set() for needed in needs.values()))
    return StoreUsage(
        releases=tuple(shares),
        objects=len(sizes),
        bytes=sum(sizes.values()),
        unreferenced=len(unreferenced),
        unreferenced_bytes=sum(sizes[digest] for digest in unreferenced),
        quarantined=len(library.store.quarantined()),
    )


class _Others:
    """The other pinned releases: what those that are present need, looked at again whenever asked."""

    def __init__(self, library: Library, pins: Iterable[Pin]) -> None:
        self._library = library
        self._waiting = list(pins)
        self._needs: dict[str, set[str]] = {}
        self.needed: set[str] = set()
        self.look(only_store=False)

    def look(self, *, only_store: bool) -> None:
        """Read manifests that were added since the last call."""
        for pin in list(self._waiting):
            if only_store and not self._library.store.has(pin.manifest_sha256):
                continue
            if (needs := _needs(self._library, pin)) is not None:
                self._waiting.remove(pin)
                self._needs[pin.name] = needs
                self.needed |= needs

    def counts(self, digests: set[str]) -> dict[str, int]:
        """Count how many of ``digests`` each other release needs."""
        return {name: count for name, needs in self._needs.items() if (count := len(needs & digests))}


def _needs(library: Library, pin: Pin) -> set[str] | None:
    """Every object that a release needs; None if its manifest is neither in the store nor in a local source.

    A manifest that cannot be read, or was wrong and lies in quarantine, is not absent: its release may be used.

    Raises:
        CorruptError: the store's copy is damaged, and no local source has another.
        StoreError, SourceError: the store or a local source cannot be read.
    """
    unknown = f"what {pin.name!r} needs is not known, so nothing that it may need is removed"
    try:
        in_store = library.store.has(pin.manifest_sha256)
        try:
            manifest = manifest_at_hand(library, pin)
        except (MissingError, PinError) as error:
            was_wrong = pin.manifest_sha256 in library.store.quarantined()
            if was_wrong or (in_store and isinstance(error, PinError)):
                again = f"'cubin-runtime fetch {pin.name}' fetches its manifest again"
                raise CorruptError(f"{unknown}: {error}; {again}") from None
            return None
    except (StoreError, SourceError) as error:
        kind = StoreError if isinstance(error, StoreError) else SourceError
        raise kind(f"{unknown}: {error}") from None
    listings = {pin.manifest_sha256, pin.index_sha256} - {None}
    return {*manifest.digests.values(), *(digest for digest in listings if digest is not None)}


def _remove_all(store: Store, digests: Sequence[str], others: _Others) -> list[str]:
    removed: list[str] = []
    for shard, group in groupby(digests, shard_of):
        lock = ShardLock(store.root, shard)
        while not lock.try_take():
            time.sleep(_POLL_SECONDS)
        try:
            removed += [digest for digest in group if _remove(store, digest, others)]
        finally:
            lock.release()
    return removed


def _remove(store: Store, digest: str, others: _Others) -> bool:
    """Move aside, check whether a release that needs it was added, then remove or move back."""
    aside = temporary_name()
    where = str(store.object_path(digest))
    with _store_errors(where), open_folder(store.root, OBJECTS, digest[:2]) as folder:
        try:
            os.rename(digest, aside, src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            return False
        try:
            others.look(only_store=True)
            needed = digest in others.needed
            if not needed:
                with suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=folder)
        except BaseException:  # a folder in the place of an object, too: it is not ours
            with suppress(FileNotFoundError):
                os.rename(aside, digest, src_dir_fd=folder, dst_dir_fd=folder)
            raise
        if needed:
            os.rename(aside, digest, src_dir_fd=folder, dst_dir_fd=folder)
        return not needed


def _size_of(store: Store, digest: str) -> int:
    with suppress(OSError), open_folder(store.root, OBJECTS, digest[:2]) as folder:
        return os.stat(digest, dir_fd=folder, follow_symlinks=False).st_size
    return 0


@contextmanager
def _store_errors(where: str) -> Iterator[None]:
    """Convert file-system errors into ``StoreError``."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{where}: cannot be removed: {error.strerror}") from None
