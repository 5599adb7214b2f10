"""Pins: the only root of trust. A pin ties a release folder to the digest of its manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from ..._version import KERNELS_VERSION
from ...errors import PinError
from ...values import dataclass
from ..bounded_read import MAX_FILE_BYTES, digest_of
from ..manifest import MANIFEST_NAME, Manifest, parse_manifest
from ..path import ArtifactPath, PathError
from .bounded_toml import read_toml
from .signed_statement import STATEMENT

# Names that a pin's `abi` may have; the layouts behind each are registered in `kernels/abi.py`.
KNOWN_ABIS = ("trtllm-gen-0.6.13", f"hopper-{KERNELS_VERSION}")
BUILTIN_PINS = Path(__file__).with_name("pins.toml")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUIRED = frozenset({"name", "path", "manifest_sha256", "files", "bytes", "max_file_bytes", "licence"})
_OPTIONAL = frozenset({"index_sha256", "abi", "sources", "groups"})


@dataclass(frozen=True, slots=True)
class Pin:
    """One release that is trusted.

    ``path`` is the release's folder, ``manifest_sha256`` the digest of its ``checksums.txt``, ``files`` the
    number of lines in it and ``bytes`` the sum of all files (0: not known), ``max_file_bytes`` the most one file may
    have. ``index_sha256`` is the digest of the metadata index, ``abi`` the name of the parameter
    layout that ``launch`` knows (None: the release can be fetched, verified and inspected, never launched).
    ``sources`` are tried after the word ``package`` when no source was configured. ``groups`` are names under
    which several releases are asked for together.
    """

    name: str
    path: ArtifactPath
    manifest_sha256: str
    files: int
    bytes: int
    max_file_bytes: int
    index_sha256: str | None
    abi: str | None
    licence: str
    sources: tuple[str, ...]
    groups: tuple[str, ...] = ()

    def estimate(self, files: int) -> int:
        """About how many bytes ``files`` of the release's files have (manifests carry no sizes)."""
        return self.bytes * files // self.files if self.files else 0


def read_manifest(pin: Pin, data: bytes, origin: str) -> Manifest:
    """Parse manifest bytes after comparing their digest with the pin.

    Raises:
        PinError: the digest or the number of files is not the pinned one.
        CorruptError: the pinned bytes are not a manifest.
    """
    digest = digest_of(data)
    if digest != pin.manifest_sha256:
        raise PinError(f"{origin}: sha256 is {digest}, pin {pin.name!r} says {pin.manifest_sha256}")
    manifest = parse_manifest(data, pin.path, f"{origin}: {pin.path.child(MANIFEST_NAME)}")
    if pin.files not in (0, len(manifest.digests)):
        raise PinError(f"{origin}: lists {len(manifest.digests)} files, pin {pin.name!r} says {pin.files}")
    return manifest


def parse_pins(data: bytes, origin: str) -> tuple[Pin, ...]:
    """Parse a TOML file of ``[[pin]]`` tables, and perhaps a ``[signed]`` one, which is left to ``signed_statement``.

    Raises:
        PinError: naming ``origin`` and the table: no TOML, an unknown or missing key, a value outside its
        domain.
    """
    document = read_toml(data, origin)
    unknown = sorted(set(document) - {"pin", STATEMENT})
    tables = document.get("pin", [])
    if unknown or not isinstance(tables, list):
        raise PinError(f"{origin}: expected only [[pin]] tables, got {', '.join(unknown) or 'one [pin] table'}")
    return tuple(_parse_pin(table, f"{origin}: pin {number}") for number, table in enumerate(tables, start=1))


def _parse_pin(table: object, where: str) -> Pin:
    if not isinstance(table, dict):
        raise PinError(f"{where}: expected a table, got {type(table).__name__}")
    if missing := sorted(_REQUIRED - set(table)):
        raise PinError(f"{where}: lacks {', '.join(missing)}")
    if unknown := sorted(set(table) - _REQUIRED - _OPTIONAL):
        raise PinError(f"{where}: has unknown keys {', '.join(unknown)}")
    max_file_bytes = _integer(table, "max_file_bytes", where, least=1)
    if max_file_bytes > MAX_FILE_BYTES:
        raise PinError(f"{where}: max_file_bytes is {max_file_bytes}, at most {MAX_FILE_BYTES} is allowed")
    try:
        path = ArtifactPath(_text(table, "path", where))
    except PathError as error:
        raise PinError(f"{where}: {error}") from None
    return Pin(
        name=_text(table, "name", where, _NAME),
        path=path,
        manifest_sha256=_text(table, "manifest_sha256", where, _SHA256),
        files=_integer(table, "files", where, least=0),
        bytes=_integer(table, "bytes", where, least=0),
        max_file_bytes=max_file_bytes,
        index_sha256=_text(table, "index_sha256", where, _SHA256) if "index_sha256" in table else None,
        abi=_text(table, "abi", where, _NAME) if "abi" in table else None,
        licence=_text(table, "licence", where),
        sources=_texts(table, "sources", where),
        groups=_texts(table, "groups", where),
    )


def _texts(table: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise PinError(f"{where}: {key} is {values!r}, expected a list of strings")
    return tuple(values)


def _text(table: Mapping[str, object], key: str, where: str, form: re.Pattern[str] | None = None) -> str:
    value = table[key]
    if not isinstance(value, str) or not value.isprintable():
        raise PinError(f"{where}: {key} is {value!r}, expected printable text")
    if form is not None and form.fullmatch(value) is None:
        raise PinError(f"{where}: {key} is {value!r}, expected to match {form.pattern}")
    return value


def _integer(table: Mapping[str, object], key: str, where: str, least: int) -> int:
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PinError(f"{where}: {key} is {value!r}, expected an integer of at least {least}")
    return value


def format_pin(pin: Pin) -> str:
    """The pin as a ``[[pin]]`` table that ``parse_pins`` reads back to an equal pin."""
    lines = ["[[pin]]"]
    for field in fields(Pin):
        value = getattr(pin, field.name)
        if value is None or (field.name == "groups" and not value):
            continue
        if isinstance(value, int):
            lines.append(f"{field.name} = {value}")
        elif isinstance(value, tuple):
            lines.append(f"{field.name} = [{', '.join(quoted(item) for item in value)}]")
        else:
            lines.append(f"{field.name} = {quoted(str(value))}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A text as a string of TOML."""
    escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in text)
    return f'"{escaped}"'
