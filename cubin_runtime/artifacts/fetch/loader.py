"""Load a file's bytes: from the store, directly from a local source, or over the network into the store."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ...errors import CorruptError, CubinRuntimeError, MissingError, SourceError, StoreError
from ...values import dataclass
from ..bounded_read import digest_of
from ..path import ArtifactPath
from ..pins.pin import Pin
from ..sources.failover import FetchPolicy
from ..sources.source import FileRequest, NotHereError
from ..sources.source_list import SourceList, with_hint
from ..store.store import Store
from ..store.store_errors import is_denied

if TYPE_CHECKING:
    from ..cubins.cubin import Cubin
    from .worker_pool import Outcome, WorkerPool

_log = logging.getLogger("cubin_runtime")


@dataclass(frozen=True, slots=True)
class Artifact:
    """The verified bytes of one file.

    ``path`` is its artifact path, ``sha256`` the digest that the pinned manifest lists and that ``data`` was found to
    have, ``data`` the bytes, in memory of their own, and ``origin`` the store or the source that they came from.
    """

    path: ArtifactPath
    sha256: str
    data: bytes = field(repr=False)
    origin: str

    @property
    def cubin(self) -> Cubin:
        """The facts that a cubin's ELF states: its architecture, and each kernel's parameters, threads and memory.

        Raises:
            CubinFormatError: the bytes are not those of a cubin.
        """
        from ..cubins.cubin import parse_cubin

        return parse_cubin(self.data)


class ArtifactLoader:
    """Artifacts from one store and its sources; the bytes of each match the digest of its request."""

    def __init__(self, store: Store, source_list: SourceList, policy: FetchPolicy) -> None:
        self._store, self._sources, self._policy = store, source_list, policy

    def in_store(self, digest: str) -> bool:
        """Return whether the store has an object; one that is closed to this user has none, as for ``at_hand``.

        Raises:
            StoreError: it cannot be read for another reason.
        """
        try:
            return self._store.has(digest)
        except StoreError as error:
            if not is_denied(error):
                raise
            return False

    def at_hand(self, pin: Pin, request: FileRequest) -> tuple[Artifact | None, list[CubinRuntimeError]]:
        """Return the artifact from the store or a local source in place, hashed; else the reasons why not."""
        digest = listed_digest(request)
        reasons: list[CubinRuntimeError] = []
        outer = sys.exc_info()[1]
        try:
            data = self._store.read(digest, request.limit)
            return Artifact(request.path, digest, data, str(self._store.root)), reasons
        except MissingError as error:
            reasons.append(_apart(error, outer))
        except CorruptError as error:
            _log.warning("%s", error)
            reasons.append(_apart(error, outer))
        except StoreError as error:
            # one that this user may not read (in another's home) is passed over like a source that lacks the file
            if not is_denied(error):
                raise
            reasons.append(_apart(error, outer))
        for source in self._sources.local_sources(pin):
            try:
                data = source.read(request)
            except (NotHereError, SourceError) as error:
                reasons.append(_apart(error, outer))
                continue
            if (actual := digest_of(data)) == digest:
                return Artifact(request.path, digest, data, source.label), reasons
            reasons.append(CorruptError(f"{source.label}: sha256 of {request.path} is {actual}, expected {digest}"))
        return None, reasons

    def over_network(self, pin: Pin, request: FileRequest) -> Artifact:
        """Into the store and from there, which logs one line with name, bytes and seconds.

        Raises:
            SourceError, CorruptError: no source delivered it.
            StoreError: the store is full or cannot be written.
        """
        began = time.monotonic()
        outcome = self.into_store(pin, [request], 1, None)[0]
        if outcome.error is not None:
            if isinstance(outcome.error, SourceError):
                raise SourceError(with_hint(outcome.error, pin))
            raise outcome.error
        data = self._store.read(listed_digest(request), request.limit)
        origin = outcome.source or str(self._store.root)
        seconds = time.monotonic() - began
        _log.info("fetched %s: %d bytes in %.3f s from %s", request.path, len(data), seconds, origin)
        return Artifact(request.path, listed_digest(request), data, origin)

    def into_store(
        self,
        pin: Pin,
        requests: Sequence[FileRequest],
        jobs: int,
        note: Callable[[Outcome], None] | None,
        beat: Callable[[], None] | None = None,
    ) -> list[Outcome]:
        """Fetch ``requests``, ``jobs`` at a time, and return the outcomes; ``note`` is told of each, ``beat`` of time.

        Raises:
            StoreError: the store is full or cannot be written.
        """
        # which a process whose store has everything does without
        from .dispatch import Dispatch
        from .process_pool import hire
        from .worker_pool import ThreadWorkerPool

        specs = self._sources.specs(pin)

        def threads() -> ThreadWorkerPool:
            return ThreadWorkerPool(
                self._store,
                lambda progress: self._sources.open(specs, progress),
                self._policy,
                min(jobs, len(requests)),
            )

        def pool() -> WorkerPool:
            return hire(self._sources.order(specs), threads, jobs, len(requests))

        return Dispatch(self._store, requests, pool, policy=self._policy, on_outcome=note, on_beat=beat).run()


def _apart(error: CubinRuntimeError, outer: BaseException | None) -> CubinRuntimeError:
    """The error without tracebacks: a frame there has the list of reasons, and the reference cycle would keep all that
    the frames of the callers have, of whoever runs an operator. ``outer`` is what callers are handling."""
    chained: BaseException | None = error
    while chained is not None and chained is not outer:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return error


def listed_digest(request: FileRequest) -> str:
    """The digest of a file that a manifest or a pin lists."""
    assert request.sha256 is not None
    return request.sha256
