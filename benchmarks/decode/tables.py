"""What the pages of the decodes' figures share: markers, Markdown tables, and cells of a row of the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .rows import Row

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NOT_MEASURED = "No measurement is committed yet."
PEER_LABELS = {
    "xqa": "XQA",
    "fa2": "fa2",
    "fa2_plan_run": "fa2 `plan` + `run`",
    "cudnn": "cuDNN",
    "fa3": "fa3",
    "flashmla": "FlashMLA",
}

Report = Mapping[str, Any]
# A column: its head, and a row's cell.
Column = tuple[str, Callable[[Row], str]]


def us(time: float) -> str:
    return f"{time:.1f} us" if time < 100 else f"{time:.0f} us"


def column(head: str, key: str, form: Callable[[float], str], absent: str = "") -> Column:
    """Of one figure, and what stands where a row lacks it."""
    return head, lambda row: form(row[key]) if key in row else absent


TFLOPS = column("TFLOP/s", "tflop_per_s", "{:.0f}".format)
READING = (
    column("TB/s", "tb_per_s", "{:.2f}".format),
    column("of read bandwidth", "read_share", "{:.0%}".format),
    column("read-only time", "read_alone_us", us, absent="-"),
)
RATIO = column("ratio", "ratio", "{:.2f}".format)


def report_of(path: Path) -> Report:
    """A measurement; empty where there is none yet."""
    found: Report = json.loads(path.read_text()) if path.is_file() else {}
    return found


def rewrite(text: str, figures: str) -> str:
    """``text`` with ``figures`` between the markers, in place of what stood there.

    Raises:
        ValueError: it has not each marker once, in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in tail:
        raise ValueError(f"expected one {BEGIN} and one {END} behind it")
    return f"{head}{BEGIN}\n{figures}\n{END}{tail}"


def place(report: Report) -> str:
    """On what it was measured, and the ceilings."""
    environment = report["environment"]
    packages, gpu = environment["packages"], environment["gpu"]
    clock = report.get("sm_clock_mhz") or {}
    mhz = f", SM clock {clock['min']:.0f} to {clock['max']:.0f} MHz" if clock else ""
    others = [f"flashinfer-python {packages['flashinfer-python']}"] if "flashinfer-python" in packages else []
    if commit := report.get("peers_compiled", {}).get("flashmla", {}).get("commit"):
        others.append(f"FlashMLA {commit[:7]}")
    beside = ", ".join(others) or "no other library"
    rounds = f" Medians of {report['method']['rounds']} rounds." if "method" in report else ""
    return (
        f"{gpu['name']}, driver {gpu['driver_version']}{mhz}; {beside}, torch {packages.get('torch', '-')}; "
        f"{environment['date'][:10]}.\nRead bandwidth {report['read']['tb_per_s']:.2f} TB/s, bf16 matrix product "
        f"{report['matrix_tflop_per_s']:.0f} TFLOP/s.{rounds}"
    )


def section(title: str, rows: Sequence[Row], columns: Iterable[Column]) -> list[str]:
    """A title and a table: what each row is, our time and ``columns``; nothing without rows."""
    if not rows:
        return []
    columns = list(columns)

    def line(row: Row) -> list[str]:
        ours = us(row["ours"]["us"]) if "us" in row["ours"] else "failed"
        return [row["label"], ours, *(cell(row) for _, cell in columns)]

    head = ["", "ours", *(name for name, _ in columns)]
    return [f"### {title}", table(head, map(line, rows))]


def singles(rows: Sequence[Row]) -> list[Column]:
    """A column of single calls, L2 cleared before each, beside times in a sequence; none where no row has them."""

    def cell(row: Row) -> str:
        if "single_us" not in row["ours"]:
            return ""
        own = row["ours"]["single_us"]
        best = min((found["single_us"] for found in row["peers"].values() if "single_us" in found), default=None)
        return f"{us(own)} / {us(best)} ({best / own:.2f})" if best else us(own)

    return (
        [("single calls: ours / fastest other (ratio)", cell)]
        if any("single_us" in row["ours"] for row in rows)
        else []
    )


def peers_of(rows: Sequence[Row]) -> list[Column]:
    """A column for each implementation that a row has beside ours."""

    def cell_of(name: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            found = row["peers"].get(name)
            if found is None:
                return ""
            return (
                us(found["us"])
                if "us" in found
                else "failed"
                if "error" in found
                else f"{us(found['single_us'])} alone"
            )

        return cell

    names = [name for name in PEER_LABELS if any(name in row["peers"] for row in rows)]
    return [(PEER_LABELS[name], cell_of(name)) for name in names]


def invariance(title: str, rows: Sequence[Row]) -> list[str]:
    """``batch_invariant`` beside the default."""
    if not rows:
        return []

    def line(row: Row) -> list[str]:
        time, over = row["ours"].get("us"), row.get("over_default")
        times = [us(row["default_us"]), us(time), f"{over:.2f}x"] if time and over else ["", "failed", ""]
        return [row["label"], *times]

    head = ["", "default", "`batch_invariant`", "over default"]
    return [f"### {title}", table(head, map(line, rows))]


def replays(title: str, rows: Sequence[Row]) -> list[str]:
    """Those rows that were timed in graphs, beside the fastest other time in one."""
    rows = [row for row in rows if "graph_us" in row["ours"]]
    if not rows:
        return []

    def line(row: Row) -> list[str]:
        found = row["peers"].values()
        best = min((one["graph_us"] for one in found if "graph_us" in one), default=None)
        ratio = f"{row['ratio_graph']:.2f}" if "ratio_graph" in row else ""
        return [f"{row['section']}: {row['label']}", us(row["ours"]["graph_us"]), us(best) if best else "", ratio]

    return [f"### {title}", table(["", "ours", "fastest other", "ratio"], map(line, rows))]


def failures(rows: Sequence[Row]) -> list[str]:
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
            f"`{_escaped(error)}`",
            f"{len(struck)}: {struck[0]}" + (" ..." if len(struck) > 1 else ""),
        ]
        for (name, error), struck in where.items()
    ]
    return ["### What failed", table(["", "error", "rows"], lines)]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = "|" + "---|" * len(head)
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")
