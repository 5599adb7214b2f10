"""Conversion of file-system errors of a store into errors of the package."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import MissingError, StoreError
from ..bounded_read import NotRegularError

IN_THE_WAY = {errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}


def missing_or_store_error(error: OSError, sha256: str, create: bool) -> MissingError | StoreError:
    """Return the error of an object's folder that could not be opened; ``create``: it was to be made."""
    place = error.filename
    if error.errno == errno.ENOENT and not create:
        return MissingError(f"the store has no object {sha256} ({place} does not exist)")
    if error.errno in IN_THE_WAY:
        return NotRegularError(f"{place} is a link or a file, expected a directory")
    return store_error(error, str(place))


def store_error(error: OSError, where: str) -> StoreError:
    """State whether the store is full, not accessible, or something else."""
    if error.errno in _FULL:
        return StoreError(f"{where}: the store is full ({error.strerror})")
    if error.errno in _NOT_WRITABLE:
        return StoreError(f"{where}: the store is not accessible ({error.strerror})")
    return StoreError(f"{where}: {error.strerror or error}")


def is_denied(error: StoreError) -> bool:
    """Return whether this user may not look there, as in another's home, and the store is otherwise in order."""
    return isinstance(error.__context__, PermissionError)


@contextmanager
def store_errors(where: str) -> Iterator[None]:
    """Turn errors of the file system into errors of the package; a missing file is a ``MissingError``."""
    try:
        yield
    except FileNotFoundError:
        raise MissingError(f"the store has no {where}") from None
    except OSError as error:
        raise store_error(error, where) from None
