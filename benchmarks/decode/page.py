"""The figures of ``docs/decode.md``, written from the JSON between two markers, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cases import MODELS, PUBLISHED_BATCHES
from .rows import Row, is_out_of_reach

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
SCHEMA = 2
PEER_LABELS = {"xqa": "XQA", "fa2": "fa2", "fa2_plan_run": "fa2 `plan` + `run`", "cudnn": "cuDNN"}
SECTION_TITLES = {
    "gqa": "One query token, bf16, head_dim 128 (batch x keys)",
    "speculative": "Several query tokens, causal, bf16, 16384 keys",
    "fp8": "e4m3 keys and values (batch x keys)",
    "ragged": "Ragged lengths, bf16, head_dim 128",
}
_GROUPED_TITLES = {"grouped": "e4m3 queries, keys and values", "grouped_bf16": "the same in bf16"}
_VERDICTS = {True: "yes", False: "**no**", None: "-"}


def rewrite(text: str, report: Mapping[str, Any]) -> str:
    """``text`` with what stands between the markers made anew.

    Raises:
        ValueError: it has not each marker once, in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in tail:
        raise ValueError(f"expected one {BEGIN} and one {END} behind it")
    return f"{head}{BEGIN}\n{figures(report)}\n{END}{tail}"


def figures(report: Mapping[str, Any]) -> str:
    """Everything between the markers, as Markdown."""
    if report.get("schema") != SCHEMA:
        return "Not measured yet."
    rows = report["rows"]
    parts = [_place(report), *_pictures(rows)]
    for section, title in SECTION_TITLES.items():
        parts += _section(title, [row for row in rows if row["section"] == section])
    for section, title in _GROUPED_TITLES.items():
        parts += _grouped(title, [row for row in rows if row["section"] == section])
    parts += _invariant([row for row in rows if row["section"] == "invariant"])
    parts += _short([row for row in rows if "graph_us" in row["ours"]])
    parts += _host([row for row in rows if "host_us" in row["ours"]])
    parts += _failed(rows)
    return "\n\n".join(parts)


def _place(report: Mapping[str, Any]) -> str:
    environment, bars = report["environment"], report["bars"]
    packages, gpu = environment["packages"], environment["gpu"]
    clock = report.get("sm_clock_mhz") or {}
    mhz = f", SM clock {clock['min']:.0f} to {clock['max']:.0f} MHz" if clock else ""
    peer = f"flashinfer-python {packages['flashinfer-python']}" if "flashinfer-python" in packages else "no peer"
    undecided = f" ({bars['undecided']} undecided)" if bars["undecided"] else ""
    beyond = sum(map(is_out_of_reach, report["rows"]))
    below = f"; {beyond} not met ask for less than read alone" if beyond else ""
    return (
        f"{gpu['name']}, driver {gpu['driver_version']}{mhz}; {peer}, torch {packages.get('torch', '-')}; "
        f"{environment['date'][:10]}.\nRead bandwidth {report['read']['tb_per_s']:.2f} TB/s, bf16 matrix product "
        f"{report['matrix_tflop_per_s']:.0f} TFLOP/s. "
        f"Bars met: {bars['met']} of {sum(bars.values())}{undecided}{below}."
    )


def _pictures(rows: Sequence[Row]) -> list[str]:
    bandwidth = "![Bandwidth of keys and values read, against batch and length](decode_bandwidth.png)"
    roofline = "![Rate of the products against their intensity, under the measured roofs](decode_roofline.png)"
    return [bandwidth, roofline] if any(row["section"] == "sweep" for row in rows) else [roofline]


def _section(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    peers = [name for name in PEER_LABELS if any(name in row["peers"] for row in rows)]
    head = ["", "ours", "TB/s", "of read", "read alone", *(PEER_LABELS[name] for name in peers), "ratio", "bar", "met"]
    return [f"**{title}**", table(head, ([*_ours(row), *_theirs(row, peers), *_bar(row)] for row in rows))]


def _ours(row: Row) -> list[str]:
    us, alone = row["ours"].get("us"), row.get("read_alone_us")
    read_alone = _us(alone) if alone else "-"
    if us is None:
        return [row["label"], "failed", "", "", read_alone]
    return [row["label"], _us(us), f"{row['tb_per_s']:.2f}", f"{100 * row['read_share']:.0f}%", read_alone]


def _theirs(row: Row, peers: Sequence[str]) -> list[str]:
    found = (row["peers"].get(name) for name in peers)
    return ["" if one is None else _us(one["us"]) if "us" in one else "failed" for one in found]


def _bar(row: Row) -> list[str]:
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    return [ratio, row["bar"] or "-", _verdict(row)]


def _verdict(row: Row) -> str:
    return "no (below read alone)" if is_out_of_reach(row) else _VERDICTS[row["met"]]


def _grouped(title: str, rows: Sequence[Row]) -> list[str]:
    parts = []
    for model, (heads, head_dim) in MODELS.items():
        by_size = {(row["batch"], row["q_len"]): row for row in rows if row["label"].startswith(f"{model},")}
        lines = [_grouped_line(batch, by_size) for batch in PUBLISHED_BATCHES if (batch, 1) in by_size]
        if lines:
            head = ["batch", "one token", *(f"{n} tokens: time, speedup (published), bar met" for n in (2, 4, 8))]
            parts += [
                f"**Grouping, {title}: {model}, {heads} over 8 heads, D {head_dim}, 16384 keys**",
                table(head, lines),
            ]
    return parts


def _grouped_line(batch: int, rows: Mapping[tuple[int, int], Row]) -> list[str]:
    line = [str(batch), _us(rows[batch, 1]["ours"]["us"]) if "us" in rows[batch, 1]["ours"] else "failed"]
    for q_len in (2, 4, 8):
        row = rows.get((batch, q_len), {})
        if "time_over_q1" not in row:
            line.append("failed")
            continue
        speedup, published = row["grouped_speedup"], row["published_speedup"]
        line.append(f"{row['time_over_q1']:.2f}x, {speedup:.2f} ({published:.2f}), {_verdict(row)}")
    return line


def _invariant(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []

    def line(row: Row) -> list[str]:
        us, over = row["ours"].get("us"), row.get("over_default")
        times = [_us(row["default_us"]), _us(us), f"{over:.2f}x"] if us and over else ["", "failed", ""]
        return [row["label"], *times, row["bar"], _verdict(row)]

    head = ["", "default", "`batch_invariant`", "over default", "bar", "met"]
    return ["**Batch invariance, bf16, head_dim 128 (batch x keys)**", table(head, map(line, rows))]


def _short(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []

    def line(row: Row) -> list[str]:
        found = row["peers"].values()
        best = min((one["graph_us"] for one in found if "graph_us" in one), default=None)
        ratio = f"{row['ratio_graph']:.2f}" if "ratio_graph" in row else ""
        return [f"{row['section']}: {row['label']}", _us(row["ours"]["graph_us"]), _us(best) if best else "", ratio]

    title = "**Cases under 20 us, as graph replays over more keys and values than twice L2 holds**"
    return [title, table(["", "ours", "best peer", "ratio"], map(line, rows))]


def _host(rows: Sequence[Row]) -> list[str]:
    def words(row: Row) -> str:
        xqa = row["peers"].get("xqa", {}).get("host_us")
        return f"{row['label']}: {row['ours']['host_us']:.1f} us" + (f" (XQA's call {xqa:.1f})" if xqa else "")

    return [f"Host cost of a planned `run` with torch tensors: {'; '.join(map(words, rows))}."] if rows else []


def _failed(rows: Sequence[Row]) -> list[str]:
    """Each error once, with the rows that it struck."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, found in (("ours", row["ours"]), *row["peers"].items()):
            if "error" in found:
                first_line = found["error"].partition("\n")[0][:160]
                where.setdefault((name, first_line), []).append(f"{row['section']} {row['label']}")
    if not where:
        return []
    lines = [
        [
            PEER_LABELS.get(name, name),
            f"`{_cell(error)}`",
            f"{len(struck)}: {struck[0]}" + (" ..." if len(struck) > 1 else ""),
        ]
        for (name, error), struck in where.items()
    ]
    return ["**What failed**", table(["", "error", "rows"], lines)]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = "|" + "---|" * len(head)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])


def _us(us: float) -> str:
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")
