"""The manifest of a release: ``checksums.txt`` in ``sha256sum`` format, the only list of its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType

from ..errors import CorruptError
from ..values import dataclass
from .path import ArtifactPath, PathError

MANIFEST_NAME = "checksums.txt"
MAX_MANIFEST_BYTES = 16 << 20

_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\r\n]+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files that a release holds.

    ``sha256`` is the digest of the manifest's own bytes; ``digests`` maps each full path to the lowercase hex
    SHA-256 of the file's bytes, in the order of the file.
    """

    folder: ArtifactPath
    sha256: str
    digests: Mapping[ArtifactPath, str]


def parse_manifest(data: bytes, folder: ArtifactPath, origin: str) -> Manifest:
    """Parse the bytes of a ``checksums.txt`` (``sha256sum`` format, names relative to ``folder``).

    The caller compares the digest of ``data`` with a pin first; this checks the form alone.

    Raises:
        CorruptError: naming ``origin`` and the line: wrong form, bad hex, a name that climbs, a duplicate,
            a name that is both file and folder, CRLF, a truncated last line, no line at all, over 16 MiB.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{origin}: {len(data)} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
    if not data:
        raise CorruptError(f"{origin}:1: the manifest is empty")
    digests: dict[ArtifactPath, str] = {}
    for number, line in enumerate(_lines(data, origin), start=1):
        path, digest = _parse_line(line, folder, origin, number)
        digests[path] = digest
        if len(digests) != number:
            raise CorruptError(f"{origin}:{number}: {path.text!r} is listed twice")
    _check_no_file_is_a_folder(digests, origin)
    return Manifest(folder, hashlib.sha256(data).hexdigest(), MappingProxyType(digests))


def _lines(data: bytes, origin: str) -> Iterator[str]:
    """The lines one by one, as all together would take twice the memory of the file."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise CorruptError(f"{origin}:{number}: not UTF-8") from None
    if not text.endswith("\n"):
        number = text.count("\n") + 1
        raise CorruptError(f"{origin}:{number}: the last line is truncated (no newline at its end)")
    at = 0
    while at < len(text):
        end = text.index("\n", at)
        yield text[at:end]
        at = end + 1


def _parse_line(line: str, folder: ArtifactPath, origin: str, number: int) -> tuple[ArtifactPath, str]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise CorruptError(f"{origin}:{number}: {_line_fault(line)}")
    digest, name = match.groups()
    try:
        path = folder.child(name)
    except PathError as error:
        raise CorruptError(f"{origin}:{number}: {error}") from None
    if name == MANIFEST_NAME:
        raise CorruptError(f"{origin}:{number}: the manifest lists itself")
    return path, digest


def _line_fault(line: str) -> str:
    if line.endswith("\r"):
        return "the line ends in CRLF, expected LF alone"
    if not line:
        return "the line is empty"
    shown = line if len(line) <= 80 else line[:77] + "..."
    return f"expected 64 lowercase hex digits, two spaces and a name, got {shown!r}"


def _check_no_file_is_a_folder(digests: Mapping[ArtifactPath, str], origin: str) -> None:
    """Check that no path continues another; sorted with ``/`` first, a file is followed by what lies below it."""
    ordered = sorted(path.text.replace("/", "\0") for path in digests)
    folders = {one.replace("\0", "/") for one, after in pairwise(ordered) if after.startswith(f"{one}\0")}
    if folders:
        number, text = next((n, path.text) for n, path in enumerate(digests, start=1) if path.text in folders)
        raise CorruptError(f"{origin}:{number}: {text!r} is both a file and a folder")
