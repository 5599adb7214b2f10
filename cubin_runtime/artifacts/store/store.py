"""The store: objects named by their SHA-256 below one directory, shared by releases, processes and users.

Layout: ``sha256/ab/<64 hex>``, ``locks/<hex digit>.lock``, ``quarantine/``. A store is as untrusted as a
source: what is read from it is hashed, and nothing in it decides anything. It is correct without its locks.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path

from ...byte_sizes import size
from ...errors import CorruptError, MissingError, StoreError
from ..atomic_write import new_file, temporary_name, unique_name, write_all
from ..bounded_read import MAX_FILE_BYTES, TooLargeError, digest_of, open_regular, read_bounded
from .folders import open_folder, share_like
from .store_errors import IN_THE_WAY, missing_or_store_error, store_error, store_errors

OBJECTS = "sha256"
QUARANTINE = "quarantine"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MANY = 4  # from so many names of one folder on, listing it is cheaper than asking for each


class Store:
    """One store; makes its directories when something is first put into it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def object_path(self, sha256: str) -> Path:
        """The object's path, whether it exists or not; for messages, never for opening."""
        return self.root / OBJECTS / _checked(sha256)[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Return whether a regular file stands under the digest's name; its bytes are not looked at.

        Raises:
            StoreError: the store cannot be read, so that nobody knows.
        """
        return sha256 in self.look((sha256,))[0]

    def present(self, digests: Iterable[str]) -> set[str]:
        """Return those of ``digests`` that ``has`` would find; each folder is read once.

        Raises:
            StoreError: the store cannot be read.
        """
        return self.look(digests)[0]

    def look(self, digests: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return those of ``digests`` that are present, and those in whose place something else stands.

        Raises:
            StoreError: the store cannot be read.
        """
        groups: defaultdict[str, set[str]] = defaultdict(set)
        for digest in digests:
            groups[_checked(digest)[:2]].add(digest)
        present: set[str] = set()
        odd: set[str] = set()
        for prefix, names in groups.items():
            try:
                with open_folder(self.root, OBJECTS, prefix) as folder:
                    kinds = dict(_entries(folder, names))
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in IN_THE_WAY:
                    raise store_error(error, str(self.root / OBJECTS / prefix)) from None
                odd |= names
                continue
            present.update(name for name, is_file in kinds.items() if is_file)
            odd.update(name for name, is_file in kinds.items() if not is_file)
        return present, odd

    def objects(self) -> Iterator[tuple[str, int, float]]:
        """Digest, size in bytes and time of the last change of every object, whatever its bytes are.

        Raises:
            StoreError: the store cannot be read.
        """
        with store_errors(str(self.root)), suppress(FileNotFoundError), open_folder(self.root, OBJECTS) as objects:
            for prefix in sorted(os.listdir(objects)):
                with suppress(NotADirectoryError, FileNotFoundError), open_folder(self.root, OBJECTS, prefix) as folder:
                    for name in sorted(os.listdir(folder)):
                        with suppress(FileNotFoundError):
                            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                            if _SHA256.fullmatch(name) and stat.S_ISREG(status.st_mode):
                                yield name, status.st_size, max(status.st_mtime, status.st_ctime)

    def quarantined(self) -> set[str]:
        """Digests of the objects that were moved aside because their bytes were wrong.

        Raises:
            StoreError: the store cannot be read.
        """
        try:
            with open_folder(self.root, QUARANTINE) as aside:
                return {name.partition("-")[0] for name in os.listdir(aside)}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise store_error(error, str(self.root / QUARANTINE)) from None

    def read(self, sha256: str, limit: int, *, repair: bool = True) -> bytes:
        """The object's bytes in private memory, hashed.

        Bytes that do not fit the digest are read once more (network file systems serve stale pages); if they
        are still wrong and ``repair`` is set, the file is moved aside where the store can be written. A file that
        is right and over the limit is refused and left: it is another release's.

        Raises:
            MissingError: there is no such object.
            CorruptError: the bytes are not those of the digest, or more than ``limit`` (a ``TooLargeError``).
            NotRegularError: a link, FIFO, directory or device stands there (a ``StoreError``).
            StoreError: the file cannot be read.
        """
        where = str(self.object_path(sha256))
        with self._folder(sha256, create=False) as folder:
            for last in (False, True):
                with store_errors(where):
                    descriptor, status = open_regular(sha256, where, directory=folder)
                    try:
                        data = read_bounded(descriptor, status.st_size, limit, where)
                        actual = digest_of(data)
                        fault = f"sha256 of {where} is {actual}"
                    except TooLargeError as error:
                        actual = _digest_of_file(descriptor)
                        if actual == sha256:
                            raise
                        fault = f"{error}, and its sha256 is {actual}"
                    finally:
                        os.close(descriptor)
                if actual == sha256:
                    return data
                if last:
                    moved = self._quarantine(folder, sha256, status) if repair else None
                    outcome = f"moved to {moved}" if moved else "left in place"
                    raise CorruptError(f"{fault}, which is not its name; read twice and {outcome}")
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
                    sizes = [_matching_size(folder, one, limit, buffer) for one in members]
            except (OSError, MissingError, StoreError):  # of closing the folder too, which comes after all sizes
                sizes = [None] * len(members)
            yield from sizes

    def put(self, sha256: str, data: bytes) -> None:
        """Publish bytes whose digest the caller has just compared; atomic, replaces what stands there.

        Raises:
            StoreError: the store is full, cannot be written, or something else stands in the way.
        """
        where = str(self.object_path(sha256))
        for last in (False, False, True):
            with self._folder(sha256, create=True) as folder, store_errors(where):
                try:
                    with new_file(sha256, directory=folder, mode=0o444) as descriptor:
                        write_all(descriptor, data)
                    return
                except FileNotFoundError:  # another process is cleaning up
                    if last:
                        raise StoreError(f"{where}: was removed while it was written") from None

    def sync(self) -> None:
        """Flush the file system; once at the end of a fetch, never for each object."""
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
        """Make the store's root if it does not exist, and check that it is writable.

        Raises:
            StoreError: it cannot.
        """
        with self._folder("0" * 64, create=True) as folder, store_errors(str(self.root)):
            name = temporary_name()
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
            os.unlink(name, dir_fd=folder)

    def check_room(self, nbytes: int, files: int) -> None:
        """Compare the free space with about ``nbytes`` bytes in ``files`` files.

        Raises:
            StoreError: there is not enough.
        """
        place = self.root
        while not os.path.exists(place) and place != place.parent:
            place = place.parent
        with store_errors(str(self.root)):
            status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        if nbytes > free:
            raise StoreError(f"{self.root}: about {size(nbytes)} are needed, {size(free)} are free")
        if status.f_files and files > status.f_favail:
            raise StoreError(f"{self.root}: {files} files are needed, {status.f_favail} can be created")

    @contextmanager
    def _folder(self, sha256: str, *, create: bool) -> Iterator[int]:
        """Descriptor of the folder that holds the object."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(open_folder(self.root, OBJECTS, _checked(sha256)[:2], create=create))
            except OSError as error:
                raise missing_or_store_error(error, sha256, create) from None
            yield folder

    def _quarantine(self, folder: int, sha256: str, status: os.stat_result) -> Path | None:
        """Move the object aside if it is still the inode that was read; None where that cannot be done."""
        name = f"{sha256}-{unique_name()}"
        try:
            with open_folder(self.root, OBJECTS) as objects, open_folder(self.root, QUARANTINE, create=True) as aside:
                share_like(aside, objects)
                now = os.stat(sha256, dir_fd=folder, follow_symlinks=False)
                if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
                    return None
                os.rename(sha256, name, src_dir_fd=folder, dst_dir_fd=aside)
        except OSError:
            # one that this user may have made in vain would be in the way of those who can move objects
            with suppress(OSError), open_folder(self.root) as root:
                os.rmdir(QUARANTINE, dir_fd=root)
            return None
        return self.root / QUARANTINE / name


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


def _digest_of_file(descriptor: int) -> str:
    """The digest of a file of any size that a pin may allow, its bytes not kept."""
    hashed = hashlib.sha256()
    place = 0
    while place <= MAX_FILE_BYTES and (piece := os.pread(descriptor, 1 << 20, place)):
        hashed.update(piece)
        place += len(piece)
    return hashed.hexdigest() if place <= MAX_FILE_BYTES else f"of more than {MAX_FILE_BYTES} bytes"


def _checked(sha256: str) -> str:
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError(f"sha256: got {sha256!r}, expected 64 lowercase hex digits")
    return sha256


def _entries(folder: int, names: set[str]) -> Iterator[tuple[str, bool]]:
    """Return those of ``names`` that stand in a folder, and whether each is a regular file."""
    if len(names) >= _MANY:
        with os.scandir(folder) as entries:
            yield from ((e.name, e.is_file(follow_symlinks=False)) for e in entries if e.name in names)
        return
    for name in names:
        try:
            yield name, stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            continue
