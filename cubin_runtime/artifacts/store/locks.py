"""At most sixteen lock files a store: they save double work and are never needed for correctness."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock

LOCKS = "locks"
TOUCH_SECONDS = 5.0
GIVE_UP_SECONDS = 30.0

_log = logging.getLogger("cubin_runtime")


def shard_of(sha256: str) -> str:
    """Which of the sixteen locks covers an object: the first hex digit of its digest."""
    return sha256[0]


class ShardLock:
    """One of a store's locks: tried without blocking; its file's time shows that the holder is alive.

    Where locks do not work (read-only, another user's, no support for them) it counts as taken at once.
    """

    def __init__(self, store_root: Path, shard: str, *, give_up: float = GIVE_UP_SECONDS) -> None:
        self.file = store_root / LOCKS / f"{shard}.lock"
        self._give_up = give_up
        self._lock: FileLock | None = None
        self._seen: float | None = None
        self._since = time.monotonic()

    def try_take(self) -> bool:
        """Take the lock if it is free, cannot work here, or its holder showed no progress for too long."""
        from filelock import FileLock, Timeout

        try:
            if self._lock is None:
                mode = _prepare(self.file)
                self._lock = FileLock(self.file, mode=mode, thread_local=False)
            self._lock.acquire(blocking=False)
        except Timeout:
            return self._holder_is_stuck()
        except (OSError, NotImplementedError, RuntimeError) as error:
            _log.debug("going on without the lock %s: %s", self.file, error)
            self._lock = None
            return True
        return True

    def touch(self) -> None:
        """Show those who wait that the holder is alive."""
        if self._lock is not None and self._lock.is_locked:
            try:
                os.utime(self.file)
            except OSError as error:
                _log.debug("cannot touch %s: %s", self.file, error)

    def release(self) -> None:
        """Give the lock back; the file stays."""
        if self._lock is not None and self._lock.is_locked:
            self._lock.release()

    def _holder_is_stuck(self) -> bool:
        """Whether the file's time stood still for the whole wait, measured by our own clock."""
        try:
            # not the time of change: some versions of filelock truncate at every try, which moves that
            seen = os.stat(self.file, follow_symlinks=False).st_atime
        except OSError:
            return True
        now = time.monotonic()
        if self._seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since < self._give_up:
            return False
        _log.info("the holder of %s shows no progress for %g s; going on without it", self.file, self._give_up)
        return True


def _prepare(file: Path) -> int:
    """Make the lock file as open to others as the umask allows, and return its mode."""
    file.parent.mkdir(0o777, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        return os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
