"""``kernels.json`` of native releases: what the build states about each kernel, as typed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...errors import CorruptError, UsageError
from ...values import dataclass
from ..cubins.architecture import Architecture, declared_architecture

FILE_NAME = "kernels.json"
SCHEMA = 1
MAX_BYTES = 16 << 20
MEASURED = "measured"
BUILT_NOT_RUN = "built, not run"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_RELATIVE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")


class NativeKernelsError(CorruptError):
    """``kernels.json`` does not read; the message names the file, the entry and the key."""


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """One kernel of a native release.

    ``file`` is relative to the release's folder; ``sm`` a target such as ``90a``; ``struct`` names the
    parameter struct, with its size in bytes and layout fingerprint. ``threads`` is a block's size. Shared
    memory and spills are in bytes, registers and spills are a thread's. ``status`` is ``measured`` or
    ``built, not run``.
    """

    name: str
    symbol: str
    file: str
    sm: str
    family: str
    operation: str
    traits: Mapping[str, int | str | bool]
    struct: str
    struct_bytes: int
    struct_fingerprint: str
    threads: int
    dynamic_shared_bytes: int
    static_shared_bytes: int
    registers: int
    spill_bytes: int
    flags: tuple[str, ...]
    sources_sha256: str
    status: str

    def __hash__(self) -> int:  # the traits have none
        return hash(self.file)

    @property
    def architecture(self) -> Architecture:
        """``sm`` as a value."""
        return declared_architecture(self.sm)


def parse_native_kernels(data: bytes, origin: str = FILE_NAME) -> tuple[NativeKernel, ...]:
    """Read ``kernels.json``: ``{"schema": 1, "release": ..., "toolchain": {...}, "kernels": [...]}``.

    Args:
        data: the whole file.
        origin: what to call it in errors.

    Raises:
        NativeKernelsError: not JSON, another schema, or an entry with a missing, unknown or ill-typed key.
    """
    if len(data) > MAX_BYTES:
        raise NativeKernelsError(f"{origin}: {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NativeKernelsError(f"{origin}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise NativeKernelsError(f"{origin}: {type(document).__name__} at the top, expected an object")
    if document.get("schema") != SCHEMA or isinstance(document["schema"], bool):
        raise NativeKernelsError(f"{origin}: schema {document.get('schema')!r}, expected {SCHEMA}")
    entries = document.get("kernels")
    if not isinstance(entries, list):
        raise NativeKernelsError(f"{origin}: kernels is {type(entries).__name__}, expected a list")
    kernels = tuple(_entry(entry, f"{origin}: kernels[{i}]") for i, entry in enumerate(entries))
    first: dict[str, int] = {}
    for i, kernel in enumerate(kernels):
        if first.setdefault(kernel.name, i) != i:
            raise NativeKernelsError(
                f"{origin}: kernels[{i}]: name {kernel.name!r} is also kernels[{first[kernel.name]}]"
            )
    return kernels


def _entry(entry: object, where: str) -> NativeKernel:
    if not isinstance(entry, dict):
        raise NativeKernelsError(f"{where}: {type(entry).__name__}, expected an object")
    if isinstance(entry.get("name"), str):
        where = f"{where} ({entry['name'][:80]!r})"
    missing = [key for key in _READERS if key not in entry]
    if missing:
        raise NativeKernelsError(f"{where}: lacks {', '.join(missing)}")
    unknown = sorted(str(key)[:80] for key in entry if key not in _READERS)
    if unknown:
        raise NativeKernelsError(f"{where}: unknown key {', '.join(unknown)}")
    values = {}
    for key, (reader, expected) in _READERS.items():
        try:
            values[key] = reader(entry[key])
        except (ValueError, TypeError, UsageError):
            raise NativeKernelsError(f"{where}: {key} is {str(entry[key])[:80]!r}, expected {expected}") from None
    return NativeKernel(**values)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > 512:
        raise ValueError
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise ValueError
    return value


def _block(value: object) -> int:
    if not 1 <= _count(value) <= 1024:
        raise ValueError
    return _count(value)


def _file(value: object) -> str:
    if not _RELATIVE.fullmatch(_text(value)):
        raise ValueError
    return _text(value)


def _digest(value: object) -> str:
    if not _DIGEST.fullmatch(_text(value)):
        raise ValueError
    return _text(value)


def _sm(value: object) -> str:
    text = _text(value)
    if text.startswith("sm_"):
        raise ValueError
    Architecture.parse(text)
    return text


def _traits(value: object) -> Mapping[str, int | str | bool]:
    if not isinstance(value, dict) or not all(isinstance(v, (int, str)) for v in value.values()):
        raise ValueError
    return MappingProxyType(dict(value))


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(_text(item) for item in value)


def _status(value: object) -> str:
    if value not in (MEASURED, BUILT_NOT_RUN):
        raise ValueError
    return str(value)


_READERS: Mapping[str, tuple[Callable[[object], object], str]] = {
    "name": (_text, "text"),
    "symbol": (_text, "text"),
    "file": (_file, "a relative path"),
    "sm": (_sm, "a target such as 90a"),
    "family": (_text, "text"),
    "operation": (_text, "text"),
    "traits": (_traits, "an object of numbers, strings and booleans"),
    "struct": (_text, "text"),
    "struct_bytes": (_count, "a number of bytes"),
    "struct_fingerprint": (_digest, "a SHA-256 in lower-case hex"),
    "threads": (_block, "1 to 1024"),
    "dynamic_shared_bytes": (_count, "a number of bytes"),
    "static_shared_bytes": (_count, "a number of bytes"),
    "registers": (_count, "a count"),
    "spill_bytes": (_count, "a number of bytes"),
    "flags": (_texts, "a list of strings"),
    "sources_sha256": (_digest, "a SHA-256 in lower-case hex"),
    "status": (_status, f"{MEASURED!r} or {BUILT_NOT_RUN!r}"),
}
