"""Tables of decodes planned for long contexts, and of the same decodes timed in other ways, from their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .tables import Report, table, us


def planned(report: Report) -> tuple[str, ...]:
    """A title and a table: ours by what it was planned for, and the peer; the ratio is to the longest."""
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["us"]))
    longest = f"ours, {report['bounds'][-1]}"

    def line(row: Mapping[str, Any]) -> list[str]:
        times = [us(row["us"][name]) if name in row["us"] else "failed" for name in names]
        return [f"{row['section']}, {row['label']}", *times, _ratio(row["us"], longest)]

    head = ["", *names, "ratio"]
    title = f"### Planned for the model's longest context, bf16, pages of {report['page']} keys (batch x keys)"
    return title, table(head, map(line, report["rows"]))


def other_methods(report: Report) -> tuple[str, ...]:
    """A title and a table: our time and the ratio to the best peer, by the way to time them."""
    ways = list(dict.fromkeys(way for row in report["rows"] for way in row["us"]))

    def cell(times: Mapping[str, float]) -> str:
        return f"{us(times['ours'])}, {_ratio(times, 'ours')}" if "ours" in times else "failed"

    lines = [[row["label"], *(cell(row["us"].get(way, {})) for way in ways)] for row in report["rows"]]
    return "### The same decodes timed in other ways: ours, ratio", table(["", *ways], lines)


def _ratio(times: Mapping[str, float], ours: str) -> str:
    peers = [time for name, time in times.items() if not name.startswith("ours")]
    return f"{min(peers) / times[ours]:.2f}" if peers and ours in times else ""
