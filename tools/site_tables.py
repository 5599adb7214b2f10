"""Tables of the documentation site: those of sentences may wrap, and are lists of labelled lines on a phone."""

from __future__ import annotations

import re

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<(t[hd])([^>]*)>(.*?)</\1>", re.DOTALL)
_NUMBER = re.compile(r"\s*[†~<>]?\d")


def with_labels(html: str) -> str:
    """A page whose tables of sentences are marked ``data-words``, and their cells with the heading of their column."""
    return _TABLE.sub(lambda found: _labelled(found[0]), html)


def _labelled(table: str) -> str:
    heads, *rows = ([_text(cell[3]) for cell in _CELL.finditer(row[1])] for row in _ROW.finditer(table))
    cells = [cell for row in rows for cell in row[1:]]
    numbers = sum(bool(_NUMBER.match(cell)) for cell in cells)
    if len(heads) < 3 or 2 * numbers > len(cells):
        return table

    def row_of(row: re.Match[str]) -> str:
        columns = iter(heads)
        return _CELL.sub(lambda cell: _cell(cell, next(columns, "")), row[0])

    head, body, rest = table.partition("<tbody>")
    return head.replace("<table>", "<table data-words>") + body + _ROW.sub(row_of, rest)


def _cell(cell: re.Match[str], label: str) -> str:
    quoted, none = label.replace('"', "&quot;"), " data-none" if _text(cell[3]) == "-" else ""
    return f'<{cell[1]}{cell[2]} data-label="{quoted}"{none}>{cell[3]}</{cell[1]}>'


def _text(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html).strip()
