"""Worker pools take objects to fetch and return outcomes: the interface, and the pool of threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ...values import dataclass
from ..sources.failover import FetchPolicy, Progress, read_with_failover
from ..sources.source import FileRequest, Source
from ..store.store import Store
from ..threads import try_start

_JOIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one object: ``source`` None: it was there already; ``error`` None: it is there now."""

    request: FileRequest
    source: str | None = None
    size: int = 0
    error: Exception | None = None


class WorkerPool(Protocol):
    """Workers that put objects into one store; used by one thread at a time."""

    jobs: int
    """The number of objects that are worked on at a time."""

    @property
    def ticks(self) -> int:
        """A counter that grows with received bytes: it shows progress, not only that workers are alive."""

    def give(self, items: Sequence[FileRequest]) -> None:
        """Queue work; returns at once."""

    def take(self, timeout: float) -> list[Outcome]:
        """All outcomes that are there; waits ``timeout`` seconds for the first one.

        Raises:
            WorkerError: a worker was lost, so that not all outcomes will come.
        """

    def stop(self) -> None:
        """End soon, objects that are being published included; leaves no temporary behind."""


class ThreadWorkerPool:
    """Threads of this process, each with sources of its own."""

    def __init__(
        self,
        store: Store,
        open_sources: Callable[[Progress], Sequence[Source]],
        policy: FetchPolicy,
        jobs: int,
    ) -> None:
        self.jobs = jobs
        self._store = store
        self._open_sources = open_sources
        self._policy = policy
        self._progress = Progress(policy, jobs)
        self._tasks: queue.SimpleQueue[FileRequest | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def ticks(self) -> int:
        """See ``WorkerPool.ticks``."""
        return self._progress.ticks

    def give(self, items: Sequence[FileRequest]) -> None:
        """See ``WorkerPool.give``."""
        for item in items:
            if len(self._threads) < self.jobs:
                self._threads.append(threading.Thread(target=self._work, args=(self._tasks,), daemon=True))
                if not try_start(self._threads[-1]):
                    self._threads.pop()
            self._tasks.put(item)

    def take(self, timeout: float) -> list[Outcome]:
        """See ``WorkerPool.take``; where the system gives no thread, it works on one object itself."""
        if not self._threads:
            self._work_here()
        outcomes: list[Outcome] = []
        try:
            outcomes.append(self._results.get(timeout=timeout) if timeout > 0 else self._results.get_nowait())
            while True:
                outcomes.append(self._results.get_nowait())
        except queue.Empty:
            return outcomes

    def stop(self) -> None:
        """See ``WorkerPool.stop``."""
        self._progress.stop.set()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work_here(self) -> None:
        with suppress(queue.Empty):
            one: queue.SimpleQueue[FileRequest | None] = queue.SimpleQueue()
            one.put(self._tasks.get_nowait())
            one.put(None)
            self._work(one)

    def _work(self, tasks: queue.SimpleQueue[FileRequest | None]) -> None:
        """One worker: its own sources, one object after another, until the fetch ends or stops."""
        sources: Sequence[Source] = ()
        opened = False
        while (request := tasks.get()) is not None and not self._progress.stop.is_set():
            try:
                if not opened:
                    sources, opened = self._open_sources(self._progress), True
                data, label = read_with_failover(request, sources, self._policy, self._progress)
                assert request.sha256 is not None
                self._store.put(request.sha256, data)
                outcome = Outcome(request, label, len(data))
                del data  # else each waiting worker keeps its last object
            except Exception as error:
                outcome = Outcome(request, error=error)
            finally:
                self._progress.large_is_done()
            self._results.put(outcome)
        for source in sources:
            if not source.local:
                source.close()
