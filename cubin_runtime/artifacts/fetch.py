"""Getting objects into a store: several workers, one process at a time for the same object."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CorruptError, CubinRuntimeError, SourceError, StoreError
from .locks import ShardLock, shard_of
from .obtain import FetchPolicy, Progress, obtain
from .path import ArtifactPath
from .pins import Pin
from .sources import Source, Wanted
from .store import Store
from .supply import hint

_POLL_SECONDS = 0.05
_log = logging.getLogger("cubin_runtime")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one object: ``source`` None: it was there already; ``error`` None: it is there now."""

    wanted: Wanted
    source: str | None = None
    size: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What a fetch did: ``chosen = present + fetched`` (``+ missing`` in a dry run, which fetches nothing).

    ``bytes`` were fetched in ``seconds``; ``about_bytes`` is the estimate for what was missing at the start
    (0: the pin says no sizes); ``by_source`` counts files by the source that delivered them.
    """

    pin: str
    chosen: int
    present: int
    missing: int
    fetched: int
    bytes: int
    about_bytes: int
    seconds: float
    dry_run: bool
    by_source: Mapping[str, int]
    failures: tuple[tuple[ArtifactPath, str], ...] = ()


@dataclass(slots=True)
class _Shard:
    """The objects under one lock; ``open`` counts those that workers still have."""

    lock: ShardLock
    items: list[Wanted]
    open: int = 0
    looked: float = field(default=0.0)


def fetch_objects(
    store: Store,
    wanted: Sequence[Wanted],
    open_sources: Callable[[Progress], Sequence[Source]],
    *,
    jobs: int,
    policy: FetchPolicy,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Put every object into the store that is not there, with ``jobs`` workers; one outcome for each object.

    Each worker opens its own sources. Other processes that want the same objects at the same time wait for
    this one, shard by shard, and find them there. An interrupt leaves nothing half-written visible.

    Raises:
        StoreError: the store is full or cannot be written; the rest is abandoned.
    """
    return _Dispatch(store, wanted, open_sources, jobs, policy, on_outcome).run()


class _Dispatch:
    """Takes shard after shard, hands objects to the workers, collects outcomes, keeps locks alive."""

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted],
        open_sources: Callable[[Progress], Sequence[Source]],
        jobs: int,
        policy: FetchPolicy,
        on_outcome: Callable[[Outcome], None] | None,
    ) -> None:
        self._store = store
        self._open_sources = open_sources
        self._policy = policy
        self._progress = Progress(policy)
        self._on_outcome = on_outcome
        self._tasks: queue.SimpleQueue[tuple[_Shard, Wanted] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[_Shard, Outcome]] = queue.SimpleQueue()
        self._outcomes: list[Outcome] = []
        self._open = 0
        self._held: list[_Shard] = []
        self._waiting = self._shards(wanted)
        self._jobs = max(1, min(jobs, len(wanted)))
        self._beat_at = time.monotonic() + self._policy.lock_touch
        self._beat_ticks = 0

    def _shards(self, wanted: Sequence[Wanted]) -> deque[_Shard]:
        """Objects by lock, each digest once, starting at a random lock so that processes begin apart."""
        groups: dict[str, dict[str, Wanted]] = {}
        for item in wanted:
            assert item.sha256 is not None
            groups.setdefault(shard_of(item.sha256), {})[item.sha256] = item
        start = secrets.randbelow(16)
        order = sorted(groups, key=lambda shard: (int(shard, 16) - start) % 16)
        root = self._store.root
        return deque(
            _Shard(ShardLock(root, s, give_up=self._policy.lock_give_up), list(groups[s].values())) for s in order
        )

    def run(self) -> list[Outcome]:
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._jobs)]
        for thread in threads:
            thread.start()
        try:
            while self._waiting or self._open:
                busy = self._take_shards()
                self._collect(_POLL_SECONDS if busy else min(1.0, self._policy.lock_touch))
                self._beat()
        finally:
            self._progress.stop.set()
            for _ in threads:
                self._tasks.put(None)
            for shard in self._held:
                shard.lock.release()
            deadline = time.monotonic() + 2.0
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return self._outcomes

    def _take_shards(self) -> bool:
        """Hand out shards with a free lock while the workers have little to do; True if a lock is busy."""
        busy = False
        for _ in range(len(self._waiting)):
            if self._open >= 2 * self._jobs:
                break
            shard = self._waiting.popleft()
            if shard.lock.try_take():
                self._hand_out(shard)
                continue
            self._drop_present(shard)
            if shard.items:
                busy = True
                self._waiting.append(shard)
        return busy

    def _drop_present(self, shard: _Shard) -> None:
        """Forget objects that another process has published meanwhile."""
        now = time.monotonic()
        if now - shard.looked < 4 * _POLL_SECONDS:
            return
        shard.looked = now
        there = self._store.present(item.sha256 for item in shard.items if item.sha256)
        for item in shard.items:
            if item.sha256 in there:
                self._finish(Outcome(item))
        shard.items = [item for item in shard.items if item.sha256 not in there]

    def _hand_out(self, shard: _Shard) -> None:
        shard.looked = 0.0
        self._drop_present(shard)
        shard.open = len(shard.items)
        self._open += shard.open
        if not shard.items:
            shard.lock.release()
            return
        self._held.append(shard)
        for item in shard.items:
            self._tasks.put((shard, item))

    def _collect(self, timeout: float) -> None:
        """Take at least one outcome if one comes in time, and all that are there."""
        if not self._open:
            if self._waiting:
                time.sleep(timeout)
            return
        try:
            shard, outcome = self._results.get(timeout=timeout)
            while True:
                self._open -= 1
                shard.open -= 1
                if not shard.open:
                    shard.lock.release()
                    self._held.remove(shard)
                self._finish(outcome)
                shard, outcome = self._results.get_nowait()
        except queue.Empty:
            return

    def _finish(self, outcome: Outcome) -> None:
        if outcome.error is not None and (
            isinstance(outcome.error, StoreError) or not isinstance(outcome.error, CubinRuntimeError)
        ):
            raise outcome.error
        self._outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _beat(self) -> None:
        """Touch the locks that are held, but only if something came since the last time."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + self._policy.lock_touch
        if self._progress.ticks != self._beat_ticks:
            self._beat_ticks = self._progress.ticks
            for shard in self._held:
                shard.lock.touch()

    def _work(self) -> None:
        """One worker: its own sources, one object after another, until the fetch ends or stops."""
        sources: Sequence[Source] = ()
        opened = False
        while (task := self._tasks.get()) is not None and not self._progress.stop.is_set():
            shard, wanted = task
            try:
                if not opened:
                    sources, opened = self._open_sources(self._progress), True
                data, label = obtain(wanted, sources, self._policy, self._progress)
                assert wanted.sha256 is not None
                self._store.put(wanted.sha256, data)
                outcome = Outcome(wanted, label, len(data))
            except Exception as error:
                outcome = Outcome(wanted, error=error)
            self._results.put((shard, outcome))
        for source in sources:
            if not source.local:
                source.close()


def report_of(
    pin: Pin,
    wanted: Sequence[Wanted],
    missing: Sequence[Wanted],
    about: int,
    outcomes: Sequence[Outcome],
    seconds: float,
    dry_run: bool,
) -> FetchReport:
    """Count files (several may be one object), and raise if one was not delivered."""
    names = Counter(one.sha256 for one in missing)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        _raise_failures(pin, len(wanted), failed)
    by_source: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.source is not None:
            by_source[outcome.source] += names[outcome.wanted.sha256]
    fetched = sum(by_source.values())
    return FetchReport(
        pin=pin.name,
        chosen=len(wanted),
        present=len(wanted) - (len(missing) if dry_run else fetched),
        missing=len(missing) if dry_run else 0,
        fetched=fetched,
        bytes=sum(outcome.size for outcome in outcomes),
        about_bytes=about,
        seconds=seconds,
        dry_run=dry_run,
        by_source=dict(by_source),
    )


def _raise_failures(pin: Pin, chosen: int, failed: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in failed]
    kind = CorruptError if any(isinstance(error, CorruptError) for error in errors) else SourceError
    if len(failed) == 1:
        raise kind(f"{errors[0]}{hint(pin) if kind is SourceError else ''}")
    shown = "\n".join(f"  {error}" for error in errors[:5])
    more = f"\n  and {len(failed) - 5} more" if len(failed) > 5 else ""
    raise kind(f"{len(failed)} of {chosen} files were not delivered:\n{shown}{more}{hint(pin)}")
