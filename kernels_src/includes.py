"""The digest of a kernel's sources: the file and what it includes, from here and of the generated headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from .compiling import BuildError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_DIRECTIVE = re.compile(rb"^[ \t]*#[ \t]*include\b[^\n]*", re.MULTILINE)
_IN_BRACKETS = re.compile(rb"[ \t]*#[ \t]*include[ \t]*<([^>\n]+)>")


def source_files(root: Path, source: str) -> tuple[Path, ...]:
    """``source`` and, transitively, what it includes in quotes from below ``root``; sorted, absolute.

    Conditional includes count whether or not they are taken. Names that are not found are skipped: they are generated
    headers. Headers of the toolkit are in angle brackets.
    """
    root = root.resolve()
    found: set[Path] = set()
    pending = [root / source]
    while pending:
        file = pending.pop().resolve()
        if file in found:
            continue
        found.add(file)
        for name in _INCLUDE.findall(file.read_bytes()):
            for folder in (file.parent, root):
                candidate = (folder / name.decode()).resolve()
                if candidate.is_file() and candidate.is_relative_to(root):
                    pending.append(candidate)
                    break
    return tuple(sorted(found))


def sources_sha256(root: Path, source: str, generated: Mapping[str, str]) -> str:
    """SHA-256 (hex) over a ``sha256sum``-like listing of the sources, then of ``generated`` headers they include.

    Raises:
        BuildError: a file cannot be read, or is included in a way that the digest does not see.
    """
    root = root.resolve()
    try:
        files = source_files(root, source)
        contents = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    except OSError as error:
        raise BuildError(f"{source}: {error}") from error
    for path, data in contents.items():
        _check_includes(root / path, data, root, generated)
    included = {name.decode() for data in contents.values() for name in _INCLUDE.findall(data)}
    listing = "".join(f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in contents.items())
    listing += "".join(
        f"{hashlib.sha256(generated[name].encode()).hexdigest()}  generated/{name}\n"
        for name in sorted(included & generated.keys())
    )
    return hashlib.sha256(listing.encode()).hexdigest()


def _check_includes(file: Path, data: bytes, root: Path, generated: Mapping[str, str]) -> None:
    """Refuse an include whose content the digest would not see: one by a macro, or of a file of neither folder.

    Raises:
        BuildError: names the file and the include.
    """
    for directive in _DIRECTIVE.findall(data):
        if quoted := _INCLUDE.match(directive):
            found = (file.parent / quoted[1].decode()).resolve()
            seen = found.is_relative_to(root) or not found.is_file()
        elif in_brackets := _IN_BRACKETS.match(directive):
            seen = in_brackets[1].decode() not in generated
        else:
            seen = False
        if not seen:
            raise BuildError(
                f"{file.relative_to(root)}: {directive.decode(errors='replace').strip()}: expected a file below the"
                " sources or a generated header, in quotes, or a header of the toolkit"
            )
