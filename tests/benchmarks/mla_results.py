"""A made-up measurement of the MLA decode, shaped like the real one: times from bytes, products and a fixed cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.decode.mla_cases import MlaCase, mla_cases
from benchmarks.decode.mla_page import SCHEMA
from benchmarks.decode.rows import Row, add_figures, mla_sizes
from tests.benchmarks.decode_results import ALONE_US, MATRIX, READ, measured_alike


def mla_time_us(case: MlaCase, fixed: float) -> float:
    return max(case.kv_bytes / READ, 1.3 * case.flops / MATRIX) / 1e6 + fixed


def made_up_mla_row(case: MlaCase) -> Row:
    us = mla_time_us(case, 8.0)
    row = mla_sizes(case) | {"read_alone_us": case.kv_bytes / READ / 1e6 + ALONE_US, "peers": {}}
    row["ours"] = {"us": us, "kernel": "made_up", "ctas": 132, "splits": 0, "tiles_together": 2}
    if case.peer and case.q_len == 1:
        row["peers"]["fa3"] = {"us": mla_time_us(case, 12.0), "difference": 2.5e-3}
    elif case.peer:
        row["peers"]["fa3"] = {"error": "RuntimeError: refused\nhere"}
    if us < 25:
        row["ours"]["graph_us"] = us - 5
    if us < 25 and case.peer:
        row["peers"]["fa3"]["graph_us"] = us - 2
    if case.batch_invariant:
        row["default_us"] = us / 1.1
        row["over_default"] = 1.1
    if case.kv_dtype != "bf16":
        row["over_bf16"] = 1.3
    add_figures(row, case.bar, READ, MATRIX)
    row["sm_mhz"] = 1980
    return row


def made_up_mla_report(cases: Sequence[MlaCase] = tuple(mla_cases())) -> dict[str, Any]:
    rows = [made_up_mla_row(case) for case in cases]
    compiled = {"seconds": 60.0, "error": ""}
    question = "MLA decode beside the peer"
    return measured_alike(rows) | {"schema": SCHEMA, "question": question, "peer_compiled": compiled, "seconds": 5.0}
