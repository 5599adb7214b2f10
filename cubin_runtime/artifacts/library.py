"""Entry point to the artifacts: pins, manifests and verified bytes of one configuration."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import CorruptError, CubinRuntimeError, MissingError, PinError, StoreError, UsageError
from ..values import dataclass
from .audit_log import AuditLog
from .fetch.loader import Artifact, ArtifactLoader, listed_digest
from .fetch.pinned_manifests import PinnedManifests, manifest_request
from .manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from .path import ArtifactPath
from .pins.pin import Pin
from .pins.pin_set import PinSet, refuse_trust_in_store
from .sources.failover import FetchPolicy
from .sources.http_pace import HttpLimits
from .sources.source import FileRequest, NotHereError, may_hold_secrets, parse_source
from .sources.source_list import SourceList, hint, remedy
from .store.leftovers import remove_temporaries
from .store.store import Store

if TYPE_CHECKING:
    from .fetch.report import FetchReport as FetchReport
    from .fetch.worker_pool import Outcome
    from .verification import VerifyReport

__all__ = ["Library", "Place", "hint", "may_hold_secrets", "parse_source"]

DEFAULT_JOBS = 8
_log = logging.getLogger("cubin_runtime")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an artifact: in the store, or in a local source; its bytes were not read."""

    path: ArtifactPath
    sha256: str
    kind: str
    location: str


class Library:
    """Everything about artifacts for one configuration; safe to share between threads.

    Raises:
        PinError: on construction, if a pin file cannot be read or two pins disagree.
        UsageError: on construction, if a configured source is invalid.
    """

    def __init__(
        self,
        config: Config,
        *,
        builtin_pins: Path | None = None,
        limits: HttpLimits | None = None,
        policy: FetchPolicy | None = None,
    ) -> None:
        self.config = config
        refuse_trust_in_store(config)
        self.pins = PinSet.from_files(builtin_pins, *config.pin_files, keys=config.pin_keys, state=config.pin_state)
        self.store = Store(config.store)
        self.audit = AuditLog(config.audit)
        policy = policy or FetchPolicy.of(config.network)
        self._sources = SourceList(config, limits or HttpLimits.of(config.network), policy)
        self._loader = ArtifactLoader(self.store, self._sources, policy)
        self._manifests = PinnedManifests(self.store, self._sources, self._loader)

    def __repr__(self) -> str:
        return f"Library(store={str(self.config.store)!r}, pins={[pin.name for pin in self.pins]})"

    # -- what is pinned

    @property
    def configured_sources(self) -> tuple[str, ...]:
        """The sources of the configuration, paths made absolute; empty where each pin's own are asked."""
        return () if self.config.sources is None else tuple(spec.text for spec in self._sources.specs(None))

    def manifest(self, pin: Pin, *, network: bool = True) -> Manifest:
        """The release's manifest, from the store or else from the sources; parsed once per process.

        Raises:
            PinError: what the sources have is not the pinned manifest.
            SourceError: no source has one.
            MissingError: it is neither in the store nor in a local source (``network`` false).
        """
        return self._manifests.of(pin, network=network)

    def manifest_bytes(self, pin: Pin) -> bytes:
        """The manifest's own bytes, as they were hashed against the pin; raises what ``manifest`` does."""
        self.manifest(pin)
        return self._manifests.bytes_of(pin)

    def select(self, pin: Pin, below: ArtifactPath | str | None = None) -> tuple[ArtifactPath, ...]:
        """Paths of the manifest: all, the one named, or all below the folder named.

        Raises:
            PinError: the manifest lists no such path.
        """
        manifest = self.manifest(pin)
        if below is None:
            return tuple(manifest.digests)
        path = ArtifactPath(below.removesuffix("/")) if isinstance(below, str) else below
        if path == pin.path:
            return tuple(manifest.digests)
        if path in manifest.digests:
            return (path,)
        paths = tuple(one for one in manifest.digests if one.is_below(path))
        if not paths:
            raise PinError(f"{path.text!r} is not in the manifest of {pin.name!r}")
        return paths

    def has_folder(self, pin: Pin, path: str, *, network: bool = True) -> bool:
        """Return whether a path is a folder of the release; raises what ``manifest`` does."""
        folder = f"{path}/"
        return any(one.text.startswith(folder) for one in self.manifest(pin, network=network).digests)

    # -- bytes

    def load(self, path: ArtifactPath | str, *, fetch: bool) -> Artifact:
        """The verified bytes of one artifact: from the store, else in place from a local source.

        With ``fetch`` also over the network and into the store, which logs one line with name, bytes and
        seconds.

        Raises:
            PinError: no pin covers the path, or the manifest does not list it.
            MissingError: it is not there (``fetch`` false).
            CorruptError: what is there has another digest, and nothing better was found.
            SourceError: no source delivered it (``fetch`` true).
            StoreError: the store holds something other than a regular file, or cannot be written.
        """
        path = ArtifactPath(path) if isinstance(path, str) else path
        pin = self.pins.covering(path)
        try:
            artifact = self._load(pin, path, fetch)
        except CubinRuntimeError as error:
            self.audit.write("load", path=path.text, error=str(error))
            raise
        facts = {"sha256": artifact.sha256, "bytes": len(artifact.data), "source": artifact.origin}
        self.audit.write("load", path=path.text, **facts)
        return artifact

    def _load(self, pin: Pin, path: ArtifactPath, fetch: bool) -> Artifact:
        request = self._request(pin, self.manifest(pin, network=fetch), path)
        data, reasons = self._loader.at_hand(pin, request)
        if data is not None:
            return data
        if not fetch:
            if (
                reason := next((one for one in reasons if isinstance(one, CorruptError | StoreError)), None)
            ) is not None:
                raise reason
            places = ", ".join([str(self.store.root), *(s.label for s in self._sources.local_sources(pin))])
            raise MissingError(f"{path} is not in {places}; {remedy(pin, path.text, self._sources.specs(pin))}")
        return self._loader.over_network(pin, request)

    def where(self, path: ArtifactPath | str) -> tuple[Place, ...]:
        """Return where ``load`` would find an artifact; nothing is read.

        Raises:
            PinError: no pin covers the path, or the manifest does not list it.
            StoreError: the store cannot be read, other than by being closed to this user.
        """
        path = ArtifactPath(path) if isinstance(path, str) else path
        pin = self.pins.covering(path)
        request = self._request(pin, self.manifest(pin, network=False), path)
        digest = listed_digest(request)
        places: list[Place] = []
        if self._loader.in_store(digest):
            places.append(Place(path, digest, "store", str(self.store.object_path(digest))))
        for source in self._sources.local_sources(pin):
            location = source.where(path, pin.path)
            if location is not None:
                places.append(Place(path, digest, "source", location))
        return tuple(places)

    def fetch(
        self,
        pin: Pin,
        paths: Iterable[ArtifactPath] | None = None,
        *,
        jobs: int = DEFAULT_JOBS,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> FetchReport:
        """Put files of a release (None: all) into the store; what stands there already is left alone.

        ``jobs`` files are fetched at a time; where there are many of them and more than one core, by worker
        processes with threads. ``progress`` is called with the number of files done (0 now and then, while nothing
        comes), ``on_bytes`` before that with the size of each object that came. A dry run compares the
        manifest with the store, and fetches the manifest alone, from a source that a fetch would ask.

        Raises:
            PinError: the manifest is not the pinned one, or does not list a path.
            SourceError, CorruptError: some files could not be fetched; the others are in the store.
            StoreError: the store is full or cannot be written.
        """
        from .fetch.report import report_of  # which loading does without, as the modules of verification

        if jobs < 1:
            raise UsageError(f"jobs: got {jobs}, expected at least 1")
        began = time.monotonic()
        manifest = self.manifest(pin)
        chosen = tuple(manifest.digests) if paths is None else tuple(dict.fromkeys(paths))
        requests = [self._request(pin, manifest, path) for path in chosen]
        if not dry_run and not self.store.has(pin.manifest_sha256):
            # before looking at what is there: whoever collects garbage looks at manifests after moving things aside
            self.store.check_writable()
            self.store.put(pin.manifest_sha256, self._manifests.bytes_of(pin))
        there = self.store.present(listed_digest(one) for one in requests)
        missing = [one for one in requests if one.sha256 not in there]
        about = pin.estimate(len(missing))
        outcomes: list[Outcome] = []
        if progress is not None:
            progress(len(requests) - len(missing))
        if dry_run and missing:
            self._sources.read(self._sources.specs(pin), manifest_request(pin))  # or a fetch would fail
        if not dry_run and missing:
            self.audit.check()
            self.store.check_writable()
            self.store.check_room(about, len(missing))
            with suppress(OSError):  # housekeeping, which no fetch depends on
                remove_temporaries(self.store.root)
            names = Counter(listed_digest(one) for one in missing)

            def note(outcome: Outcome) -> None:
                self._record(pin, outcome)
                if on_bytes is not None and outcome.source is not None:
                    on_bytes(outcome.size)
                if progress is not None:
                    progress(names[listed_digest(outcome.request)])

            beat = None if progress is None else partial(progress, 0)
            outcomes = self._loader.into_store(pin, missing, jobs, note, beat)
            self.store.sync()
        return report_of(pin, requests, missing, about, outcomes, time.monotonic() - began, dry_run)

    def verify(
        self,
        pin: Pin,
        paths: Iterable[ArtifactPath] | None = None,
        *,
        complete: bool = False,
        progress: Callable[[int], None] | None = None,
        tree: str | None = None,
        jobs: int | None = None,
    ) -> VerifyReport:
        """Hash what the store has of a release (None: all of it), or what a published ``tree`` has.

        ``tree`` is a directory, a ``.zip`` or ``.whl``, or ``package``; its own manifest must be the pinned
        one. Extra files are looked for in trees alone, and only when ``paths`` is None; in a directory or a ``.zip``
        that is whatever no pinned release lists, beside the release too.

        Raises:
            PinError: the tree's manifest is not the pinned one, or a manifest does not list a path.
            MissingError: the tree has no manifest.
        """
        report = self._verify(pin, paths, complete=complete, progress=progress, tree=tree, jobs=jobs)
        counts = {"ok": report.ok, "bytes": report.bytes, "missing": len(report.missing)}
        corrupt = [problem.path.text for problem in report.corrupt]
        self.audit.write(
            "verify", release=pin.name, where=report.where, **counts, corrupt=corrupt, extra=list(report.extra)
        )
        return report

    def _verify(
        self,
        pin: Pin,
        paths: Iterable[ArtifactPath] | None,
        *,
        complete: bool,
        progress: Callable[[int], None] | None,
        tree: str | None,
        jobs: int | None,
    ) -> VerifyReport:
        from .sources.archive import ArchiveSource
        from .sources.directory import DirectorySource
        from .verification import verify_store, verify_tree

        if tree is None:
            manifest = self.manifest(pin)
            chosen = self._chosen(pin, manifest, paths)
            return verify_store(self.store, pin, manifest, chosen, complete=complete, progress=progress, jobs=jobs)
        spec = parse_source(tree)
        if spec.kind == "http":
            raise UsageError(f"tree {spec.label!r}: expected a directory, a .zip or .whl, or 'package'")
        source = self._sources.local(spec)
        try:
            data = source.read(manifest_request(pin, any_digest=True))
            manifest = self._manifests.keep(pin, data, source.label)
        except NotHereError as error:
            raise MissingError(f"{source.label}: no manifest of {pin.name!r}: {error}") from None
        chosen = self._chosen(pin, manifest, paths)
        report = verify_tree(source, pin, manifest, chosen, complete=complete, progress=progress, jobs=jobs)
        if paths is not None:
            return replace(report, extra=())
        if isinstance(source, DirectorySource) or (
            isinstance(source, ArchiveSource) and source.file.suffix.lower() == ".zip"
        ):
            # a wheel holds a package besides the release; a zip or a mirror of releases holds nothing else
            outside = source.outside(one.path for one in self.pins)
            return replace(report, extra=(*report.extra, *sorted(outside)))
        return report

    def discover(self, folder: ArtifactPath, sha256: str | None) -> tuple[bytes, str]:
        """The bytes of the manifest of a folder that is not pinned yet, and the source that has them.

        With ``sha256`` only bytes of that digest count.

        Raises:
            PinError: the sources have one with another digest.
            SourceError: no source has one.
        """
        request = FileRequest(folder.child(MANIFEST_NAME), folder, sha256, MAX_MANIFEST_BYTES)
        try:
            return self._sources.read(self._sources.specs(None), request)
        except CorruptError as error:
            raise PinError(str(error)) from None

    # -- inside

    def _record(self, pin: Pin, outcome: Outcome) -> None:
        """One file of a fetch, in the log and in the audit log, with the source that it came from."""
        path, digest = outcome.request.path.text, listed_digest(outcome.request)
        if outcome.error is not None:
            self.audit.write("fetch", release=pin.name, path=path, sha256=digest, error=str(outcome.error))
        elif outcome.source is not None:
            _log.info("fetched %s: %d bytes from %s", path, outcome.size, outcome.source)
            facts = {"sha256": digest, "bytes": outcome.size, "source": outcome.source, "store": str(self.store.root)}
            self.audit.write("fetch", release=pin.name, path=path, **facts)

    def _request(self, pin: Pin, manifest: Manifest, path: ArtifactPath) -> FileRequest:
        digest = manifest.digests.get(path)
        if digest is None:
            raise PinError(f"{path.text!r} is not in the manifest of {pin.name!r}")
        return FileRequest(path, pin.path, digest, pin.max_file_bytes)

    def _chosen(self, pin: Pin, manifest: Manifest, paths: Iterable[ArtifactPath] | None) -> tuple[ArtifactPath, ...]:
        if paths is None:
            return tuple(manifest.digests)
        return tuple(self._request(pin, manifest, path).path for path in dict.fromkeys(paths))
