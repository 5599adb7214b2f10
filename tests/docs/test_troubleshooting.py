"""Every message that the page on troubleshooting quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, ROOT

PAGE = PAGES["docs/troubleshooting.md"]
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def _texts() -> Iterator[str]:
    """The strings of the package, with an ellipsis for each value that is put in."""
    for module in (ROOT / "cubin_runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\u2026" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


TEXTS = frozenset(_texts())


def is_printed(message: str) -> bool:
    """Whether a string of the package has the fixed words of a message, in order, with values alone between them."""
    words = (re.escape(part.strip()).replace("\\ ", " ") for part in message.split("..."))
    pattern = re.compile(".*?".join(words), re.DOTALL)
    return any(pattern.search(text) for text in TEXTS)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists(message: str) -> None:
    assert is_printed(message)


def test_messages_are_quoted_and_others_are_found() -> None:
    assert len(QUOTED) > 25
    assert not is_printed("no source delivered ... by itself")
