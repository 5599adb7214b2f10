"""The figures of ``docs/results/decode.md``, as Markdown from the JSON, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cases import MODELS, PUBLISHED_BATCHES
from .freshness import MARK, is_marked
from .rows import Row
from .tables import (
    NOT_MEASURED,
    RATIO,
    READING,
    Report,
    failures,
    invariance,
    peers_of,
    place,
    replays,
    section,
    singles,
    table,
    us,
)

SCHEMA = 3
SINGLE_CALLS = 2  # the schema of reports whose times are those of single calls
SECTION_TITLES = {
    "gqa": "One query token, bf16, head_dim 128 (batch x keys)",
    "speculative": "Several query tokens, causal, bf16, 16384 keys",
    "fp8": "e4m3 keys and values (batch x keys)",
    "ragged": "Ragged lengths, bf16, head_dim 128",
}
BELOW = "Below the published speedup"
_GROUPED_TITLES = {"grouped": "e4m3 queries, keys and values", "grouped_bf16": "the same in bf16"}


def figures(report: Report, *, pictures: bool = True) -> str:
    """Everything between the markers; ``pictures``: with those drawn from this report."""
    if report.get("schema") not in (SCHEMA, SINGLE_CALLS):
        return NOT_MEASURED
    rows = report["rows"]
    parts = [place(report), *(_pictures(rows) if pictures and rows else ())]
    for name, title in SECTION_TITLES.items():
        found = [row for row in rows if row["section"] == name]
        parts += section(title, found, (*READING, *peers_of(found), RATIO, *singles(found)))
    for name, title in _GROUPED_TITLES.items():
        found = [row for row in rows if row["section"] == name]
        parts += [*_grouped(title, found), *_below(found)]
    parts += invariance(
        "Batch invariance, bf16, head_dim 128 (batch x keys)", [row for row in rows if row["section"] == "invariant"]
    )
    parts += replays("Cases under 20 us, timed as CUDA graph replays (keys and values exceed twice the L2)", rows)
    parts += _host([row for row in rows if "host_us" in row["ours"]])
    parts += failures(rows)
    return "\n\n".join(parts)


def _pictures(rows: Sequence[Row]) -> list[str]:
    bandwidth = "![Bandwidth of keys and values read, against batch and length](../decode_bandwidth.png)"
    roofline = "![Rate of the products against their intensity, and the roofs](../decode_roofline.png)"
    return [bandwidth, roofline] if any(row["section"] == "sweep" for row in rows) else [roofline]


def _grouped(title: str, rows: Sequence[Row]) -> list[str]:
    parts = []
    for model, (heads, head_dim) in MODELS.items():
        by_size = {(row["batch"], row["q_len"]): row for row in rows if row["label"].startswith(f"{model},")}
        lines = [_grouped_line(batch, by_size) for batch in PUBLISHED_BATCHES if (batch, 1) in by_size]
        if lines:
            head = ["batch", "one token", *(f"{n} tokens: time, speedup (published)" for n in (2, 4, 8))]
            parts += [
                f"### Grouping, {title}: {model}, {heads} over 8 heads, D {head_dim}, 16384 keys",
                table(head, lines),
            ]
    return parts


def _below(rows: Sequence[Row]) -> list[str]:
    """Which cells are below the published speedup."""
    cells = [row for row in rows if "time_over_q1" in row]
    if not cells:
        return []
    below = [row["label"] for row in cells if row["grouped_speedup"] < row["published_speedup"]]
    return [f"{BELOW}, of {len(cells)} cells: {'; '.join(below) or 'none'}."]


def _grouped_line(batch: int, rows: Mapping[tuple[int, int], Row]) -> list[str]:
    one = rows[batch, 1]
    line = [f"{batch}{_mark_of(one)}", us(one["ours"]["us"]) if "us" in one["ours"] else "failed"]
    for q_len in (2, 4, 8):
        row = rows.get((batch, q_len), {})
        if "time_over_q1" not in row:
            line.append("failed")
            continue
        speedup, published = row["grouped_speedup"], row["published_speedup"]
        line.append(f"{row['time_over_q1']:.2f}x, {speedup:.2f} ({published:.2f}){_mark_of(row)}")
    return line


def _mark_of(row: Row) -> str:
    """What stands behind a figure of a row whose name is not beside it."""
    return MARK if is_marked(row) else ""


def _host(rows: Sequence[Row]) -> list[str]:
    def words(row: Row) -> str:
        xqa = row["peers"].get("xqa", {}).get("host_us")
        return f"{row['label']}: {row['ours']['host_us']:.1f} us" + (f" (XQA's call {xqa:.1f})" if xqa else "")

    return [f"Host cost of a planned `run` with torch tensors: {'; '.join(map(words, rows))}."] if rows else []
