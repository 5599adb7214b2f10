"""Dispatch of a fetch: at most one process per host fetches an object at a time, with a pool of workers."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import CubinRuntimeError, StoreError
from ..sources.failover import FetchPolicy
from ..sources.source import FileRequest
from ..store.locks import ShardLock, shard_of
from ..store.store import Store
from .worker_pool import Outcome, WorkerPool

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.005
_AHEAD = 4


@dataclass(slots=True)
class _Shard:
    """The objects under one lock; ``open`` counts those that workers still have."""

    name: str
    lock: ShardLock
    items: list[FileRequest]
    open: int = 0
    look_at: float = 0.0


class Dispatch:
    """Puts objects into the store: takes shard after shard, hands them to the pool, collects outcomes, keeps locks
    alive.

    Other processes that want the same objects at the same time wait for this one, shard by shard, and find them there;
    the pool starts once there is something to do. An interrupt leaves nothing half-written visible. ``on_beat`` is
    called at least every few seconds, whatever is waited for.
    """

    def __init__(
        self,
        store: Store,
        requests: Sequence[FileRequest],
        hire: Callable[[], WorkerPool],
        *,
        policy: FetchPolicy,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._hire = hire
        self._pool: WorkerPool | None = None
        self._policy = policy
        self._on_outcome, self._on_beat = on_outcome, on_beat
        self._outcomes: list[Outcome] = []
        self._open = 0
        self._held: dict[str, _Shard] = {}
        self._waiting = self._shards(requests)
        self._beat_at = time.monotonic() + self._policy.lock_touch
        self._beat_ticks = 0

    def _shards(self, requests: Sequence[FileRequest]) -> deque[_Shard]:
        """Objects by lock, each digest once, starting at a random lock so that processes begin apart."""
        groups: dict[str, dict[str, FileRequest]] = {}
        for item in requests:
            assert item.sha256 is not None
            groups.setdefault(shard_of(item.sha256), {})[item.sha256] = item
        start = secrets.randbelow(16)
        order = sorted(groups, key=lambda shard: (int(shard, 16) - start) % 16)
        root = self._store.root
        waits = {"give_up": self._policy.lock_give_up, "longest_wait": self._policy.lock_longest_wait}
        return deque(_Shard(s, ShardLock(root, s, **waits), list(groups[s].values())) for s in order)

    def run(self) -> list[Outcome]:
        """Put every object into the store that is not there; one outcome for each object.

        Raises:
            StoreError: the store is full or cannot be written; the rest is abandoned.
            WorkerError: a worker process was lost; the rest is abandoned.
        """
        try:
            while self._waiting or self._open:
                busy = self._take_shards()
                self._collect(_POLL_SECONDS if busy else min(1.0, self._policy.lock_touch))
                self._beat()
                if self._on_beat is not None:
                    self._on_beat()
        finally:
            if self._pool is not None:
                self._pool.stop()
            for shard in self._held.values():
                shard.lock.release()
        return self._outcomes

    def _take_shards(self) -> bool:
        """Hand out shards with a free lock while the pool has little to do; True if a lock is busy."""
        busy = False
        for _ in range(len(self._waiting)):
            if self._pool is not None and self._open >= _AHEAD * self._pool.jobs:
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
        if there:
            shard.lock.saw_progress()
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
        if self._pool is None:
            self._pool = self._hire()
        self._pool.give(shard.items)

    def _let_go(self, shard: _Shard) -> None:
        shard.lock.release()
        del self._held[shard.name]

    def _collect(self, timeout: float) -> None:
        """Take at least one outcome if one comes in time, and all that are there."""
        if not self._open or self._pool is None:
            if self._waiting:
                time.sleep(timeout)
            return
        for outcome in self._pool.take(timeout):
            shard = self._held[shard_of(outcome.request.sha256 or "")]
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
        ticks = 0 if self._pool is None else self._pool.ticks
        if ticks != self._beat_ticks:
            self._beat_ticks = ticks
            for shard in self._held.values():
                shard.lock.touch()
