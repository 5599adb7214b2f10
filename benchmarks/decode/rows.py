"""Rows as JSON and as text: sizes, the figures derived from times, the bar's verdict. No torch."""

from __future__ import annotations

from typing import Any

from .bars import Bar
from .cases import Case
from .mla_cases import MlaCase

Row = dict[str, Any]
# Norm of the difference to a peer's output over its norm: rounding of bf16 and e4m3 stays well below.
DISAGREEMENT = 0.05
# The same of the difference to a float64 reference.
REFERENCE_DISAGREEMENT = 0.01


def sizes(case: Case) -> Row:
    """What a row says of its case."""
    length = case.longest if len(set(case.lengths)) == 1 else None
    return {
        "section": case.section,
        "label": case.label,
        "batch": case.batch,
        "length": length,
        "keys": sum(case.lengths),
        "q_len": case.q_len,
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "page": case.page,
        "q_dtype": case.q_dtype,
        "kv_dtype": case.kv_dtype,
        "kv_bytes": case.kv_bytes,
        "flops": case.flops,
    }


def mla_sizes(case: MlaCase) -> Row:
    """The same of an MLA case."""
    return {
        "section": case.section,
        "label": case.label,
        "batch": case.batch,
        "length": case.length,
        "q_len": case.q_len,
        "heads": case.heads,
        "latent": case.latent,
        "page": case.page,
        "q_dtype": case.q_dtype,
        "kv_dtype": case.kv_dtype,
        "batch_invariant": case.batch_invariant,
        "kv_bytes": case.kv_bytes,
        "flops": case.flops,
    }


def add_figures(row: Row, bar: Bar, read_tb_per_s: float, matrix_tflop_per_s: float) -> None:
    """Bandwidth, rates and ratios of a measured row, then its bar and whether it is met.

    A ratio is the peer's time over ours: above 1 ours is faster. The share of the matrix product counts what the rows
    of a tile have with their padding, where the row says that.
    """
    ours = row["ours"]
    us = ours.get("us")
    if us:
        row["time_us"] = us
        row["tb_per_s"] = row["kv_bytes"] / us / 1e6
        row["read_share"] = row["tb_per_s"] / read_tb_per_s
        row["tflop_per_s"] = row["flops"] / us / 1e6
        row["matrix_share"] = _padded_flops(row) / us / 1e6 / matrix_tflop_per_s
        times = {name: found["us"] for name, found in row["peers"].items() if "us" in found}
        for name, theirs in times.items():
            row[f"ratio_{name}"] = theirs / us
        for name, found in row["peers"].items():  # what no graph holds is compared in single calls
            if "us" not in found and "single_us" in found and "single_us" in ours:
                row[f"ratio_{name}"] = found["single_us"] / ours["single_us"]
        # Planning again does not make the peer faster: it has a bar of its own.
        alone = {name: theirs for name, theirs in times.items() if name != "fa2_plan_run"}
        if alone:
            row["best_peer"] = min(alone, key=alone.__getitem__)
            row["ratio"] = alone[row["best_peer"]] / us
        replayed = [found["graph_us"] for found in row["peers"].values() if "graph_us" in found]
        if replayed and "graph_us" in ours:
            row["ratio_graph"] = min(replayed) / ours["graph_us"]
            row["tb_per_s_graph"] = row["kv_bytes"] / ours["graph_us"] / 1e6
    judge(row, bar)


def _padded_flops(row: Row) -> int:
    padded_rows = row["ours"].get("padded_rows")
    if padded_rows is None:
        return int(row["flops"])
    return int(4 * row["keys"] * row["kv_heads"] * padded_rows * row["head_dim"])


def judge(row: Row, bar: Bar) -> None:
    """The row's time over ``read_alone_us``, its bar and whether it is met.

    ``met`` is None where there is no bar, or where a peer that could decide it failed. ``bar_below_read_alone`` is True
    where the bar asks for less time than reading the same bytes alone takes; else it is absent.
    """
    us, alone = row["ours"].get("us"), row.get("read_alone_us")
    row["bar"] = str(bar)
    row["met"] = False if bar.alternatives and not us else bar.met(row)
    if us and alone:
        row["over_read_alone"] = us / alone
        asked = bar.time_us(row, us)
        if asked is not None and asked < alone:
            row["bar_below_read_alone"] = True


def is_out_of_reach(row: Row) -> bool:
    """Whether the row misses a bar that asks for less time than our kernel takes that only reads as much."""
    return row["met"] is False and "bar_below_read_alone" in row


def verdict_of(row: Row) -> str:
    """What a printed line says of the row's bar."""
    verdict = {True: "MET", False: "not met", None: "undecided"}[row["met"]]
    return f"{verdict}, below read alone" if is_out_of_reach(row) else verdict


def line_of(row: Row) -> str:
    """A row as one line of the printed table."""
    ours = row["ours"]
    if "us" not in ours:
        return f"{row['section']:12s} {row['label']:40s} FAILED {ours['error'][:200]}"
    parts = [f"{row['section']:12s} {row['label']:40s} ours {ours['us']:8.1f} us"]
    parts.append(f"{row['tflop_per_s']:4.0f} TFLOP/s {row['tb_per_s']:5.2f} TB/s {100 * row['read_share']:3.0f}%")
    parts += [f"read alone {row['read_alone_us']:.1f}"] if "read_alone_us" in row else []
    for name, found in row["peers"].items():
        time = found.get("us", found.get("single_us"))
        parts.append(f"{name} failed" if time is None else f"{name} {time:.1f}")
        if not found.get("difference", 0.0) < DISAGREEMENT:  # a NaN too
            parts.append(f"DISAGREES by {found['difference']:.2g}")
    words = {
        "ratio": "ratio",
        "ratio_fa2_plan_run": "to plan+run",
        "ratio_graph": "in graphs",
        "time_over_q1": "over q_len 1",
        "grouped_speedup": "grouped speedup",
        "published_speedup": "published",
        "over_bf16": "over bf16",
        "over_default": "over default",
        "reference_difference": "off float64",
    }
    parts += [f"{word} {row[key]:.3f}" for key, word in words.items() if key in row]
    if "graph_us" in ours:
        parts.append(f"graph {ours['graph_us']:.1f} us")
    if "host_us" in ours:
        theirs = [f" ({name} {found['host_us']:.1f})" for name, found in row["peers"].items() if "host_us" in found]
        parts.append(f"host {ours['host_us']:.1f} us{''.join(theirs)}")
    if row["bar"]:
        parts.append(f"[{row['bar']}: {verdict_of(row)}]")
    return "  ".join(parts)


def disagreements(rows: list[Row]) -> list[str]:
    """The rows whose output differs from a peer's, or from the reference, by more than rounding."""
    return [
        f"{row['section']} {row['label']}: {name} {difference:.2g}"
        for row in rows
        for name, difference, most in (
            *((name, found.get("difference", 0.0), DISAGREEMENT) for name, found in row["peers"].items()),
            ("float64", row.get("reference_difference", 0.0), REFERENCE_DISAGREEMENT),
        )
        if not difference < most  # a NaN too
    ]


def tally(rows: list[Row]) -> dict[str, int]:
    """How many bars are met, not met, and undecided for want of a peer."""
    barred = [row["met"] for row in rows if row["bar"]]
    return {"met": barred.count(True), "not_met": barred.count(False), "undecided": barred.count(None)}
