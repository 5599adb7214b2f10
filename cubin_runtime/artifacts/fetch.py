"""Getting objects into a store: one process of a host at a time for the same object, and a crew of workers."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import (
    CorruptError,
    CubinRuntimeError,
    SourceError,
    StoreError,
)
from .crew import Crew, Outcome
from .locks import ShardLock, shard_of
from .obtain import FetchPolicy
from .pins import Pin
from .sources import Wanted
from .store import Store
from .supply import hint

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.005
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class FetchReport:
    """What a fetch did: ``chosen = present + fetched`` (``+ missing`` in a dry run, which fetches nothing).

    ``bytes`` were fetched in ``seconds``; ``about_bytes`` is the estimate for what was missing at the start
    (0: the pin says no sizes), ``saves_about_bytes`` for the files of the release that were not chosen;
    ``by_source`` counts files by the source that delivered them.
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
    saves_about_bytes: int = 0


@dataclass(slots=True)
class _Shard:
    """The objects under one lock; ``open`` counts those that workers still have."""

    name: str
    lock: ShardLock
    items: list[Wanted]
    open: int = 0
    look_at: float = 0.0


def fetch_objects(
    store: Store,
    wanted: Sequence[Wanted],
    hire: Callable[[], Crew],
    *,
    policy: FetchPolicy,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Put every object into the store that is not there; one outcome for each object.

    Other processes that want the same objects at the same time wait for this one, shard by shard, and find
    them there; the crew is hired once there is something to do. An interrupt leaves nothing half-written
    visible.

    Raises:
        StoreError: the store is full or cannot be written; the rest is abandoned.
        WorkerError: a worker process was lost; the rest is abandoned.
    """
    return _Dispatch(store, wanted, hire, policy, on_outcome).run()


class _Dispatch:
    """Takes shard after shard, hands objects to the crew, collects outcomes, keeps locks alive."""

    def __init__(
        self,
        store: Store,
        wanted: Sequence[Wanted],
        hire: Callable[[], Crew],
        policy: FetchPolicy,
        on_outcome: Callable[[Outcome], None] | None,
    ) -> None:
        self._store = store
        self._hire = hire
        self._crew: Crew | None = None
        self._policy = policy
        self._on_outcome = on_outcome
        self._outcomes: list[Outcome] = []
        self._open = 0
        self._held: dict[str, _Shard] = {}
        self._waiting = self._shards(wanted)
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
        give_up = self._policy.lock_give_up
        return deque(_Shard(s, ShardLock(root, s, give_up=give_up), list(groups[s].values())) for s in order)

    def run(self) -> list[Outcome]:
        try:
            while self._waiting or self._open:
                busy = self._take_shards()
                self._collect(_POLL_SECONDS if busy else min(1.0, self._policy.lock_touch))
                self._beat()
        finally:
            if self._crew is not None:
                self._crew.stop()
            for shard in self._held.values():
                shard.lock.release()
        return self._outcomes

    def _take_shards(self) -> bool:
        """Hand out shards with a free lock while the crew has little to do; True if a lock is busy."""
        busy = False
        for _ in range(len(self._waiting)):
            if self._crew is not None and self._open >= _AHEAD * self._crew.jobs:
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

    def _drop_present(self, shard: _Shard, *, now: bool = False) -> None:
        """Forget objects that another process has published meanwhile; looks more rarely where that costs more."""
        if not now and time.monotonic() < shard.look_at:
            return
        there = self._store.present(item.sha256 for item in shard.items if item.sha256)
        for item in shard.items:
            if item.sha256 in there:
                self._finish(Outcome(item))
        shard.items = [item for item in shard.items if item.sha256 not in there]
        shard.look_at = time.monotonic() + max(4 * _POLL_SECONDS, len(shard.items) * _LOOK_SECONDS)

    def _hand_out(self, shard: _Shard) -> None:
        self._held[shard.name] = shard
        self._drop_present(shard, now=True)
        shard.open = len(shard.items)
        self._open += shard.open
        if not shard.items:
            self._let_go(shard)
            return
        if self._crew is None:
            self._crew = self._hire()
        self._crew.give(shard.items)

    def _let_go(self, shard: _Shard) -> None:
        shard.lock.release()
        del self._held[shard.name]

    def _collect(self, timeout: float) -> None:
        """Take at least one outcome if one comes in time, and all that are there."""
        if not self._open or self._crew is None:
            if self._waiting:
                time.sleep(timeout)
            return
        for outcome in self._crew.take(timeout):
            shard = self._held[shard_of(outcome.wanted.sha256 or "")]
            self._open -= 1
            shard.open -= 1
            if not shard.open:
                self._let_go(shard)
            self._finish(outcome)

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
        ticks = 0 if self._crew is None else self._crew.ticks
        if ticks != self._beat_ticks:
            self._beat_ticks = ticks
            for shard in self._held.values():
                shard.lock.touch()


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
        saves_about_bytes=pin.estimate(max(0, pin.files - len(wanted))),
    )


def _raise_failures(pin: Pin, chosen: int, failed: Sequence[Outcome]) -> None:
    errors = [outcome.error for outcome in failed]
    kind = CorruptError if any(isinstance(error, CorruptError) for error in errors) else SourceError
    if len(failed) == 1:
        raise kind(f"{errors[0]}{hint(pin) if kind is SourceError else ''}")
    shown = "\n".join(f"  {error}" for error in errors[:5])
    more = f"\n  and {len(failed) - 5} more" if len(failed) > 5 else ""
    raise kind(f"{len(failed)} of {chosen} files were not delivered:\n{shown}{more}{hint(pin)}")
