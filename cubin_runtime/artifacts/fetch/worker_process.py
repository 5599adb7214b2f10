"""A worker process of a fetch: reads requests from a pipe, fetches with threads, writes outcomes back.

It is started as a plain new interpreter, so that the caller may hold threads, locks and a CUDA context, and
need not guard its main module. When the pipe ends (the parent is done, interrupted or killed) it ends too.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

from ...errors import CubinRuntimeError
from ...process_memory import give_back_large_blocks
from ...values import dataclass
from ..sources.source import FileRequest
from ..sources.source_list import SourceList, WorkOrder
from ..store.store import Store
from ..threads import try_start
from .worker_pool import Outcome, ThreadWorkerPool

BEAT_SECONDS = 1.0
_GATHER_SECONDS = 0.005
_GATHER = 8


@dataclass(frozen=True, slots=True)
class Message:
    """The report of a worker, at least every ``BEAT_SECONDS``: signs of progress, outcomes, lines for the log."""

    ticks: int
    outcomes: tuple[Outcome, ...] = ()
    log: tuple[tuple[int, str], ...] = ()


def main(descriptor: int) -> None:
    """Serve the pipe until it ends; the first message is a ``WorkOrder``, all others are lists of ``FileRequest``."""
    give_back_large_blocks()
    connection = Connection(descriptor)
    order: WorkOrder = connection.recv()
    if any(spec.kind == "http" for spec in order.specs):
        from ..sources import http_session  # noqa: F401  # before the first object, and once for all threads
    lines = _LogLines()
    logger = logging.getLogger("cubin_runtime")
    logger.addHandler(lines)
    logger.setLevel(order.log_level)
    logger.propagate = False
    source_list = SourceList(order.config, order.limits, order.policy)
    pool = ThreadWorkerPool(
        Store(order.config.store),
        lambda progress: source_list.open(order.specs, progress),
        order.policy,
        order.threads,
    )
    if not try_start(threading.Thread(target=_answer, args=(connection, pool, lines), daemon=True)):
        os._exit(1)  # the parent fetches without this process
    try:
        while True:
            items: list[FileRequest] = connection.recv()
            pool.give(items)
    except (EOFError, OSError):
        pool.stop()
    # a thread may still wait for a silent server; nothing of it is on disk
    os._exit(0)


def _answer(connection: Connection, pool: ThreadWorkerPool, lines: _LogLines) -> None:
    """Send outcomes, a few at a time, and a sign of life while there are none."""
    try:
        connection.send(Message(0))
        while True:
            outcomes = pool.take(BEAT_SECONDS)
            if outcomes and len(outcomes) < _GATHER:
                time.sleep(_GATHER_SECONDS)
                outcomes += pool.take(0)
            connection.send(Message(pool.ticks, tuple(map(_portable, outcomes)), lines.taken()))
    except (OSError, ValueError):
        return  # the parent is gone: the main thread sees it too


def _portable(outcome: Outcome) -> Outcome:
    """The outcome with its error whole on the other side: an unexpected one with where it came from."""
    error = outcome.error
    if error is None or isinstance(error, CubinRuntimeError):
        return outcome
    text = "in a worker process:\n" + "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined,unused-ignore]
    return replace(outcome, error=error)


class _LogLines(logging.Handler):
    """Keeps lines until they are sent to the parent, whose handlers show them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[int, str]] = []
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        with self._guard:
            self._lines.append((record.levelno, record.getMessage()))

    def taken(self) -> tuple[tuple[int, str], ...]:
        """The lines since the last call."""
        with self._guard:
            lines, self._lines = self._lines, []
        return tuple(lines)
