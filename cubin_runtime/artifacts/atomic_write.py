"""Files that appear whole or not at all: written through one descriptor, then renamed."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-cubin-runtime-"
UNIQUE = r"(?P<host>.{0,64})-(?P<process>[0-9]{1,10})-[0-9a-f]{16}"  # the form of a ``unique_name``
# Errors of file systems that have no locks, or none left.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
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


def take_back(descriptor: int, count: int) -> None:
    """Cut off the last bytes that were appended, where not all fitted: what comes next would continue them.

    A pipe keeps them, and so does a file in which another process has written behind them.
    """
    with suppress(OSError):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - count)


def give_to_owner(descriptor: int, folder: int) -> None:
    """Give what was just made in a folder to the folder's owner, where root made it.

    Otherwise ``sudo`` with a user's HOME leaves files there that the user can never change.
    """
    if os.geteuid() == 0:
        owner = os.fstat(folder)
        with suppress(OSError):  # a server that makes root nobody
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def replace_file(file: Path, data: bytes) -> None:
    """Give a user's file new content; see ``replacing``."""
    with replacing(file) as descriptor:
        write_all(descriptor, data)


@contextmanager
def replacing(file: Path) -> Iterator[int]:
    """Descriptor of a user's file's new content, which it gets when the block ends well, whole or not at all.

    A link stays a link, and mode and owner stay.

    Raises:
        OSError: it cannot be written.
    """
    real = Path(os.path.realpath(file))
    with _open_parent(real) as folder:
        try:
            before = os.stat(real.name, dir_fd=folder)
        except FileNotFoundError:
            before = None
        mode = None if before is None else stat.S_IMODE(before.st_mode)
        with new_file(real.name, directory=folder, mode=mode) as descriptor:
            yield descriptor
            if before is None:
                give_to_owner(descriptor, folder)
            else:
                with suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fsync(descriptor)


@contextmanager
def changing(file: Path, seconds: float = 10.0) -> Iterator[None]:
    """Only one process at a time is in such a block for a file; where locks do not work, nobody waits.

    The folder is the user's own, so that an ordinary lock file serves; ``store.locks`` has those of shared folders.

    Raises:
        OSError: the folder or the lock beside the file cannot be made, or another process held it for ``seconds``.
    """
    from filelock import FileLock, Timeout  # asyncio comes with it, which a process that only launches does without

    real = Path(os.path.realpath(file))
    place = _lock_beside(real)
    with _open_parent(real) as folder:
        try:
            os.close(open_lock(place.name, directory=folder, mode=0o600))
        except OSError as error:
            error.filename = str(place)
            raise
    lock = FileLock(place, mode=0o600, fallback_to_soft=False)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.02)
    except Timeout:
        raise TimeoutError(errno.ETIMEDOUT, "another process is changing it", str(place)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def why_not_changed(file: Path) -> str | None:
    """Return the reason why this user cannot change a file by ``changing`` and ``replace_file``, or None.

    Nothing is made to find out.
    """
    real = Path(os.path.realpath(file))
    lock = _lock_beside(real)
    folder = next(one for one in real.parents if os.path.lexists(one))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not a folder that can be written"
    if os.path.lexists(lock) and (os.path.islink(lock) or not os.access(lock, os.R_OK | os.W_OK)):
        return f"{lock} cannot be opened"
    return None


def open_lock(name: str, *, directory: int, mode: int) -> int:
    """Descriptor of a lock file of a folder, made if there is none; no link is followed.

    Raises:
        OSError: it cannot be made, or not be opened for writing.
    """
    try:
        descriptor = os.open(name, _NEW_FILE, mode, dir_fd=directory)
    except FileExistsError:
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    give_to_owner(descriptor, directory)
    return descriptor


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing, with the owner that ``give_to_owner`` tells.

    Raises:
        OSError: one cannot be made.
    """
    if os.path.isdir(folder):
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
        with _opened(folder.parent) as above, _opened(folder) as new_folder:
            give_to_owner(new_folder, above)


@contextmanager
def _open_parent(file: Path) -> Iterator[int]:
    """Descriptor of the folder of a file, made if need be."""
    make_folders(file.parent)
    with _opened(file.parent) as folder:
        yield folder


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock_beside(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")
