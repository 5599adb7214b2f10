"""The user's pin file: append a pin for a release whose manifest is available locally, or remove one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import PinError
from ..atomic_write import changing, replace_file
from ..manifest import parse_manifest
from ..path import ArtifactPath
from .bounded_toml import comments_at_end
from .pin import BUILTIN_PINS, Pin, format_pin, parse_pins
from .pin_set import PinSet
from .signatures import read_pin_file

DEFAULT_MAX_FILE_BYTES = 64 << 20

_HEADER = re.compile(r"^[ \t]*\[(\[[ \t]*pin[ \t]*\]\])?", re.MULTILINE)  # of any table; the group: of a pin


def make_pin(
    manifest_data: bytes | None,
    folder: ArtifactPath,
    origin: str,
    *,
    sha256: str | None = None,
    name: str | None = None,
    abi: str | None = None,
    licence: str = "unknown",
    max_file_bytes: int | None = None,
    sources: tuple[str, ...] = (),
) -> Pin:
    """A pin for a release; the sum of its files' sizes stays unknown.

    With ``manifest_data`` None the number of files is unknown, too, and ``sha256`` is the digest of the manifest.

    Raises:
        CorruptError: the bytes are not a manifest.
        PinError: ``name``, ``abi`` or ``licence`` is outside its domain.
    """
    manifest = None if manifest_data is None else parse_manifest(manifest_data, folder, origin)
    pin = Pin(
        name=name or re.sub(r"[^A-Za-z0-9._+-]", "-", folder.text).lstrip("._+-")[:128] or "release",
        path=folder,
        manifest_sha256=(sha256 or "") if manifest is None else manifest.sha256,
        files=0 if manifest is None else len(manifest.digests),
        bytes=0,
        max_file_bytes=max_file_bytes or DEFAULT_MAX_FILE_BYTES,
        index_sha256=None,
        abi=abi,
        licence=licence,
        sources=sources,
    )
    return parse_pins(format_pin(pin).encode(), "pin")[0]


def add_pin(file: Path, pin: Pin, pin_set: PinSet, options: Collection[str] = ()) -> bool:
    """Append a pin to a user's file, whole or not at all; False if the release was pinned with that digest.

    ``options`` are names of fields in which a pin that is there must be equal, as they were asked for. Processes that
    change the file at the same time do so one after another.

    Raises:
        PinError: another pin disagrees, the one that is there differs in ``options``, or the file cannot be written or
            takes no table at its end.
    """
    with _changed_alone(file):
        text = _read(file) if _is_there(file) else ""
        others = [(one, pin_set.origin(one)) for one in pin_set if pin_set.origin(one) != str(file)]
        now = PinSet([*others, *((one, str(file)) for one in parse_pins(text.encode(), str(file)))])
        there = next((one for one in now if one.path == pin.path), None)
        if there is not None and there.manifest_sha256 == pin.manifest_sha256:
            _refuse_to_change(there, pin, options)
            return False
        PinSet([*((one, now.origin(one)) for one in now), (pin, str(file))])
        replace_file(file, _with([pin], text, file).encode())
    return True


def add_group(file: Path, pins: Sequence[Pin], pin_set: PinSet) -> tuple[Pin, ...]:
    """Append pins of one group to a user's file, all or none; those that were not there before.

    A release that is pinned already with the same digest keeps its name and all else, and joins the group.

    Raises:
        PinError: a pin that is there disagrees, or the file cannot be written or takes no table at its end.
    """
    with _changed_alone(file):
        text = _read(file) if _is_there(file) else ""
        others = [(one, pin_set.origin(one)) for one in pin_set if pin_set.origin(one) != str(file)]
        now = PinSet([*others, *((one, str(file)) for one in parse_pins(text.encode(), str(file)))])
        by_path = {one.path: one for one in now}
        added: list[Pin] = []
        for pin in pins:
            there = by_path.get(pin.path)
            if there is None or pin.manifest_sha256 != there.manifest_sha256 or set(pin.groups) - set(there.groups):
                added.append(pin)
        PinSet([*((one, now.origin(one)) for one in now), *((one, str(file)) for one in added)])
        if added:
            replace_file(file, _with(added, text, file).encode())
    return tuple(added)


def _refuse_to_change(there: Pin, new: Pin, options: Collection[str]) -> None:
    for field in options:
        if getattr(there, field) != getattr(new, field):
            raise PinError(
                f"{there.path} is pinned already, as {there.name!r} with {field} {getattr(there, field)!r} and not "
                f"{getattr(new, field)!r}; run 'unpin' first"
            )


def remove_pin(file: Path, name_or_path: str, pin_set: PinSet) -> Pin:
    """Take a pin out of a user's file, whole or not at all; the rest of the file stays as it is written.

    Raises:
        PinError: no such pin, it comes from another place than ``file``, or the file cannot be written.
    """
    pin = pin_set.get(name_or_path)
    if pin_set.origin(pin) == str(BUILTIN_PINS):
        raise PinError(f"{pin.name!r} is built in and cannot be removed")
    if name_or_path.removesuffix("/") not in (pin.name, pin.path.text):
        raise PinError(f"{name_or_path!r} is not a pin, but inside {pin.name!r}; expected a name or a release's folder")
    if pin_set.origin(pin) != str(file):
        raise PinError(f"{pin.name!r} comes from {pin_set.origin(pin)}, and only {file} can be edited; remove it there")
    with _changed_alone(file):
        replace_file(file, _without([pin], _read(file), file).encode())
    return pin


def remove_group(file: Path, group: str) -> tuple[Pin, ...]:
    """Take the pins of a group out of a user's file, whole or not at all; those that were taken out.

    Raises:
        PinError: the file has none of the group, or cannot be written.
    """
    with _changed_alone(file):
        text = _read(file)
        gone = tuple(one for one in parse_pins(text.encode(), str(file)) if group in one.groups)
        if not gone:
            raise PinError(f"{file}: has no pin of the group {group!r}; remove it from the file that has it")
        replace_file(file, _without(gone, text, file).encode())
    return gone


def _with(added: Sequence[Pin], text: str, file: Path) -> str:
    """The text of a pin file and behind it the tables of further pins."""
    whole = "\n".join([*filter(None, [text]), *map(format_pin, added)])
    try:
        parse_pins(whole.encode(), str(file))
    except PinError as error:  # its pins are an array in one line, or it would be too long to be read
        names = ", ".join(repr(pin.name) for pin in added)
        raise PinError(f"{file}: does not take the table of {names} at its end; add it by hand: {error}") from None
    return whole


def _without(gone: Sequence[Pin], text: str, file: Path) -> str:
    """The text of a pin file less the tables of some pins."""
    before = parse_pins(text.encode(), str(file))
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    tables = [(header.start(), end) for header, end in zip(headers, ends, strict=True) if header[1]]
    of_path = {pin.path: pin for pin in gone}
    out = {number for number, one in enumerate(before) if one.path in of_path and _is_table_of(one, of_path[one.path])}
    rest = tuple(one for number, one in enumerate(before) if number not in out)
    rest_text = None
    if len(out) == len(gone) and len(tables) == len(before):
        rest_text = text
        for start, end in reversed([table for number, table in enumerate(tables) if number in out]):
            rest_text = rest_text[:start] + comments_at_end(text[start:end]) + rest_text[end:]
    # a table may be written in ways that lines do not show: what is left must read as all pins but these
    if rest_text is None or parse_pins(rest_text.encode(), str(file)) != rest:
        names = ", ".join(repr(pin.name) for pin in gone)
        raise PinError(f"{file}: the table of {names} cannot be identified; remove it by hand")
    return rest_text


def _is_table_of(one: Pin, pin: Pin) -> bool:
    """Return whether a pin in force came from this table of the file; such a pin joins what others say of it."""
    return (one.path, one.name) == (pin.path, pin.name) and set(one.groups) <= set(pin.groups)


def _is_there(file: Path) -> bool:
    """Return whether there is a file, or anything in its place; a path that cannot be looked at counts, and stays."""
    try:
        os.lstat(file)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PinError(f"{file}: pins cannot be read: {error.strerror}") from None
    return True


def _read(file: Path) -> str:
    try:
        return read_pin_file(file, ()).decode()
    except UnicodeDecodeError:
        raise PinError(f"{file}: pins cannot be read: not UTF-8") from None


@contextmanager
def _changed_alone(file: Path) -> Iterator[None]:
    try:
        with changing(file):
            yield
    except OSError as error:
        place = "" if error.filename in (None, str(file)) else f" ({error.filename})"
        raise PinError(f"{file}: the pin cannot be written: {error.strerror}{place}") from None
