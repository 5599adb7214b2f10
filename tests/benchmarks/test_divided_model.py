"""The model of context-parallel decode for other numbers of GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from divided.model import bytes_read, bytes_sent, line, predictions


def row(batch: int, kv_len: int, exchange: str = "all_to_all", world: int = 2) -> dict[str, Any]:
    """A row whose times lie on lines: 5 us and 1 us per MB read; 20 us and 2 us per MB sent."""
    known: dict[str, Any] = {"layout": "gqa", "heads": 64, "value_dim": 128, "token_bytes": 4096, "world": world}
    known |= {"batch": batch, "kv_len": kv_len, "exchange": exchange, "merge_us": 3.0}
    known["decode_us"] = 5 + bytes_read(known, world) / 1e6
    known["communication_us"] = 20 + 2 * bytes_sent(known, world) / 1e6
    return known


def test_a_line_is_found_and_does_not_go_below_0() -> None:
    assert line([(1, 7), (3, 11), (2, 9)]) == pytest.approx((5, 2))
    assert line([(4, 7)]) == (7, 0)
    assert line([(1, 9), (2, 3)]) == (6, 0)


def test_a_rank_sends_all_heads_but_its_own() -> None:
    assert bytes_sent(row(8, 1024), 4) == 8 * 64 * (128 * 2 + 16) * 3 / 4
    assert bytes_sent(row(8, 1024, "gather_reduce"), 4) == 8 * 64 * (4 * 3 + 128 * 4 * 3 / 4)


@pytest.mark.parametrize("exchange", ["all_to_all", "gather_reduce"])
def test_times_on_lines_are_continued_along_them(exchange: str) -> None:
    rows = [row(batch, kv_len, exchange) for batch in (1, 8, 64) for kv_len in (131072, 1048576)]
    found = predictions(rows, (8,))
    for given, predicted in zip(rows, found, strict=True):
        expected = 5 + bytes_read(given, 8) / 1e6 + 3 + 20 + 2 * bytes_sent(given, 8) / 1e6
        assert predicted["low_us"] == pytest.approx(expected)
        assert predicted["high_us"] == pytest.approx(expected + 20 * 6)
