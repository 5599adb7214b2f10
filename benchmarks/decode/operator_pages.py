"""The figures of the guides on append and merge and on batch invariance, as Markdown from the JSON."""

from __future__ import annotations

from typing import Any

from .tables import NOT_MEASURED, Report, table

_TOKENS = 16384  # fewer are bound by the launch


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
    """What batch_invariant costs."""
    if not report:
        return NOT_MEASURED
    lines = []
    for row in report["rows"]:
        times = (f"{row['default_us']:.1f} us", f"{row['invariant_us']:.1f} us", f"{row['ratio']:.2f}x")
        lines.append((row["case"], *times))
    return f"{_place(report)}.\n\n" + table(("case", "default", "`batch_invariant`", "over default"), lines)


def _place(report: Report) -> str:
    environment = report["environment"]
    packages = environment["packages"]
    beside = f", flashinfer-python {packages['flashinfer-python']}" if "flashinfer-python" in packages else ""
    return f"{environment['gpu']['name']}, torch {packages.get('torch', '-')}{beside}; {environment['date'][:10]}"
