"""The audit log: one JSON object per line for what was fetched, loaded, verified or removed, and from where."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

from ..errors import StoreError
from .atomic_write import take_back

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_APPEND |= os.O_NONBLOCK  # a FIFO that nobody reads, or not fast enough, is an error and never blocks


class AuditLog:
    """Appends lines to a file; several processes may share one, as each write is a single ``O_APPEND`` write.

    A line has ``time`` (UTC, ISO 8601), ``pid``, ``user`` (its number) and ``event``, and what the event states.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def check(self) -> None:
        """Check that the file can be written, before anything is changed that will have to be recorded.

        Raises:
            StoreError: it cannot.
        """
        if self._file is not None:
            self._append(b"")

    def write(self, event: str, **facts: object) -> None:
        """Append one line.

        Raises:
            StoreError: the file cannot be written; what an operator asked to record is not done unrecorded.
        """
        if self._file is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        common = {"time": now, "pid": os.getpid(), "user": os.getuid(), "event": event}
        self._append((json.dumps({**common, **facts}) + "\n").encode())

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        try:
            handle = os.open(self._file, _APPEND, 0o640)
            try:
                _append(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            raise StoreError(f"{self._file}: the audit log cannot be written: {error.strerror}") from None


def _append(handle: int, line: bytes) -> None:
    """Append a whole line, or none of it, as on a full disk."""
    written = 0
    try:
        while written < len(line):
            written += os.write(handle, line[written:])
    except BaseException:
        take_back(handle, written)
        raise
