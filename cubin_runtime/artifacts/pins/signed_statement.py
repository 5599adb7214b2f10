"""The ``[signed]`` table of a pin file, which makes the return of an old signed file detectable.

A table ``[signed]`` at the top of the file: ``file``, the name it is signed for; ``version``, an integer that grows
with each signing; and optionally ``expires``, a date-time with a time zone. The newest version seen of each file is
remembered in the user's state folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import PinError
from ...values import dataclass
from ..atomic_write import changing, replace_file

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

STATEMENT = "signed"
MAX_STATE_BYTES = 1 << 20


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
        table = tomllib.loads(data.decode()).get(STATEMENT)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SignatureError(f"{origin}: invalid TOML: {error}") from None
    if not isinstance(table, dict):
        raise SignatureError(
            f"{origin}: is signed but has no [{STATEMENT}] table, expected one with file, version and perhaps expires"
        )
    if unknown := sorted(set(table) - {"file", "version", "expires"}):
        raise SignatureError(f"{origin}: [{STATEMENT}] has unknown keys {', '.join(unknown)}")
    file, version, expires = table.get("file"), table.get("version"), table.get("expires")
    if not isinstance(file, str):
        raise SignatureError(f"{origin}: [{STATEMENT}] file is {file!r}, expected the file's name")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise SignatureError(f"{origin}: [{STATEMENT}] version is {version!r}, expected an integer of at least 1")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise SignatureError(
            f"{origin}: [{STATEMENT}] expires is {str(expires)!r}, expected a date-time with a time zone, "
            "for example 2027-01-31T00:00:00Z"
        )
    return Statement(file, version, expires)


def check_statement(file: Path, data: bytes, state: Path | None) -> None:
    """Compare the table of a signed pin file with its name, the clock and the newest version seen.

    ``state`` is the file that remembers versions; None: nothing is remembered.

    Raises:
        SignatureError: it is signed for another name, has expired, or is older than one seen before; or what was
            remembered does not read.
    """
    said = read_statement(data, str(file))
    if said.file != file.name:
        raise SignatureError(f"{file}: is signed for {said.file!r}, expected {file.name!r}")
    if said.expires is not None and said.expires <= datetime.now(timezone.utc):
        raise SignatureError(f"{file}: expired at {said.expires.isoformat()}; install a newer one")
    if state is None:
        return
    newest = _versions(state).get(str(file), 0)
    if said.version < newest:
        raise SignatureError(
            f"{file}: is version {said.version}, version {newest} was seen before; install the newest one (to "
            f"trust this one anyway, remove its line from {state})"
        )
    if said.version > newest:
        _remember(state, str(file), said.version)


def _versions(state: Path) -> Mapping[str, int]:
    try:
        with state.open("rb") as opened:
            found: Any = json.loads(opened.read(MAX_STATE_BYTES))
        versions: dict[str, int] = found["versions"]
        if all(type(version) is int for version in versions.values()):
            return versions
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise SignatureError(f"{state}: the recorded versions of pin files cannot be read: {reason}") from None
    raise SignatureError(f"{state}: the recorded versions of pin files cannot be read: it is damaged")


def _remember(state: Path, file: str, version: int) -> None:
    """Where nothing can be written (a read-only home) only the expiry protects."""
    try:
        with changing(state):
            versions = dict(_versions(state))
            versions[file] = max(version, versions.get(file, 0))
            replace_file(state, (json.dumps({"versions": versions}, indent=1, sort_keys=True) + "\n").encode())
    except OSError:
        return
