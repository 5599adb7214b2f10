"""What measurements say in a sentence: where another implementation is faster, and the lines of the overview."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .freshness import EARLIER, NAMES, SWEEP, fresh_rows, is_fresh, pinned
from .tables import PEER_LABELS, Report, report_of, table

# Ratios from here on are as fast, within what rounds differ by.
AS_FAST = 0.995
# What tells rows of these sections from others of the same name.
_OF_EARLIER = EARLIER[0].lower() + EARLIER[1:].removesuffix(".")
_OF_SECTION = {"fp8": " of e4m3", "sweep": " of the picture"}


def slower(report: Report) -> tuple[str, ...]:
    """A paragraph that names the rows in which another implementation is faster; nothing where there is none beside."""
    rows = [row for row in report.get("rows", ()) if "ratio" in row]
    if not rows:
        return ()
    behind: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: float(row["ratio"])):
        if row["ratio"] < AS_FAST:
            behind.setdefault(_fastest(row), []).append(f"{_name(row)} ({row['ratio']:.2f})")
    if not behind:
        return (f"**Where another implementation is faster**: in none of the {len(rows)} rows with one.",)
    found = "; ".join(f"{PEER_LABELS.get(name, name)} at {', '.join(labels)}" for name, labels in behind.items())
    count = sum(map(len, behind.values()))
    return (f"**Where another implementation is faster**, in {count} of the {len(rows)} rows with one: {found}.",)


def _fastest(row: Mapping[str, Any]) -> str:
    if "best_peer" in row:
        return str(row["best_peer"])
    theirs = {name: us for name, us in row["us"].items() if not name.startswith("ours")}
    return min(theirs, key=theirs.__getitem__)


def _name(row: Mapping[str, Any]) -> str:
    name = next(str(row[key]) for key in NAMES if key in row)
    return f"{name}{_OF_SECTION.get(row.get('section', ''), '')}"


def overview(results: Path) -> str:
    """The table of the pages of results, each in one line."""
    digests = pinned(results)
    host, serving, fetch = (report_of(results / f"{name}.json") for name in ("host_cost", "serving", "fetch"))
    decode, mla, prefill = (
        fresh_rows(report_of(results / f"{name}.json"), digests) for name in ("decode", "mla", "prefill")
    )
    share = max((row["read_share"] for row in decode if "read_share" in row), default=0.0)
    call = host["microseconds"]["plan.run, same tensors"]
    of_mla = _fastest_of([PEER_LABELS[name] for name in _peers(mla)])
    of_prefill = _fastest_of([PEER_LABELS[name] for name in PEER_LABELS if any(name in row["us"] for row in prefill)])
    cost = f"a planned run costs {call['ratio']:.1f} times a C loop that makes the same launch"
    lines = (
        (
            "[Paged decode on an H200](decode.md)",
            _said(
                decode, f"up to {share:.0%} of the read bandwidth; ", "the speed of the fastest other implementation"
            ),
        ),
        ("[MLA decode on an H200](mla.md)", _said(mla, "", f"the speed of {of_mla}")),
        ("[Context attention on an H200](prefill.md)", _said(prefill, "", f"the speed of {of_prefill}")),
        ("[Attention on an H100](h100.md)", "the same tables of paged decode, MLA and context attention"),
        (
            "[Host cost and first launch](host.md)",
            cost if is_fresh(call, digests) else _OF_EARLIER,
        ),
        ("[L2 policies](l2_policies.md)", "which policy reads keys and values fastest, and which the kernels have"),
        (
            "[A serving loop under load](serving.md)",
            f"{serving['load']['requests']:,} requests with chunked prefill and CUDA graphs; bitwise identical in "
            "any order of arrival",
        ),
        (
            "[Fetching and verifying](fetching.md)",
            f"{fetch['ratios']['cold_speedup']:.2f} times faster than flashinfer-python, cold",
        ),
        ("[Correctness](correctness.md)", "float64 references, bit equality, sanitizers"),
    )
    swept = [row for row in report_of(results / f"{SWEEP}.json")["rows"] if row["section"] == "sweep"]
    age = "" if all(is_fresh(row, digests) for row in swept) else f"\n\n{EARLIER}"
    picture = "![Bandwidth of keys and values read, against batch and length](../decode_bandwidth.png)"
    return f"{picture}{age}\n\n{table(('page', 'in one line'), lines)}"


def _fastest_of(names: Sequence[str]) -> str:
    return f"the fastest of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _said(rows: Iterable[Mapping[str, Any]], before: str, after: str) -> str:
    """The line of a page: what its rows with a ratio range over, or that no row of the pinned release has one."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios:
        return _OF_EARLIER
    return f"{before}in sequences of layers {min(ratios):.2f} to {max(ratios):.2f} times {after}"


def _peers(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    measured = {name for row in rows for name, found in row["peers"].items() if "us" in found}
    return [name for name in PEER_LABELS if name in measured]
