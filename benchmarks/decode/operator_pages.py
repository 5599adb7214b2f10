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


def draft_tokens(report: Report) -> str:
    """What verifying 8 to 64 draft tokens takes, beside context attention."""
    if not report:
        return NOT_MEASURED
    cases = {row["case"]: row["us"] for row in report["rows"]}
    heads = "32/8 heads"
    lengths = [int(case.rpartition(" ")[2]) for case in cases if case.startswith(f"context {heads} q_len")]
    names = (f"bf16 {heads} q_len {{}}", f"bf16 {heads} q_len {{}} invariant", f"context {heads} q_len {{}}")
    lines = [(str(n), *(f"{cases[name.format(n)] / 1000:.2f} ms" for name in names)) for n in lengths]
    head = ("query tokens", "decode", "with `batch_invariant`", "context attention, which takes no mask")
    where = f"{report['environment']['gpu']['name']}, {report['environment']['date'][:10]}"
    what = (
        f"{report['batch']} requests of {report['keys']:,} keys, 32 query heads over 8 KV heads of head_dim 128, bf16"
    )
    return f"{where}. {what}.\n\n{table(head, lines)}"


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
