"""The page of the sweep says of each model what the JSON says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from decode.models_page import STATUSES, figures

RIGHT = {"verdict": "right", "error": 0.02, "beside": {"sdpa": 0.016}}
REFUSED = {"verdict": "refused", "error": "UsageError: position_bias=a Tensor: no kernel adds a | bias"}
REPORT: dict[str, Any] = {
    "environment": {"gpu": {"name": "GPU"}, "packages": {"transformers": "5", "torch": "2"}, "date": "2026-01-02T03"},
    "models": {
        "llama": {"status": "right", "cases": {"prompt": RIGHT}},
        "inkling": {"status": "refused", "cases": {"prompt": REFUSED, "generate": REFUSED}},
        "moshi": {
            "status": "partly refused",
            "cases": {"prompt": REFUSED, "generate": REFUSED, "mixed lengths": RIGHT},
        },
        "blt": {"status": "not built", "error": "ValueError: too large"},
    },
}


def test_models_are_listed_by_status() -> None:
    page = figures(REPORT)
    assert "- **right**: `llama`" in page
    assert "- **not built**: `blt`" in page
    assert "| refused | 1 | raises UsageError |" in page
    assert "largest ratio is 1.25" in page


def test_a_refusal_names_its_reason_and_its_cases() -> None:
    assert "| `inkling` | all | `position_bias=a Tensor: no kernel adds a / bias` |" in figures(REPORT)


def test_nothing_is_said_before_the_sweep() -> None:
    assert figures({}) == ""


def test_every_status_of_the_stored_sweep_has_words() -> None:
    import json

    report = json.loads((Path(__file__).parents[2] / "benchmarks/results/transformers_models.json").read_text())
    assert {row["status"] for row in report["models"].values()} <= STATUSES.keys()
