"""Every message that the page on troubleshooting quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, ROOT

PAGE = PAGES["docs/troubleshooting.md"]
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def _text(node: ast.AST) -> str | None:
    """A string, with an ellipsis for each value that is put in; None: the node is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\u2026" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _message(call: ast.Call) -> str | None:
    """The message of an error that names an argument."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "argument" not in keywords or not call.args:
        return None
    name, value = _text(keywords["argument"]) or "\u2026", "=\u2026" if "value" in keywords else ""
    return f"{name}{value}: {_text(call.args[0])}"


def _texts() -> Iterator[str]:
    """The strings and messages of the package."""
    for module in (ROOT / "cubin_runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            text = _message(node) if isinstance(node, ast.Call) else _text(node)
            if text is not None:
                yield text


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
