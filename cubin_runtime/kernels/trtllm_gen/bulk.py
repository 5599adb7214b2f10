"""Many cases, one JSON line each, in and out."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ...errors import MissingError, UsageError
from .kernels import KernelFinder
from .records import Json, decide
from .traits import Policy

MAX_LINE_BYTES = 1 << 20
_encode = json.JSONEncoder(separators=(",", ":")).encode


def _open_plain(path: Path) -> IO[bytes]:
    return path.open("rb")


_OPENERS: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked where its name ends in ``.gz`` or ``.xz``; empty ones are left out.

    Raises:
        MissingError: the file cannot be read.
        UsageError: a line is over 1 MiB, or a packed file is damaged or cut short.
    """
    opener: Callable[[Path], IO[bytes]] = _OPENERS.get(path.suffix, _open_plain)
    try:
        with opener(path) as opened:
            while line := opened.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise UsageError(f"{path}: a line of more than {MAX_LINE_BYTES} bytes")
                if not line.isspace():
                    yield line
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise UsageError(f"{path}: {error}") from error
    except OSError as error:
        raise MissingError(f"{path}: cannot be read: {error.strerror}") from error


def case_in(text: bytes | str, where: str) -> dict[str, Any]:
    """The case that a JSON text states, alone or as the ``case`` of a record; other keys are ignored.

    Raises:
        UsageError: the text is no JSON object that holds a case.
    """
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON: {error}") from error
    case = stated.get("case", stated) if isinstance(stated, dict) else None
    if not isinstance(case, dict) or "api" not in case:
        raise UsageError(f"{where}: expected an object with a 'case', or a case with an 'api'")
    return case


def decide_lines(lines: Iterable[bytes], kernels: KernelFinder, *, both: bool, where: str) -> Iterator[str]:
    """One decision a line by the policy ``reference``; with ``both`` ours is under the key ``best``.

    Raises:
        UsageError: a line holds no case; the message names it by number.
    """
    for number, line in enumerate(lines, 1):
        case = case_in(line, f"{where}:{number}")
        try:
            decision: Json = {"id": case.get("id"), **decide(case, kernels, Policy.REFERENCE)}
            if both:
                decision["best"] = decide(case, kernels, Policy.BEST)
        except UsageError as error:
            raise UsageError(f"{where}:{number}: {error}") from error
        yield _encode(decision)
