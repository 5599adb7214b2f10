"""Leftovers in a store: temporaries of killed processes and quarantined objects, removed by age."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..atomic_write import TEMPORARY
from .folders import open_folder
from .store import OBJECTS, QUARANTINE

STALE_SECONDS = 24 * 3600.0


def remove_temporaries(root: Path, *, older_than: float = STALE_SECONDS, dry_run: bool = False) -> list[int]:
    """Remove temporaries that nobody touched for so many seconds and whose process is gone; returns their sizes.

    Raises:
        OSError: the store cannot be read or changed.
    """
    sizes: list[int] = []
    with suppress(FileNotFoundError), open_folder(root, OBJECTS) as objects:
        for prefix in sorted(os.listdir(objects)):
            # a planted link or file is left to those who look at objects
            with suppress(NotADirectoryError, FileNotFoundError), open_folder(root, OBJECTS, prefix) as folder:
                sizes += _remove_old(folder, TEMPORARY, older_than, dry_run)
    return sizes


def remove_quarantined(root: Path, *, older_than: float, dry_run: bool = False) -> list[int]:
    """Remove objects that were moved aside because they were wrong so many seconds ago; returns their sizes.

    Raises:
        OSError: the store cannot be read or changed.
    """
    with suppress(FileNotFoundError), open_folder(root, QUARANTINE) as folder:
        return list(_remove_old(folder, "", older_than, dry_run))
    return []


def remove_old_temporaries(folder: int) -> None:
    """Remove those over a day old from one folder outside a store, such as a mirror's.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    for _ in _remove_old(folder, TEMPORARY, STALE_SECONDS, False):
        pass


def _remove_old(folder: int, start: str, older_than: float, dry_run: bool) -> Iterator[int]:
    """Remove files of a folder whose name starts so and that are old; yields their sizes."""
    newest = time.time() - older_than
    for name in sorted(os.listdir(folder)):
        if not name.startswith(start):
            continue
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            # a rename moves the time of change alone: that is when a thing was set aside
            if stat.S_ISDIR(status.st_mode) or max(status.st_mtime, status.st_ctime) > newest:
                continue
            if name.startswith(TEMPORARY) and _is_in_use(name):
                continue
            if not dry_run:
                os.unlink(name, dir_fd=folder)
            yield status.st_size


def _is_in_use(temporary: str) -> bool:
    """Whether another process, which the name of its temporary tells, runs on this host; elsewhere only age tells."""
    host, _, process = temporary.removeprefix(TEMPORARY).rpartition("-")[0].rpartition("-")
    if host != socket.gethostname()[:64] or not process.isdecimal() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
