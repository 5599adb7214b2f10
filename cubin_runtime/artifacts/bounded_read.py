"""Bounded reads of regular files into private memory: the only way bytes on disk enter the package."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from ..errors import CorruptError, StoreError

MAX_FILE_BYTES = 1 << 30  # the upper bound of max_file_bytes in pins
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class NotRegularError(StoreError):
    """Something other than a regular file is where a file was expected."""


class TooLargeError(CorruptError):
    """A file has more bytes than are allowed for it; its digest is unknown."""


def kind_of(mode: int) -> str:
    """Name the kind of file that a mode states, for messages."""
    return _KINDS.get(stat.S_IFMT(mode), "a regular file")


def open_regular(
    name: str, where: str, *, directory: int | None = None, follow: bool = False
) -> tuple[int, os.stat_result]:
    """Open a regular file without ever blocking; the caller closes the descriptor.

    Args:
        name: path, or a name below ``directory``.
        where: how messages name the file.
        directory: descriptor of the folder that ``name`` is relative to.
        follow: whether a symbolic link as the last part is followed.

    Raises:
        NotRegularError: a link (unless followed), FIFO, socket, device or directory.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(name, OPEN_FLAGS | (0 if follow else os.O_NOFOLLOW), dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotRegularError(f"{where} is a symbolic link, expected a regular file") from None
        if error.errno == errno.ENXIO:
            raise NotRegularError(f"{where} is a socket or device, expected a regular file") from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise NotRegularError(f"{where} is {kind_of(status.st_mode)}, expected a regular file")
    return descriptor, status


def read_bounded(descriptor: int, size: int, limit: int, where: str) -> bytes:
    """Read a whole file of about ``size`` bytes into private memory.

    Raises:
        TooLargeError: it has more than ``limit`` bytes.
        OSError: the read failed.
    """
    if size > limit:
        raise TooLargeError(f"{where} is {size} bytes, at most {limit} are allowed")
    chunks: list[bytes] = []
    total = 0
    while chunk := os.read(descriptor, max(size + 1 - total, 4096)):
        chunks.append(chunk)
        total += len(chunk)
        if total > limit:
            raise TooLargeError(f"{where} grew over {limit} bytes while it was read")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def read_regular(file: Path, limit: int) -> bytes:
    """The bytes of a file that somebody names, through links, if it is a regular one; never blocks on a FIFO.

    Raises:
        NotRegularError: a FIFO, socket, device or directory.
        TooLargeError: it has more than ``limit`` bytes.
        OSError: it cannot be opened or read.
    """
    descriptor, status = open_regular(str(file), str(file), follow=True)
    try:
        return read_bounded(descriptor, status.st_size, limit, str(file))
    finally:
        os.close(descriptor)


def digest_of(data: bytes) -> str:
    """Lowercase hex SHA-256."""
    return hashlib.sha256(data).hexdigest()
