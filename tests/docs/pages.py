"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
# Their blocks are run by a test of their own: a program of the page's stands in for the reader's.
ELSEWHERE = {
    "docs/debugging.md": "tests/docs/test_debugging.py",
    "docs/tracing.md": "tests/docs/test_tracing.py",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of code, and the heading that it stands under."""

    page: str
    section: str
    kind: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    return list(_blocks(page, PAGES[page]))


def _blocks(page: str, text: str) -> Iterator[Block]:
    section, kind, lines = "", None, []
    for line in text.splitlines():
        fence = re.fullmatch(r"```(\S*)", line)
        if kind is None and fence:
            kind, lines = fence[1], []
        elif fence:
            yield Block(page, section, kind or "", "\n".join(lines) + "\n")
            kind = None
        elif kind is None and (heading := re.fullmatch(r"#{1,4} (.+)", line)):
            section = heading[1]
        else:
            lines.append(line)
    assert kind is None, f"{page}: a block has no end"


BLOCKS = [block for page in PAGES if page not in ELSEWHERE for block in blocks_of(page)]


def pages_with(kind: str) -> list[str]:
    """The pages that have a block of a kind."""
    return list(dict.fromkeys(block.page for block in BLOCKS if block.kind == kind))


def blocks_in(page: str, section: str, kind: str) -> list[str]:
    """The text of a section's blocks of a kind."""
    return [b.text for b in blocks_of(page) if (b.section, b.kind) == (section, kind)]
