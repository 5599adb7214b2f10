"""The store: objects named by their SHA-256 below one directory, shared by releases, processes and users.

Layout: ``sha256/ab/<64 hex>``, ``locks/<hex digit>.lock``, ``quarantine/``. A store is as untrusted as a
source: what is read from it is hashed, and nothing in it decides anything. It is correct without its locks.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

from ...errors import CorruptError, MissingError, StoreError
from ..bounded_read import NotRegularError, digest_of, open_regular, read_bounded

OBJECTS = "sha256"
QUARANTINE = "quarantine"
STALE_SECONDS = 24 * 3600.0

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = ".tmp-"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}


class Store:
    """One store; makes its directories when something is first put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def object_path(self, sha256: str) -> Path:
        """Where the object lies, or would lie; for people and messages, never for opening."""
        return self.root / OBJECTS / _checked(sha256)[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether a regular file stands under the digest's name; its bytes are not looked at."""
        try:
            return stat.S_ISREG(os.lstat(self.object_path(sha256)).st_mode)
        except OSError:
            return False

    def present(self, digests: Iterable[str]) -> set[str]:
        """Those of ``digests`` that ``has`` would find; many at once cost one listing of each folder."""
        wanted = set(digests)
        if len(wanted) < 64:
            return {digest for digest in wanted if self.has(digest)}
        found: set[str] = set()
        for prefix in {digest[:2] for digest in wanted}:
            with suppress(OSError), os.scandir(self.root / OBJECTS / prefix) as entries:
                found.update(e.name for e in entries if e.name in wanted and e.is_file(follow_symlinks=False))
        return found

    def read(self, sha256: str, limit: int, *, repair: bool = True) -> bytes:
        """The object's bytes in private memory, hashed.

        Bytes that do not fit the digest are read once more (network file systems serve stale pages); if they
        are still wrong and ``repair`` is set, the file is moved aside where the store can be written.

        Raises:
            MissingError: there is no such object.
            CorruptError: the bytes are not those of the digest, or more than ``limit``.
            NotRegularError: a link, FIFO, directory or device stands there (a ``StoreError``).
            StoreError: the file cannot be read.
        """
        where = str(self.object_path(sha256))
        with self._folder(sha256, create=False) as folder:
            for last in (False, True):
                with _store_errors(where):
                    descriptor, status = open_regular(sha256, where, directory=folder)
                    try:
                        data = read_bounded(descriptor, status.st_size, limit, where)
                        fault = None if (found := digest_of(data)) == sha256 else f"sha256 of {where} is {found}"
                    except CorruptError as error:
                        fault = str(error)
                    finally:
                        os.close(descriptor)
                if fault is None:
                    return data
                if last:
                    moved = self._quarantine(folder, sha256, status) if repair else None
                    outcome = f"moved to {moved}" if moved else "left in place"
                    raise CorruptError(f"{fault}, which is not its name; read twice, {outcome}")
        raise AssertionError("unreachable")

    def matches(self, digests: Sequence[str], limit: int, buffer: bytearray) -> Iterator[int | None]:
        """Hash objects through ``buffer``, hand nothing over: the size of each, None if anything is unusual.

        The quick half of a verification; ``read`` then says what is wrong. Neighbours in the order of their
        digests share a folder, which is opened once for all of them.
        """
        for _, group in groupby(digests, lambda digest: digest[:2]):
            members = list(group)
            try:
                with self._folder(members[0], create=False) as folder:
                    yield from [_matching_size(folder, one, limit, buffer) for one in members]
            except (OSError, MissingError, StoreError):
                yield from [None] * len(members)

    def put(self, sha256: str, data: bytes) -> None:
        """Publish bytes whose digest the caller has just compared; atomic, replaces what stands there.

        Raises:
            StoreError: the store is full, cannot be written, or something else stands in the way.
        """
        where = str(self.object_path(sha256))
        with self._folder(sha256, create=True) as folder, _store_errors(where):
            name = f"{_TEMPORARY}{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                try:
                    _write_all(descriptor, data)
                    os.fchmod(descriptor, 0o444)
                finally:
                    os.close(descriptor)  # network file systems report a full disk here
                os.rename(name, sha256, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    def sync(self) -> None:
        """Ask the file system to write everything down; once at the end of a fetch, never for one object."""
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            ctypes.CDLL(None).syncfs(descriptor)
        except (OSError, AttributeError):
            os.sync()
        finally:
            os.close(descriptor)

    def check_writable(self) -> None:
        """Make the store's root if it lacks, and prove that it can be written.

        Raises:
            StoreError: it cannot.
        """
        with self._folder("0" * 64, create=True) as folder, _store_errors(str(self.root)):
            name = f"{_TEMPORARY}{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(8)}"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
            os.unlink(name, dir_fd=folder)

    def check_room(self, wanted: int, files: int) -> None:
        """Compare the free space with about ``wanted`` bytes in ``files`` files.

        Raises:
            StoreError: there is not enough.
        """
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        with _store_errors(str(self.root)):
            status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        if wanted > free:
            raise StoreError(f"{self.root}: about {wanted} bytes are needed, {free} are free")
        if status.f_files and files > status.f_favail:
            raise StoreError(f"{self.root}: {files} files are needed, {status.f_favail} can be made")

    def remove_stale(self) -> int:
        """Remove temporaries that killed processes left: over a day old; returns how many."""
        removed = 0
        oldest = time.time() - STALE_SECONDS
        with suppress(OSError), os.scandir(self.root / OBJECTS) as prefixes:
            for prefix in prefixes:
                with suppress(OSError), os.scandir(prefix.path) as entries:
                    for entry in entries:
                        if entry.name.startswith(_TEMPORARY):
                            with suppress(OSError):
                                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                                    os.unlink(entry.path)
                                    removed += 1
        return removed

    @contextmanager
    def _folder(self, sha256: str, *, create: bool) -> Iterator[int]:
        """Descriptor of the folder that holds the object, opened part by part so that no link is followed."""
        place = self.root
        try:
            descriptor = _open_root(place, create)
        except OSError as error:
            raise _missing_or_store_error(error, place, sha256, create) from None
        try:
            for part in (OBJECTS, _checked(sha256)[:2]):
                place = place / part
                try:
                    below = _open_folder(part, descriptor, create)
                except OSError as error:
                    raise _missing_or_store_error(error, place, sha256, create) from None
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def _quarantine(self, folder: int, sha256: str, status: os.stat_result) -> Path | None:
        """Move the object aside if it is still the inode that was read; None where that cannot be done."""
        aside = self.root / QUARANTINE
        name = f"{sha256}-{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            aside.mkdir(0o777, exist_ok=True)
            target = os.open(aside, _DIRECTORY_FLAGS)
            try:
                now = os.stat(sha256, dir_fd=folder, follow_symlinks=False)
                if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
                    return None
                os.rename(sha256, name, src_dir_fd=folder, dst_dir_fd=target)
            finally:
                os.close(target)
        except OSError:
            return None
        return aside / name


def _matching_size(folder: int, sha256: str, limit: int, buffer: bytearray) -> int | None:
    hashed = hashlib.sha256()
    total = 0
    try:
        descriptor, status = open_regular(sha256, sha256, directory=folder)
        try:
            while total < status.st_size and (count := os.readv(descriptor, (buffer,))):
                total += count
                if total > limit:
                    return None
                hashed.update(memoryview(buffer)[:count])
        finally:
            os.close(descriptor)
    except (OSError, StoreError):
        return None
    return total if total == status.st_size and hashed.hexdigest() == sha256 else None


def _checked(sha256: str) -> str:
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError(f"sha256: got {sha256!r}, expected 64 lowercase hex digits")
    return sha256


def _open_root(root: Path, create: bool) -> int:
    flags = _DIRECTORY_FLAGS & ~os.O_NOFOLLOW
    try:
        return os.open(root, flags)
    except FileNotFoundError:
        if not create:
            raise
    os.makedirs(root, 0o777, exist_ok=True)
    return os.open(root, flags)


def _open_folder(part: str, parent: int, create: bool) -> int:
    with suppress(FileNotFoundError):  # nearly always it is there
        return os.open(part, _DIRECTORY_FLAGS, dir_fd=parent)
    if create:
        with suppress(FileExistsError):
            os.mkdir(part, 0o777, dir_fd=parent)
    return os.open(part, _DIRECTORY_FLAGS, dir_fd=parent)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _missing_or_store_error(error: OSError, place: Path, sha256: str, create: bool) -> MissingError | StoreError:
    if error.errno == errno.ENOENT and not create:
        return MissingError(f"the store has no object {sha256} ({place} does not exist)")
    if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
        return NotRegularError(f"{place} is no directory of its own (a link or a file), as a store needs")
    return _as_store_error(error, str(place))


def _as_store_error(error: OSError, where: str) -> StoreError:
    if error.errno in _FULL:
        return StoreError(f"{where}: the store is full ({error.strerror})")
    if error.errno in _NOT_WRITABLE:
        return StoreError(f"{where}: the store does not allow it ({error.strerror})")
    return StoreError(f"{where}: {error.strerror or error}")


@contextmanager
def _store_errors(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise MissingError(f"the store has no {where}") from None
    except OSError as error:
        raise _as_store_error(error, where) from None
