"""Verification of the objects of a store, or of a published tree, against a manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from ..errors import CorruptError, CubinRuntimeError, ExtraError, MissingError, SourceError, StoreError
from ..values import dataclass
from .bounded_read import digest_of
from .manifest import MANIFEST_NAME, Manifest
from .path import ArtifactPath
from .pins.pin import Pin
from .sources.source import FileRequest, Listing, NotHereError
from .store.store import Store
from .threads import map_in_threads

_BATCH = 64
_HELD_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A path and what is wrong with its bytes."""

    path: ArtifactPath
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification; paths are in manifest order.

    ``ok`` files with ``bytes`` bytes were hashed and are right. ``missing`` are not there, an error only if
    ``complete`` was asked for. ``corrupt`` are there and wrong. ``extra`` are names in a tree that no
    manifest lists: relative to the release's folder if they are in it, otherwise relative to the tree.
    """

    pin: str
    where: str
    complete: bool
    ok: int
    bytes: int
    missing: tuple[ArtifactPath, ...]
    corrupt: tuple[Problem, ...]
    extra: tuple[str, ...]

    @property
    def codes(self) -> tuple[int, ...]:
        """Exit codes of all that is wrong (the caller picks the worst); empty if nothing is."""
        return tuple(problem.exit_code for problem in self.problems)

    @property
    def problems(self) -> tuple[CubinRuntimeError, ...]:
        """An error for each kind of problem, gravest first; each names the first files."""
        problems: list[CubinRuntimeError] = []
        if self.corrupt:
            first = _listed([f"{problem.path}: {problem.reason}" for problem in self.corrupt])
            problems.append(CorruptError(f"{self.pin} in {self.where}: {len(self.corrupt)} corrupt: {first}"))
        if self.missing and self.complete:
            first = _listed([path.text for path in self.missing])
            problems.append(MissingError(f"{self.pin} in {self.where}: {len(self.missing)} missing: {first}"))
        if self.extra:
            first = _listed(self.extra)
            problems.append(
                ExtraError(f"{self.pin} in {self.where}: {len(self.extra)} that no manifest lists: {first}")
            )
        return tuple(problems)

    def raise_problems(self) -> None:
        """Raise the gravest of ``problems``; return if there is none."""
        for problem in self.problems:
            raise problem


def _listed(items: Sequence[str], most: int = 3) -> str:
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


@dataclass(frozen=True, slots=True)
class _Checked:
    """One file: its size, and why it is corrupt. The error itself would keep all that led to it in memory."""

    path: ArtifactPath
    size: int
    missing: bool = False
    fault: str | None = None


def default_jobs(held_bytes: int = 0) -> int:
    """Threads for hashing: the CPUs that this process may use, at most 16.

    Fewer where each holds a file of up to ``held_bytes`` in memory: together at most 128 MiB, but one at least.
    """
    most = _HELD_BYTES // held_bytes if held_bytes else 16
    return max(1, min(16, most, len(os.sched_getaffinity(0))))


def verify_store(
    store: Store,
    pin: Pin,
    manifest: Manifest,
    paths: Sequence[ArtifactPath],
    *,
    complete: bool,
    progress: Callable[[int], None] | None = None,
    jobs: int | None = None,
) -> VerifyReport:
    """Hash those objects of ``paths`` that the store has; wrong ones are moved to quarantine if possible.

    Raises:
        StoreError: the store cannot be read.
    """
    # something other than a regular file does not count as present, yet must not pass as "not fetched"
    present, odd = store.look(manifest.digests[path] for path in paths)
    chosen = [path for path in paths if manifest.digests[path] in present or manifest.digests[path] in odd]
    chosen.sort(key=lambda path: manifest.digests[path])
    if progress is not None and len(chosen) < len(paths):
        progress(len(paths) - len(chosen))
    buffers = threading.local()
    limit = pin.max_file_bytes

    def check(batch: Sequence[ArtifactPath]) -> Iterator[_Checked]:
        if not hasattr(buffers, "memory"):
            buffers.memory = bytearray(1 << 20)
        digests = [manifest.digests[path] for path in batch]
        for path, digest, size in zip(batch, digests, store.matches(digests, limit, buffers.memory), strict=True):
            try:
                yield _Checked(path, len(store.read(digest, limit)) if size is None else size)
            except MissingError:
                yield _Checked(path, 0, missing=True)
            except (CorruptError, StoreError) as error:
                yield _Checked(path, 0, fault=str(error))

    checked = _in_batches(check, chosen, progress, jobs)
    return _report(pin, str(store.root), complete, paths, checked, ())


def verify_tree(
    source: Listing,
    pin: Pin,
    manifest: Manifest,
    paths: Sequence[ArtifactPath],
    *,
    complete: bool,
    progress: Callable[[int], None] | None = None,
    jobs: int | None = None,
) -> VerifyReport:
    """Hash the files of ``paths`` in a published tree, and name those that the manifest does not list."""

    def check(path: ArtifactPath) -> _Checked:
        digest = manifest.digests[path]
        try:
            data = source.read(FileRequest(path, manifest.folder, None, pin.max_file_bytes))
            if (actual := digest_of(data)) != digest:
                raise CorruptError(f"sha256 is {actual}, expected {digest}")
        except NotHereError:
            return _Checked(path, 0, missing=True)
        except (CorruptError, SourceError) as error:
            return _Checked(path, 0, fault=str(error))
        return _Checked(path, len(data))

    jobs = jobs or default_jobs(pin.max_file_bytes)
    checked = _in_batches(lambda batch: map(check, batch), paths, progress, jobs)
    extra = source.names(manifest.folder) - {MANIFEST_NAME}
    extra.difference_update(path.relative_to(manifest.folder) for path in manifest.digests)
    return _report(pin, source.label, complete, paths, checked, tuple(sorted(extra)))


def _in_batches(
    check: Callable[[Sequence[ArtifactPath]], Iterable[_Checked]],
    paths: Sequence[ArtifactPath],
    progress: Callable[[int], None] | None,
    jobs: int | None,
) -> Iterator[_Checked]:
    batches = [paths[start : start + _BATCH] for start in range(0, len(paths), _BATCH)]

    def run(batch: Sequence[ArtifactPath]) -> list[_Checked]:
        done = list(check(batch))
        if progress is not None:
            progress(len(done))
        return done

    return chain.from_iterable(map_in_threads(run, batches, jobs or default_jobs()))


def _report(
    pin: Pin,
    where: str,
    complete: bool,
    paths: Sequence[ArtifactPath],
    checked: Iterable[_Checked],
    extra: tuple[str, ...],
) -> VerifyReport:
    ok = size = 0
    right: set[ArtifactPath] = set()
    faults: dict[ArtifactPath, str] = {}
    for one in checked:
        if one.fault is not None:
            faults[one.path] = one.fault
        elif not one.missing:
            right.add(one.path)
            ok, size = ok + 1, size + one.size
    corrupt = tuple(Problem(path, faults[path]) for path in paths if path in faults)
    missing = tuple(path for path in paths if path not in right and path not in faults)
    return VerifyReport(pin.name, where, complete, ok, size, missing, corrupt, extra)
