"""A Markdown table of the profiler results (JSON) of single launches."""

from __future__ import annotations

from .rows import Row
from .tables import Column, Report, column, table, us

SCHEMA = 1


def _stalls(row: Row) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {times:.1f}" for name, times in row["stalls_per_issue"].items())


_COLUMNS: tuple[Column, ...] = (
    ("", lambda row: row["label"]),
    column("time", "us", us, absent="-"),
    column("keys and values", "kv_mb", "{:.0f} MB".format),
    column("read from DRAM", "dram_read_mb", "{:.0f} MB".format, absent="-"),
    column("written", "dram_write_mb", "{:.1f} MB".format, absent="-"),
    column("DRAM", "dram_share", "{:.0f}%".format, absent="-"),
    column("L2", "l2_share", "{:.0f}%".format, absent="-"),
    column("tensor", "tensor_share", "{:.0f}%".format, absent="-"),
    ("stall cycles per issued instruction", _stalls),
    column("issue", "issue_share", "{:.0f}%".format, absent="-"),
)


def profiled(report: Report, benchmark: str) -> tuple[str, ...]:
    """A table of the rows of one benchmark, or nothing where none was profiled."""
    if report.get("schema") != SCHEMA:
        return ()
    rows = [row for row in report["rows"] if row["benchmark"] == benchmark]
    lines = [[cell(row) for _, cell in _COLUMNS] for row in rows]
    gpu, date = report["environment"]["gpu"], report["environment"]["date"][:10]
    title = "### Profiler: one launch with cold caches, utilisation relative to peak"
    where = f"{gpu['name']}, driver {gpu['driver_version']}; {date}."
    return title, where, table([head for head, _ in _COLUMNS], lines)
