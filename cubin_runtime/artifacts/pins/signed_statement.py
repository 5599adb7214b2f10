"""The ``[signed]`` table of a pin file, which makes the return of an old signed file detectable.

A table ``[signed]`` at the top of the file: ``file``, the name it is signed for; ``version``, an integer that grows
with each signing; and optionally ``expires``, a date-time with a time zone. The newest version seen of each name and
key is recorded in the user's state folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...errors import CubinRuntimeError, PinError
from ...values import dataclass
from ..atomic_write import changing, replace_file, why_not_changed
from ..bounded_read import read_regular
from .bounded_toml import read_toml

STATEMENT = "signed"
MAX_STATE_BYTES = 1 << 20
MAX_VERSION = 2**63 - 1


class SignatureError(PinError):
    """A pin file is unsigned, signed by nobody in force, out of date or for another name; or a key cannot be read."""


@dataclass(frozen=True, slots=True)
class Statement:
    """The file's name, its version, and when it expires (None: never)."""

    file: str
    version: int
    expires: datetime | None


def read_statement(data: bytes, origin: str) -> Statement:
    """The ``[signed]`` table of a pin file whose signature was checked.

    Raises:
        SignatureError: there is none, or a value is outside its domain.
    """
    try:
        table = read_toml(data, origin).get(STATEMENT)
    except PinError as error:
        raise SignatureError(str(error)) from None
    if not isinstance(table, dict):
        raise SignatureError(
            f"{origin}: is signed but has no [{STATEMENT}] table, expected one with file, version and perhaps expires"
        )
    if unknown := sorted(set(table) - {"file", "version", "expires"}):
        raise SignatureError(f"{origin}: [{STATEMENT}] has unknown keys {', '.join(unknown)}")
    file, version, expires = table.get("file"), table.get("version"), table.get("expires")
    if not isinstance(file, str):
        raise SignatureError(f"{origin}: [{STATEMENT}] file is {file!r}, expected the file's name")
    if isinstance(version, bool) or not isinstance(version, int):
        raise SignatureError(f"{origin}: [{STATEMENT}] version is {version!r}, expected an integer")
    if not 1 <= version <= MAX_VERSION:
        raise SignatureError(f"{origin}: [{STATEMENT}] version is not between 1 and {MAX_VERSION}")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise SignatureError(
            f"{origin}: [{STATEMENT}] expires is {str(expires)!r}, expected a date-time with a time zone, "
            "for example 2027-01-31T00:00:00Z"
        )
    return Statement(file, version, expires)


def check_statement(file: Path, data: bytes, keys: Sequence[str], state: Path | None) -> None:
    """Compare the table of a signed pin file with its name, the clock and the newest version seen.

    Versions are counted for each of ``keys`` (names of those that signed it) and the name that the file is signed
    for, wherever it lies. ``state`` is the file that records them; None: versions are not recorded.

    Raises:
        SignatureError: it is signed for another name, has expired, or is older than one seen before; or the record
            cannot be read, or not be written, without which an older file would be taken the next time.
    """
    said = read_statement(data, str(file))
    if said.file != file.name:
        raise SignatureError(f"{file}: is signed for {said.file!r}, expected {file.name!r}")
    if said.expires is not None and said.expires <= datetime.now(timezone.utc):
        raise SignatureError(f"{file}: expired at {said.expires.isoformat()}; install a newer one")
    if state is None:
        return
    signed = [f"{key} {said.file}" for key in keys]
    if _is_newer(file, said, signed, _versions(state), state):
        _record(file, said, signed, state)


def why_not_recorded(state: Path) -> str | None:
    """Return the reason why a newer version could not be recorded, or None."""
    try:
        _versions(state)
    except SignatureError as error:
        return str(error)
    return why_not_changed(state)


def _is_newer(file: Path, said: Statement, signed: Sequence[str], seen: Mapping[str, int], state: Path) -> bool:
    """Return whether the version is to be recorded; an error if it is older than one that is."""
    newest = max(seen.get(one, 0) for one in signed)
    if said.version < newest:
        raise SignatureError(
            f"{file}: is version {said.version}, version {newest} was seen before; install the newest one (to "
            f"trust this one anyway, remove its line from {state})"
        )
    return any(seen.get(one, 0) < said.version for one in signed)


def _versions(state: Path) -> Mapping[str, int]:
    try:
        document: Any = json.loads(read_regular(state, MAX_STATE_BYTES))
        versions: dict[str, int] = document["versions"]
        if all(type(version) is int for version in versions.values()):
            return versions
        reason = "it is damaged"
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = error.strerror or str(error)
    except CubinRuntimeError as error:
        reason = str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        reason = "it is damaged"
    raise SignatureError(f"{state}: the recorded versions of pin files cannot be read: {reason}")


def _record(file: Path, said: Statement, signed: Sequence[str], state: Path) -> None:
    try:
        with changing(state):
            seen = _versions(state)
            if _is_newer(file, said, signed, seen, state):
                versions = {**seen, **dict.fromkeys(signed, said.version)}
                replace_file(state, (json.dumps({"versions": versions}, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        place = "" if error.filename is None else f" ({error.filename})"
        raise SignatureError(
            f"{state}: version {said.version} of {file} cannot be recorded, so that an older one put back would go "
            f"unnoticed: {error.strerror or error}{place}; make it writable, or set XDG_STATE_HOME to a folder that is"
        ) from None
