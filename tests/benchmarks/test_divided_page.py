"""The tables of context parallelism and of the soak on several GPUs say what a made-up measurement says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from decode.divided_page import outcome, parallel, soak, steps
from divided.model import bytes_sent, predictions

ENVIRONMENT = {"gpu": {"name": "GPU"}, "packages": {"torch": "2"}, "date": "2026-01-02T03:04"}


def row(kv_len: int, exchange: str, step_us: float) -> dict[str, Any]:
    """One GPU takes 100 us."""
    known: dict[str, Any] = {"layout": "gqa", "heads": 64, "value_dim": 128, "token_bytes": 4096, "world": 2}
    known |= {"batch": 8, "kv_len": kv_len, "exchange": exchange, "one_gpu_us": 100.0, "step_us": step_us}
    known |= {"decode_us": 50.0, "communication_us": 20.0, "merge_us": 3.0, "speedup": 100.0 / step_us}
    return known | {"sent_bytes": bytes_sent(known, 2)}


def report(*speeds: tuple[int, float, float]) -> dict[str, Any]:
    """A measurement of these lengths, with the times of a step with either exchange."""
    rows = [
        row(kv_len, exchange, step_us)
        for kv_len, *times in speeds
        for exchange, step_us in zip(("all_to_all", "gather_reduce"), times, strict=True)
    ]
    link = {"sent_bytes": 268e6, "us": 1.0, "gb_per_s": 200.0}
    found = {"environment": ENVIRONMENT, "world": 2, "link": link, "errors": {"gqa all_to_all": 0.004}, "rows": rows}
    return found | {"model": predictions(rows, (4, 8))}


def test_a_line_has_the_parts_of_a_step_and_the_time_of_its_bytes() -> None:
    text = steps(report((1024, 80.0, 125.0), (4096, 50.0, 90.0)))
    sent = bytes_sent(row(1024, "all_to_all", 1.0), 2)
    by_the_link = f"{sent / 200e3:.1f} us"
    assert (
        f"| 8 x 1,024 | 100 us | 80.0 us (1.25) | 50.0 us | 20.0 us | {by_the_link} | 3.0 us | 125 us (0.80) |" in text
    )
    assert "0.0040 (gqa all-to-all)" in text


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (((1024, 125.0, 110.0), (4096, 90.0, 120.0)), "from 4,096 keys on"),
        (((1024, 125.0, 90.0), (4096, 110.0, 99.0)), "from 1,024 keys on"),
        (((1024, 90.0, 90.0), (4096, 100.0, 101.0)), "at no measured length"),
    ],
)
def test_the_length_from_which_it_wins_is_the_first_without_a_slower_one_behind(speeds: Any, words: str) -> None:
    assert f"batch 8: {words}." in steps(report(*speeds))


def test_other_numbers_of_gpus_are_called_predictions() -> None:
    _, _, predicted = steps(report((1024, 80.0, 125.0), (4096, 50.0, 90.0))).partition("**Predictions, not measured.**")
    assert "4 GPUs, predicted" in predicted
    assert "8 GPUs, predicted" in predicted
    assert "8 x 4,096" in predicted


def test_nothing_is_said_before_there_is_a_measurement() -> None:
    assert steps({}) == soak({}) == ""


def test_the_soak_names_each_gpu_and_what_differed() -> None:
    rows = [
        {"by": by, "device": device, "began": 1.0, "ended": 5.5, "launches": 250000, "different_elements": {"paged": 0}}
        for by in ("threads", "processes")
        for device in (0, 1)
    ]
    text = soak({"environment": ENVIRONMENT, "devices": 2, "rows": rows})
    assert "| a thread for each GPU | 0 | 250,000 | 4.5 s | paged: 0 |" in text
    assert "| a process for each GPU | 1 | 250,000 | 4.5 s | paged: 0 |" in text


def test_the_end_of_the_tests_is_told_with_the_release() -> None:
    step = {"step": "multi_gpu", "last_line": "88 passed, 1 skipped in 40.2s (0:00:40)"}
    text = outcome({"environment": ENVIRONMENT, "releases": {"hopper-0.1.0": "d2efcd3f7a64c4c8"}, "steps": [step]})
    assert "88 passed, 1 skipped in 40.2s (0:00:40); GPU, 2026-01-02, hopper-0.1.0 (d2efcd3f7a64)." in text
    assert outcome({}) == ""


def test_outcomes_of_flashinfers_tests_are_counted() -> None:
    environment = {**ENVIRONMENT, "packages": {"flashinfer-python": "0.6"}}
    ended = {"a": "passed", "b": "failed", "c": "passed"}
    text = parallel({"environment": environment, "ranks": 2, "outcomes": ended})
    assert "FlashInfer 0.6's" in text
    assert "2 processes with NCCL: 2 passed, 1 failed; GPU, 2026-01-02." in text
    assert parallel({}) == ""
