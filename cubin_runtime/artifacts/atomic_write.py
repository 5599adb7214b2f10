"""Files that appear whole or not at all: written through one descriptor, then renamed."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TEMPORARY = ".tmp-"
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def temporary_name() -> str:
    """A name that nobody else uses; says which process of which host made it."""
    return f"{TEMPORARY}{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(8)}"


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
