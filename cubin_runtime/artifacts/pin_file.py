"""New pins: made for a release whose manifest is at hand, appended to the user's file."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from ..errors import PinError
from .manifest import parse_manifest
from .path import ArtifactPath
from .pins import Pin, PinSet, format_pin, parse_pins

DEFAULT_MAX_FILE_BYTES = 64 << 20


def make_pin(
    manifest_data: bytes,
    folder: ArtifactPath,
    origin: str,
    *,
    name: str | None = None,
    abi: str | None = None,
    licence: str = "unknown",
    max_file_bytes: int | None = None,
    sources: tuple[str, ...] = (),
) -> Pin:
    """A pin for a release whose manifest is at hand; the sum of its files' sizes stays unknown.

    Raises:
        CorruptError: the bytes are no manifest.
        PinError: ``name``, ``abi`` or ``licence`` is outside its domain.
    """
    manifest = parse_manifest(manifest_data, folder, origin)
    made = Pin(
        name=name or re.sub(r"[^A-Za-z0-9._+-]", "-", folder.text).lstrip("._+-")[:128] or "release",
        path=folder,
        manifest_sha256=manifest.sha256,
        files=len(manifest.digests),
        bytes=0,
        max_file_bytes=max_file_bytes or DEFAULT_MAX_FILE_BYTES,
        index_sha256=None,
        abi=abi,
        licence=licence,
        sources=sources,
    )
    return parse_pins(format_pin(made).encode(), "pin")[0]


def add_pin(file: Path, pin: Pin, known: PinSet) -> bool:
    """Append a pin to a user's file, whole or not at all; False if the release was pinned with that digest.

    Raises:
        PinError: another pin disagrees, or the file cannot be written.
    """
    there = next((one for one in known if one.path == pin.path), None)
    if there is not None and there.manifest_sha256 == pin.manifest_sha256:
        return False
    PinSet([*((one, known.origin(one)) for one in known), (pin, str(file))])
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_text() if file.exists() else ""
        temporary.write_text(before + ("\n" if before else "") + format_pin(pin))
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PinError(f"{file}: the pin cannot be written: {error.strerror}") from None
    return True
