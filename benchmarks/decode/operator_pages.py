"""The figures of the guides on append and merge and on batch invariance, as Markdown from the JSON."""

from __future__ import annotations

import re
from typing import Any

from .tables import NOT_MEASURED, Report, table

_TOKENS = 16384  # fewer are bound by the launch
# The most that batch_invariant may cost; between these batches there is no bar.
_PREFILL, _ONE_REQUEST, _MANY_REQUESTS, _MANY = 1.12, 1.4, 1.15, 16


def copying(report: Report) -> str:
    """Appends and merges: bandwidth, beside a copy and FlashInfer."""
    if not report:
        return NOT_MEASURED
    rows: list[dict[str, Any]] = [row for row in (*report["append"], *report["merge"]) if row["tokens"] >= _TOKENS]
    lines = [
        (
            f"merge of {row['name']}" if "parts" in row else row["name"],
            f"{row['tokens']:,}",
            f"{row['ours']['gb_per_s'] / 1000:.2f} TB/s",
            f"{row['of_copy']:.2f}",
            f"{row['of_flashinfer']:.2f}" if row.get("of_flashinfer") else "-",
        )
        for row in rows
    ]
    return f"{_place(report)}.\n\n" + table(
        ("case", "tokens", "ours", "of the copy's rate", "of FlashInfer's rate"), lines
    )


def invariance(report: Report) -> str:
    """What batch_invariant costs, beside the bars."""
    if not report:
        return NOT_MEASURED
    lines = []
    for row in report["rows"]:
        bar = _bar(row["case"])
        met = "-" if bar is None else "yes" if row["ratio"] <= bar else "**no**"
        times = (f"{row['default_us']:.1f} us", f"{row['invariant_us']:.1f} us", f"{row['ratio']:.2f}x")
        lines.append((row["case"], *times, f"at most {bar}x" if bar else "-", met))
    return f"{_place(report)}.\n\n" + table(
        ("case", "default", "`batch_invariant`", "over default", "bar", "met"), lines
    )


def _bar(case: str) -> float | None:
    if case.startswith("prefill"):
        return _PREFILL
    found = re.search(r"batch (\d+)", case)
    batch = int(found[1]) if found else 0
    return _ONE_REQUEST if batch == 1 else _MANY_REQUESTS if batch >= _MANY else None


def _place(report: Report) -> str:
    environment = report["environment"]
    packages = environment["packages"]
    peer = f", flashinfer-python {packages['flashinfer-python']}" if "flashinfer-python" in packages else ""
    return f"{environment['gpu']['name']}, torch {packages.get('torch', '-')}{peer}; {environment['date'][:10]}"
