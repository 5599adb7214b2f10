"""A pool of worker processes, each with threads, so that the Python code of a fetch uses more than one core."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

from ...errors import SourceError
from ..sources.source import FileRequest
from ..sources.source_list import WorkOrder
from .worker_pool import Outcome, ThreadWorkerPool, WorkerPool
from .worker_process import Message

START_SECONDS = 20.0  # others wait for the lock meanwhile, up to 30 s
SILENT_SECONDS = 60.0
STOP_SECONDS = 4.0
OBJECTS_A_PROCESS = 128
WORKER_START = ""  # code that a worker runs first; tests break things with it
_BATCH = 16
_log = logging.getLogger("cubin_runtime")


class WorkerError(SourceError):
    """A worker process of a fetch was killed or stopped responding; what it fetched is in the store."""


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    open: int = 0
    ticks: int = 0
    heard: float = field(default_factory=time.monotonic)


class ProcessWorkerPool:
    """``processes`` workers with together about ``jobs`` threads; they start with the first work given.

    Raises:
        OSError: on construction, if no process can be started.
    """

    def __init__(self, order: WorkOrder, jobs: int, processes: int) -> None:
        threads = -(-jobs // processes)
        self.jobs = threads * processes
        self._backlog: deque[FileRequest] = deque()
        self._depth = 2 * threads + _BATCH
        self._workers: list[_Worker] = []
        try:
            for _ in range(processes):
                self._workers.append(_start(replace(order, threads=threads)))
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self) -> None:
        """Wait until every worker has imported what it needs.

        Raises:
            WorkerError: one ended instead, or took too long.
        """
        while not all(worker.ready for worker in self._workers):
            self.take(1.0)

    @property
    def ticks(self) -> int:
        """See ``WorkerPool.ticks``."""
        return sum(worker.ticks for worker in self._workers)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.process.pid for worker in self._workers)

    def give(self, items: Sequence[FileRequest]) -> None:
        """See ``WorkerPool.give``."""
        self._backlog.extend(items)
        self._feed()

    def take(self, timeout: float) -> list[Outcome]:
        """See ``WorkerPool.take``."""
        outcomes: list[Outcome] = []
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                while worker.connection.poll():
                    outcomes += self._hear(worker, worker.connection.recv())
            except (EOFError, OSError):
                raise WorkerError(_lost(worker)) from None
        self._feed()
        now = time.monotonic()
        for worker in self._workers:
            if now - worker.heard > (SILENT_SECONDS if worker.ready else START_SECONDS):
                raise WorkerError(
                    f"worker process {worker.process.pid} of the fetch stopped responding; "
                    "what it fetched is in the store, run the fetch again to continue"
                )
        return outcomes

    def stop(self) -> None:
        """See ``WorkerPool.stop``; a worker that does not end by itself is killed."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def _hear(self, worker: _Worker, message: Message) -> tuple[Outcome, ...]:
        worker.ready = True
        worker.heard = time.monotonic()
        worker.ticks = message.ticks
        worker.open -= len(message.outcomes)
        for level, line in message.log:
            _log.log(level, "%s", line)
        return message.outcomes

    def _feed(self) -> None:
        """Keep every worker supplied, in batches that get smaller towards the end."""
        for worker in sorted(self._workers, key=lambda one: one.open):
            while self._backlog and worker.ready and worker.open < self._depth:
                size = max(1, min(_BATCH, len(self._backlog) // (4 * len(self._workers))))
                batch = [self._backlog.popleft() for _ in range(size)]
                try:
                    worker.connection.send(batch)
                except OSError:
                    raise WorkerError(_lost(worker)) from None
                worker.open += len(batch)


def hire(order: WorkOrder, threads: Callable[[], ThreadWorkerPool], jobs: int, objects: int) -> WorkerPool:
    """Processes where that pays (many objects, several jobs and cores), else threads.

    Where no worker process can be started (an interpreter inside another program, a limit on processes) the
    fetch goes on with threads, and a warning says why.
    """
    processes = min(jobs, objects // OBJECTS_A_PROCESS, available_cores())
    if processes < 2:
        return threads()
    try:
        pool = ProcessWorkerPool(order, jobs, processes)
    except OSError as error:
        _log.warning("fetching in one process: cannot start workers: %s", error)
        return threads()
    try:
        pool.wait_until_ready()
    except WorkerError as error:
        pool.stop()
        _log.warning("fetching in one process: %s", error)
        return threads()
    except BaseException:
        pool.stop()
        raise
    return pool


def _start(order: WorkOrder) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        # the same modules as here, wherever the caller found them; imports pass over places that are no text
        places = [place for place in sys.path if isinstance(place, str)]
        begin = f"from {__package__}.worker_process import main\nmain({theirs.fileno()})"
        code = f"import sys; sys.path[:] = {places!r}\n{WORKER_START}\n{begin}"
        flags = ["-I"] if sys.flags.isolated else []
        try:
            process = subprocess.Popen(
                [sys.executable or "", *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent, which then tells its workers
            )
        except BaseException:
            ours.close()
            raise
    connection = Connection(ours.detach())
    with suppress(OSError):  # a worker that ended at once is found by the first look at its pipe
        connection.send(order)
    return _Worker(process, connection)


def _lost(worker: _Worker) -> str:
    try:
        code: int | None = worker.process.wait(1.0)
    except subprocess.TimeoutExpired:
        code = None
    how = "closed its pipe" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return (
        f"worker process {worker.process.pid} of the fetch {how}{' (out of memory?)' if code == -9 else ''}; "
        "what it fetched is in the store, run the fetch again to continue"
    )


def available_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
