"""The errors of an engine's tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from engine import judge


def test_tokens_of_a_request_count_once_for_the_standard_error() -> None:
    once, often = (judge._summary([[0.1] * tokens, [0.3] * tokens, [0.2] * tokens]) for tokens in (1, 48))
    assert (once["mean_error"], often["mean_error"], often["tokens"]) == (0.2, 0.2, 144)
    assert once["standard_error"] == often["standard_error"] == pytest.approx(0.1 / 3**0.5, abs=1e-5)


def test_one_request_has_no_standard_error() -> None:
    assert judge._summary([[0.1, 0.3]])["standard_error"] == 0
