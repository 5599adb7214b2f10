"""Which rows were measured with cubins of the pinned release, and how pages mark all others. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = " †"
LEGEND = "†: measured with an earlier kernel: its cubin is not in the pinned release, or is not known."
EARLIER = "Measured with an earlier release of the kernels."
SWEEP = "decode_h100"  # the report whose section "sweep" the picture of the bandwidth shows
NAMES = ("label", "case")  # under which rows have what stands first in their line of a table


def pinned(results: Path) -> frozenset[str]:
    """The digests of the pinned release's files, from the copy of its ``checksums.txt`` beside the results."""
    return frozenset(line.split()[0] for line in (results / "checksums.txt").read_text().splitlines())


def is_fresh(row: Mapping[str, Any], digests: frozenset[str]) -> bool:
    """Whether the row says which cubins it launched, and the release has all of them."""
    cubins = row.get("cubins")
    return bool(cubins) and digests.issuperset(cubins.values())


def fresh_rows(report: Mapping[str, Any], digests: frozenset[str]) -> list[Mapping[str, Any]]:
    """The rows of a report that sentences may cite: those that were measured with cubins of the pinned release."""
    return [row for row in report["rows"] if is_fresh(row, digests)]


def marked(report: Mapping[str, Any], digests: frozenset[str]) -> Mapping[str, Any]:
    """The report with ``MARK`` behind the names of all rows that are not fresh."""

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        return row if is_fresh(row, digests) else row | {name: row[name] + MARK for name in NAMES if name in row}

    return {**report, "rows": list(map(row_of, report["rows"]))} if "rows" in report else report


def is_marked(row: Mapping[str, Any]) -> bool:
    """Whether a row of a marked report has the mark."""
    return any(str(row[name]).endswith(MARK) for name in NAMES if name in row)


def explained(text: str) -> str:
    """The text of a page, with what its marks mean in front."""
    return f"{LEGEND}\n\n{text}" if MARK in text else text
