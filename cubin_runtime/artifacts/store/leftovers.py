"""Leftovers in a store: temporaries of killed processes and quarantined objects, removed by age."""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..atomic_write import TEMPORARY, UNIQUE
from .folders import open_folder
from .store import OBJECTS, QUARANTINE

STALE_SECONDS = 24 * 3600.0

_TEMPORARY = re.compile(re.escape(TEMPORARY) + UNIQUE)
_QUARANTINED = re.compile("[0-9a-f]{64}-" + UNIQUE)


def is_temporary(name: str) -> bool:
    """Return whether a file's name is one that ``temporary_name`` gives, here or elsewhere."""
    return _TEMPORARY.fullmatch(name) is not None


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
                sizes += _remove_old(folder, _TEMPORARY, older_than, dry_run)
    return sizes


def remove_quarantined(root: Path, *, older_than: float, dry_run: bool = False) -> list[int]:
    """Remove objects that were moved aside because they were wrong so many seconds ago; returns their sizes.

    Raises:
        OSError: the store cannot be read or changed.
    """
    with suppress(FileNotFoundError), open_folder(root, QUARANTINE) as folder:
        return list(_remove_old(folder, _QUARANTINED, older_than, dry_run))
    return []


def remove_old_temporaries(folder: int) -> None:
    """Remove this user's temporaries of over a day from a folder outside a store, where other files may be too.

    What cannot be removed stays: no export depends on this.
    """
    with suppress(OSError):
        list(_remove_old(folder, _TEMPORARY, STALE_SECONDS, False, own_only=True))


def _remove_old(
    folder: int, names: re.Pattern[str], older_than: float, dry_run: bool, *, own_only: bool = False
) -> Iterator[int]:
    """Remove files of a folder whose whole name fits and that are old; yields their sizes.

    With ``own_only`` regular files of this user alone; a store's folders hold nothing but what the package made.
    """
    newest = time.time() - older_than
    for name in sorted(os.listdir(folder)):
        if (match := names.fullmatch(name)) is None:
            continue
        with suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            # a rename moves the time of change alone: that is when a thing was set aside
            if stat.S_ISDIR(status.st_mode) or max(status.st_mtime, status.st_ctime) > newest:
                continue
            if own_only and not (stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()):
                continue
            if names is _TEMPORARY and _runs_here(match["host"], int(match["process"])):
                continue
            if not dry_run:
                os.unlink(name, dir_fd=folder)
            yield status.st_size


def _runs_here(host: str, process: int) -> bool:
    """Return whether another process of this host runs; of other hosts only the age of their files tells."""
    if host != socket.gethostname()[:64] or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
