"""A made-up measurement of all sections, shaped like the real one: times from bytes, products and a fixed cost."""

from __future__ import annotations

from typing import Any

from benchmarks.decode.cases import PUBLISHED, SECTIONS, Case, published_speedup
from benchmarks.decode.page import SCHEMA
from benchmarks.decode.rows import Row, add_figures, sizes, tally

READ, MATRIX = 4.5, 790.0
# Fixed microseconds of only reading: one case's bar asks for less.
ALONE_US = 6.5
# Share of the roof and fixed microseconds of each side.
SPEEDS = {"ours": (0.95, 7.0), "xqa": (0.9, 10.0), "fa2": (0.88, 11.0), "fa2_plan_run": (0.88, 150.0)}


def time_us(case: Case, side: str, tokens: int | None = None) -> float:
    share, fixed = SPEEDS[side]
    flops = case.flops // case.q_len * (tokens or case.q_len)
    return max(case.kv_bytes / READ, 1.3 * flops / MATRIX) / 1e6 / share + fixed


def made_up_row(case: Case) -> Row:
    us = time_us(case, "ours")
    rows = max(16, case.q_len * case.q_heads // case.kv_heads)
    ours = {"us": us, "kernel": "made_up", "ctas": 264, "splits": 0, "padded_rows": rows, "expected_us": us}
    row = sizes(case) | {"ours": ours, "peers": {}, "read_alone_us": case.kv_bytes / READ / 1e6 + ALONE_US}
    for peer in case.peers:
        if peer in SPEEDS:
            row["peers"][peer] = {"us": time_us(case, peer), "difference": 2.5e-3}
        else:
            row["peers"][peer] = {"error": "RuntimeError: no engine | configuration\nfound"}
    if case.host:
        ours["host_us"] = 16.5
        row["peers"]["xqa"]["host_us"] = 21.0
    if case.peers and us < 20:
        ours["graph_us"] = us - 5
        row["peers"]["xqa"]["graph_us"] = us - 2
    if case.batch_invariant:
        row["default_us"] = us / 1.1
        row["over_default"] = 1.1
    if case.q_len > 1 and case.model in PUBLISHED:
        one = time_us(case, "ours", 1)
        row["time_over_q1"] = us / one
        row["ungrouped_us"] = row["ungrouped_measured_us"] = case.q_len * one
        row["grouped_speedup"] = row["ungrouped_us"] / us
        row["published_speedup"] = published_speedup(case.model, case.q_len, case.batch)
    add_figures(row, case.bar, READ, MATRIX)
    row["sm_mhz"] = 1980
    return row


def made_up_report() -> dict[str, Any]:
    rows = [made_up_row(case) for cases in SECTIONS.values() for case in cases()]
    return measured_alike(rows) | {
        "schema": SCHEMA,
        "question": "paged decode beside the peers",
        "sections": list(SECTIONS),
        "peers_compiled": {"modules": [], "seconds": 60.0, "errors": []},
        "seconds": dict.fromkeys(SECTIONS, 5.0),
    }


def measured_alike(rows: list[Row]) -> dict[str, Any]:
    """What the measurements of all decodes say beside their rows: where, the ceilings, the bars."""
    gpu = {"name": "NVIDIA Made-up", "driver_version": "580.1", "clocks.max.sm": "1980 MHz"}
    packages = {"cubin-runtime": "0.1.0", "flashinfer-python": "0.6.13", "torch": "2.11.0", "triton": "3.6.0"}
    return {
        "environment": {"gpu": gpu, "python": "3.12.3", "packages": packages, "date": "2026-01-02T03:04:05+00:00"},
        "read": {"bytes": 4 << 30, "tb_per_s": READ, "tb_per_s_by_ctas": {"132": 4.1, "528": READ}},
        "matrix_tflop_per_s": MATRIX,
        "sm_clock_mhz": {"min": 1755, "median": 1980, "max": 1980, "samples": 90},
        "rows": rows,
        "bars": tally(rows),
    }
