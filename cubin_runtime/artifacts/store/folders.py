"""The folders of a store, opened part by part so that no link inside it is ever followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..atomic_write import give_to_owner, make_folders

_FOLLOWED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _FOLLOWED | os.O_NOFOLLOW


@contextmanager
def open_folder(root: Path, *parts: str, create: bool = False) -> Iterator[int]:
    """Descriptor of the folder ``parts`` below a store's root, which alone may be a link.

    Raises:
        OSError: a part is missing (with ``create`` it is made), is not a directory, or cannot be opened; its
            ``filename`` is the part's path.
    """
    place = root
    try:
        descriptor = _open_root(root, create)
        try:
            for part in parts:
                place = place / part
                above, descriptor = descriptor, _open_part(part, descriptor, create)
                os.close(above)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        error.filename = str(place)
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_root(root: Path, create: bool) -> int:
    try:
        return os.open(root, _FOLLOWED)
    except FileNotFoundError:
        if not create:
            raise
    make_folders(root)
    return os.open(root, _FOLLOWED)


def _open_part(part: str, parent: int, create: bool) -> int:
    with suppress(FileNotFoundError):  # nearly always it is there
        return os.open(part, _FOLDER, dir_fd=parent)
    if not create:
        return os.open(part, _FOLDER, dir_fd=parent)
    is_new = False
    with suppress(FileExistsError):
        os.mkdir(part, 0o777, dir_fd=parent)
        is_new = True
    descriptor = os.open(part, _FOLDER, dir_fd=parent)
    if is_new:
        give_to_owner(descriptor, parent)
        _share_like_parent(descriptor, parent)
    return descriptor


def _share_like_parent(folder: int, parent: int) -> None:
    """A folder whose group is kept by setgid and may write is shared by that group: so is what is made in it."""
    mode = os.fstat(parent).st_mode
    if mode & stat.S_ISGID and mode & stat.S_IWGRP:
        with suppress(OSError):
            os.fchmod(folder, stat.S_IMODE(os.fstat(folder).st_mode) | stat.S_IRWXG)


def share_like(folder: int, other: int) -> None:
    """Open a folder that this user may change to those whom another one is open to, as far as that can be done."""
    mine, status = os.fstat(folder), os.fstat(other)
    if os.geteuid() in (0, mine.st_uid) and (mine.st_gid, mine.st_mode) != (status.st_gid, status.st_mode):
        with suppress(OSError):
            os.fchown(folder, -1, status.st_gid)
        with suppress(OSError):
            os.fchmod(folder, stat.S_IMODE(status.st_mode))
