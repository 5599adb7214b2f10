"""Tables of attention as engines call it, and of the same decodes timed in other ways, from their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .freshness import is_marked
from .summary import AS_FAST
from .tables import PEER_LABELS, Report, table, us


def planned(report: Report) -> tuple[str, ...]:
    """A title and a table: ours by what it was planned for, and the others; the ratio is to the longest."""
    title = f"### Planned for the longest context, as engines do, pages of {report['page']} keys, bf16 if not stated"
    return title, _place(report), _by_bound(report, f"ours, {report['bounds'][-1]}")


def chunks(report: Report) -> tuple[str, ...]:
    """A title and a table of new query tokens behind cached contexts; the ratio is to the tight bound, as engines'."""
    title = f"## New tokens behind cached contexts, bf16, pages of {report['page']} keys"
    return title, _place(report), _by_bound(report, "ours, tight")


def _by_bound(report: Report, ours: str) -> str:
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["us"]))

    def time_of(row: Mapping[str, Any], name: str) -> str:
        if name in row["us"]:
            return us(row["us"][name])
        return "failed" if name in row["errors"] else "-"

    lines = [
        [f"{row['section']}, {row['label']}", *(time_of(row, name) for name in names), _ratio(row["us"], ours)]
        for row in report["rows"]
    ]
    return table(["", *names, "ratio"], lines)


def _place(report: Report) -> str:
    """On what it was measured, beside whom, and why one is missing."""
    environment, packages = report["environment"], report["environment"]["packages"]
    known = (("flashinfer-python", "flashinfer-python"), ("vllm", "FlashAttention-3 of vLLM"))
    peers = [f"{words} {packages[name]}" for name, words in known if name in packages]
    skipped = [f" {PEER_LABELS.get(name, name)} was not there (`{why}`)." for name, why in report["skipped"].items()]
    place = f"{environment['gpu']['name']}; {', '.join(peers) or 'no other library'}; {environment['date'][:10]}"
    return f"{place}. Medians of {report['method']['rounds']} rounds.{''.join(skipped)}"


def other_methods(report: Report) -> tuple[str, ...]:
    """A title and a table: our time and the ratio to the fastest other, by the way to time them."""
    ways = list(dict.fromkeys(way for row in report["rows"] for way in row["us"]))

    def cell(times: Mapping[str, float]) -> str:
        return f"{us(times['ours'])}, {_ratio(times, 'ours')}" if "ours" in times else "failed"

    lines = [[row["label"], *(cell(row["us"].get(way, {})) for way in ways)] for row in report["rows"]]
    return "### The same decodes timed in other ways: ours, ratio", table(["", *ways], lines), _spread(report)


def _spread(report: Report) -> str:
    """How far ratios of other ways are from those of the standard way, the first, in rows of the pinned release."""
    rows = [row for row in report["rows"] if not is_marked(row)]
    standard = next((way for row in rows for way in row["us"]), "")
    known = [(row["label"], {way: ratio for way, us in row["us"].items() if (ratio := _times(us))}) for row in rows]
    known = [(label, ratios) for label, ratios in known if next(iter(ratios), "") == standard]
    if not known:
        return "No row has a ratio."
    firsts = [(label, next(iter(ratios.values())), ratios) for label, ratios in known]
    apart = max(abs(ratio - first) for _, first, ratios in firsts for ratio in ratios.values())
    least = min(ratio for _, ratios in known for ratio in ratios.values())
    changed = [
        f"{label}, {way} ({first:.2f} to {ratio:.2f})"
        for label, first, ratios in firsts
        for way, ratio in ratios.items()
        if (ratio < AS_FAST) != (first < AS_FAST)
    ]
    return (
        f"Ratios are at most {apart:.2f} from that of the first column; the least of all is {least:.2f}. "
        f"Who is faster changes in {len(changed)} of {sum(len(ratios) - 1 for _, ratios in known)} cells"
        f"{': ' if changed else ''}{'; '.join(changed)}."
    )


def _times(times: Mapping[str, float], ours: str = "ours") -> float | None:
    """The time of the fastest other implementation, divided by ours."""
    peers = [time for name, time in times.items() if not name.startswith("ours")]
    return min(peers) / times[ours] if peers and ours in times else None


def _ratio(times: Mapping[str, float], ours: str) -> str:
    ratio = _times(times, ours)
    return "" if ratio is None else f"{ratio:.2f}"
