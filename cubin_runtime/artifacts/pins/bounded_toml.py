"""TOML of pin files: its size, depth and number of keys are bounded before the standard library parses it.

That parser takes minutes and gigabytes for a key of a million parts, and recurses with every bracket.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

from ...errors import PinError

MAX_PIN_FILE_BYTES = 4 << 20
MAX_DEPTH = 8
MAX_KEY_PARTS = 8
MAX_WORD_BYTES = 128
MAX_VALUES = 1 << 18  # about twice as many as pins of the largest size have

_tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
# Strings and comments are skipped whole, also those that do not end, so that each byte is looked at once.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'.*?(?:\'\'\'|\Z)|"(?:\\.|[^"\\\n])*"?|\'[^\'\n]*\'?|#[^\n]*'
    rf"|[A-Za-z0-9_+-]{{{MAX_WORD_BYTES + 1}}}|[\[\]{{}}=,.\n]",
    re.DOTALL,
)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


def read_toml(data: bytes, origin: str) -> dict[str, Any]:
    """The document as the standard library reads it.

    Raises:
        PinError: naming ``origin``: it is over a bound, or no TOML.
    """
    if len(data) > MAX_PIN_FILE_BYTES:
        raise PinError(f"{origin}: {len(data)} bytes, a pin file has at most {MAX_PIN_FILE_BYTES}")
    try:
        text = data.decode()
        if (fault := _over_a_bound(text)) is not None:
            raise PinError(f"{origin}: {fault}")
        document: dict[str, Any] = _tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or a number beyond the standard library's limits
        raise PinError(f"{origin}: invalid TOML: {error}") from None
    return document


def comments_at_end(table: str) -> str:
    """The comments behind the last value of a table's text, with the empty lines around them: they are of what follows.

    >>> comments_at_end("[a]\\nb = 1\\n\\n# of c\\n")
    '\\n# of c\\n'
    """
    lines = _LINE.findall(table)
    count = len(lines)
    while count and lines[count - 1].lstrip()[:1] in ("", "#"):
        count -= 1
    rest = "".join(lines[count:])
    return rest if "#" in rest else ""


def _over_a_bound(text: str) -> str | None:  # noqa: C901
    """Say what of a document is deeper, longer or more than any pin file needs; looks at each byte once."""
    depth = parts = values = lines = 0
    for piece in _TOKEN.finditer(text):
        token = piece[0]
        if token in "[{":
            depth, parts, values = depth + 1, 0, values + 1
        elif token in "]}":
            depth, parts = max(0, depth - 1), 0
        elif token in "=,":
            parts, values = 0, values + 1
        elif token == "\n":
            parts, lines = 0, lines + 1
        elif token == ".":
            parts += 1
        elif len(token) > MAX_WORD_BYTES and token[0] not in "\"'#":
            return f"a word of more than {MAX_WORD_BYTES} bytes, at character {piece.start()}"
        if depth > MAX_DEPTH:
            return f"brackets nested more than {MAX_DEPTH} deep, at character {piece.start()}"
        if parts >= MAX_KEY_PARTS:
            return f"a key of more than {MAX_KEY_PARTS} parts, at character {piece.start()}"
        if max(values, lines) > MAX_VALUES:
            return f"more than {MAX_VALUES} keys, values or lines"
    return None
