"""Files that appear whole or not at all: written through one descriptor, then renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-cubin-runtime-"
UNIQUE = r"(?P<host>.{0,64})-(?P<process>[0-9]{1,10})-[0-9a-f]{16}"  # what ``unique_name`` gives
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unique_name() -> str:
    """A name that nobody else uses; says which process of which host made it."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{os.urandom(8).hex()}"


def temporary_name() -> str:
    """A unique name of a file that takes its own name later, and that is removed as a leftover if it never does."""
    return TEMPORARY + unique_name()


@contextmanager
def new_file(name: str, *, directory: int, mode: int | None = None) -> Iterator[int]:
    """Descriptor of a new file of a folder that takes the place of ``name`` when the block ends well, else goes away.

    The temporary is never opened again by its name, which another user of the folder may have swapped. ``mode`` is
    what the file gets at its end whatever the umask; None: 0666 less the umask.

    Raises:
        OSError: the file cannot be made, written or renamed.
    """
    temporary = temporary_name()
    descriptor = os.open(temporary, _NEW_FILE, 0o666 if mode is None else 0o600, dir_fd=directory)
    try:
        try:
            yield descriptor
            if mode is not None:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)  # network file systems report a full disk here
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, however little one call takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(file: Path, data: bytes) -> None:
    """Give a user's file new content, whole or not at all; a link stays a link, and mode and owner stay.

    Raises:
        OSError: it cannot be written.
    """
    real = Path(os.path.realpath(file))
    real.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = os.stat(real)
    except FileNotFoundError:
        before = None
    folder = os.open(real.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mode = None if before is None else stat.S_IMODE(before.st_mode)
        with new_file(real.name, directory=folder, mode=mode) as descriptor:
            write_all(descriptor, data)
            if before is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fsync(descriptor)
    finally:
        os.close(folder)


@contextmanager
def changing(file: Path, seconds: float = 10.0) -> Iterator[None]:
    """Only one process at a time is in such a block for a file; where locks do not work, nobody waits.

    Raises:
        OSError: the folder or the lock beside the file cannot be made, or another process held it for ``seconds``.
    """
    real = Path(os.path.realpath(file))
    real.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(real.with_name(f".{real.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + seconds
        while not _lock(lock):
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "another process is changing it")
            time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int) -> bool:
    """Whether the lock is ours, or there are no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
