"""At most sixteen lock files per store: they save double work and are never needed for correctness.

A store may be shared with users who are not trusted, which ``filelock``, as ``atomic_write.changing`` uses it, does not
expect: these locks follow no symbolic link of any folder below the store, work on another user's file that can only be
read, never truncate it or change its mode, count as taken where locks do not work, and give up on a holder whose file
shows no sign of life.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from ..atomic_write import open_lock
from .folders import open_folder

LOCKS = "locks"
TOUCH_SECONDS = 5.0
GIVE_UP_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 600.0

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS}
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_log = logging.getLogger("cubin_runtime")


def shard_of(sha256: str) -> str:
    """Return which of the sixteen locks covers an object: the first hex digit of its digest."""
    return sha256[0]


class ShardLock:
    """One of a store's locks: tried without blocking; its file's time shows that the holder is alive.

    Where locks do not work (read-only, another user's, a file system without them) it counts as taken at once.
    A holder that shows no sign of life for ``give_up`` seconds is no longer waited for, and one that touches its
    lock while nothing comes of it (see ``saw_progress``) no longer than ``longest_wait``.
    """

    def __init__(
        self,
        store_root: Path,
        shard: str,
        *,
        give_up: float = GIVE_UP_SECONDS,
        longest_wait: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        self._root, self._name = store_root, f"{shard}.lock"
        self._give_up, self._longest_wait = give_up, longest_wait
        self._descriptor: int | None = None
        self._seen: float | None = None
        self._seen_at = self._waiting_since = 0.0

    def try_take(self) -> bool:
        """Take the lock if it is free, cannot work here, or was waited for too long."""
        try:
            descriptor = self._open()
        except OSError as error:
            _log.debug("continuing without the lock %s: %s", self._name, error)
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            touched = os.fstat(descriptor).st_atime
            os.close(descriptor)
            return self._waited_too_long(touched)
        except OSError as error:  # no locks on this file system, or none left
            os.close(descriptor)
            _log.debug("continuing without the lock %s: %s", self._name, error)
            return True
        self._descriptor = descriptor
        return True

    def touch(self) -> None:
        """Show waiting processes that the holder is alive."""
        if self._descriptor is not None:
            try:
                os.utime(self._descriptor)
            except OSError as error:
                _log.debug("cannot touch %s: %s", self._name, error)

    def saw_progress(self) -> None:
        """Part of the awaited work is done: restart the longest wait."""
        self._waiting_since = time.monotonic()

    def release(self) -> None:
        """Release the lock; the file stays."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # else a child that was forked meanwhile goes on holding it
            with suppress(OSError):  # it is closed whatever the call returns, and nothing was written
                os.close(descriptor)

    def _open(self) -> int:
        """The lock file, made as open to others as the umask allows; who may only read it can lock it too."""
        with open_folder(self._root, LOCKS, create=True) as folder:
            try:
                return open_lock(self._name, directory=folder, mode=0o666)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
            return os.open(self._name, _READ_ONLY, dir_fd=folder)

    def _waited_too_long(self, touched: float) -> bool:
        """Return whether the file's time stood still, or moved in vain, for too long, measured by our own clock.

        The time of access, as other versions truncate the file at every try, which moves the time of change.
        """
        now = time.monotonic()
        if self._seen is None:
            self._waiting_since = now
        if touched != self._seen:
            self._seen, self._seen_at = touched, now
        if now - self._seen_at >= self._give_up:
            _log.info("the holder of %s made no progress for %g s; continuing without it", self._name, self._give_up)
            return True
        if now - self._waiting_since >= self._longest_wait:
            _log.info("%s was held for %g s without a result; continuing without it", self._name, self._longest_wait)
            return True
        return False
