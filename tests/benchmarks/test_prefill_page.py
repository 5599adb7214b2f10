"""The page of context attention from a made-up measurement, and the cases of the benchmark."""

from __future__ import annotations

from typing import Any

from benchmarks.prefill.cases import PrefillCase, prefill_cases
from benchmarks.prefill.page import SCHEMA, balance, figures

REPORT: dict[str, Any] = {
    "schema": SCHEMA,
    "environment": {
        "gpu": {"name": "GPU", "driver_version": "1"},
        "packages": {"torch": "2", "flashinfer-python": "0"},
        "date": "2026-01-02T03:04",
    },
    "matrix_tflop_per_s": 700.4,
    "rows": [
        {
            "section": "causal 128",
            "case": "causal D 128 S 2048",
            "us": {"ours": 70.04, "fa3": 84.0},
            "tflop_per_s": {"ours": 485.2, "fa3": 410.0},
            "ratio": 1.199,
            "bar": 1.2,
            "sm_clock_mhz": {"median": 1500},
        },
        {
            "section": "paged",
            "case": "paged",
            "us": {"ours": 2000.0, "fa2": 4000.0},
            "tflop_per_s": {"ours": 500.0},
            "ratio": 2.0,
            "bar": 1.15,
            "of_ragged": 0.98,
        },
        {"section": "mixed", "case": "both", "us": {"ours, two": 900.0, "fa3 + xqa": 990.0}, "ratio": 1.1}
        | {"best": "ours, two", "bar": 1.0},
    ],
}


PROFILE: dict[str, Any] = {
    "rows": [
        {
            "case": case,
            "flop": flop,
            "metrics": {
                "sm__cycles_active.min": [90.0, "cycle"],
                "sm__cycles_active.avg": [95.0, "cycle"],
                "sm__cycles_active.max": [100.0, "cycle"],
                "sm__inst_executed_pipe_tensor_op_gmma.sum": [instructions, "inst"],
            },
        }
        # 64 rows and 128 keys: 16 products of 4 warps; with 64 columns 12, 4 of them whole.
        for case, flop, instructions in (
            ("full D 128 S 8192", 64 * 128 * 128 * 4, 64),
            ("ragged", 64 * 128 * 128 * 2, 64),
            ("causal D 64 S 8192", 64 * 128 * 64 * 4, 48),
        )
    ]
}


def test_rows_say_times_and_ratios() -> None:
    text = figures(REPORT)
    assert "| causal D 128 S 2048 | 70.0 us, 485 | 84.0 us | - | - | 1.20 |  | 1500 |\n" in text
    assert "| paged | 2.00 ms, 500 | - | 4.00 ms | - | 2.00 | 0.98 |  |\n" in text
    assert "| ours, two | 900.0 us |\n" in text
    assert "The fastest others take 1.10 times as long as *ours, two*." in text


def test_single_calls_stand_beside_times_in_a_sequence() -> None:
    row = REPORT["rows"][0] | {"single_us": {"ours": 80.0, "ours, ragged keys": 1.0, "fa3": 100.0}}
    assert figures(REPORT | {"rows": [row]}).endswith("| 1500 | 80.0 us / 100.0 us (1.25) |")


def test_the_profile_says_when_ctas_end_and_which_products_run() -> None:
    assert balance(PROFILE)[1].splitlines()[-3:] == [
        "| full D 128 S 8192 | 90.0% | 95.0% | 1.000 |",
        "| ragged | 90.0% | 95.0% | 2.000 |",
        "| causal D 64 S 8192 | 90.0% | 95.0% | 1.000 |",
    ]


def test_products_that_masks_leave() -> None:
    causal = PrefillCase("", "", 128, (4,), (8,), heads=1)
    assert causal.flop == 2 * 256 * (4 * 4 + 8)
    assert PrefillCase("", "", 192, (4,), (8,), heads=1, causal=False).flop == 2 * 320 * 32
    assert PrefillCase("", "", 64, (2,), (8,), heads=1, window_left=2).flop == 2 * 128 * 6


def test_no_case_comes_twice() -> None:
    names = [case.name for case in prefill_cases()]
    assert len(set(names)) == len(names) == 23
