"""What the constants of the cost model predict of the committed calibration, and what bounds cost as measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decode_kernels import HOPPER

from benchmarks.calibration.fitting import H200, Sample, errors, expanded, halves, samples_of, within
from cubin_runtime.kernels.native.cost_model import H200 as COSTS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Kernels whose KV tiles have 128 tokens where those made up have 64.
LARGE_TILES = ("bf16_d64_", "e4m3_d128_rows16", "e4m3_d128_rows8_")
KERNELS = [
    replace(
        kernel,
        name=f"fmha_paged_{kernel.name}",
        traits={**kernel.traits, "tile_tokens": 128 if any(form in kernel.name for form in LARGE_TILES) else 64},
    )
    for kernel in HOPPER
]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def held_back() -> list[Sample]:
    return halves(samples_of(expanded(read("launch_choice_h200.json")), KERNELS, H200))[1]


def test_nine_tenths_of_the_predictions_of_rows_held_back_are_within_fifteen_percent(held_back: list[Sample]) -> None:
    assert within(errors(held_back, COSTS)) >= 0.91


def test_no_prediction_of_rows_held_back_is_off_by_more_than_half(held_back: list[Sample]) -> None:
    assert max(map(abs, errors(held_back, COSTS))) < 0.45


def test_the_constants_name_the_file_that_they_were_fitted_to(held_back: list[Sample]) -> None:
    calibration = COSTS.calibration
    measured = read(Path(calibration.file).name)
    assert hashlib.sha256((RESULTS / Path(calibration.file).name).read_bytes()).hexdigest() == calibration.sha256
    assert measured["environment"]["gpu"]["name"] == calibration.device
    assert measured["environment"]["date"].startswith(calibration.date)
    assert calibration.held_back == len(held_back)
    assert within(errors(held_back, COSTS)) == pytest.approx(calibration.within, abs=0.001)


def costly(measured: dict[str, Any]) -> list[str]:
    """Rows of which a bound costs more than 5% and more than 0.7 us."""
    least = {name: min(times.values()) for name, times in measured["us"].items()}
    most = {name: max(times.values()) for name, times in measured["us"].items()}
    return [name for name in least if most[name] - least[name] > max(0.05 * least[name], 0.7)]


def test_in_few_rows_a_bound_costs_much() -> None:
    measured = read("launch_bounds_h200.json")
    assert [len(costly(measured[when])) for when in ("before", "after")] == [121, 13]
