"""What the constants of the cost model predict of the committed calibration, and what bounds cost as measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibration.candidates import shape_of
from benchmarks.calibration.fitting import H200, Sample, device_of, errors, expanded, halves, samples_of, within
from benchmarks.calibration.rows import Row
from cubin_runtime.kernels.native.cost_model import H200 as COSTS
from cubin_runtime.kernels.native.decode.select import DecodeSelection, select_decode
from tests.kernels.decode_kernels import HOPPER

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Kernels whose KV tiles have 128 tokens where those made up have 64.
LARGE_TILES = ("_d64_", "e4m3_d128_rows16", "e4m3_d128_rows8_", "16_d128_rows128_")
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


def test_most_predictions_of_several_query_tokens_over_e4m3_caches_are_within_fifteen_percent() -> None:
    rows = samples_of(expanded(read("launch_drafts_h200.json")), KERNELS, H200)
    of_e4m3 = [[sample for sample in row if sample.row.dtype == "e4m3"] for row in rows]
    for half in halves([row for row in of_e4m3 if row]):
        assert len(half) > 300
        assert within(errors(half, COSTS)) > 0.84


def us_of(selection: DecodeSelection, row: Row, launches: list[dict[str, Any]]) -> float:
    """What a chosen launch took: that with its kernel and grid, whose lengths decide alike on the device."""
    tile_tokens = int(selection.kernel.traits["tile_tokens"])
    tiles = [-(-keys // tile_tokens) for keys in row.lengths]
    names = ("ctas", "cta_group_size", "row_tiles", "cluster_size")
    found = [
        launch
        for launch in launches
        if launch["kernel"] == selection.kernel.name and all(launch[n] == getattr(selection, n) for n in names)
    ]
    if not selection.cluster_size:
        found = [x for x in found if (x["slack_tiles"] >= max(tiles)) == (selection.slack_tiles >= max(tiles))]
    elif not selection.alone:
        total = sum(tiles) * row.kv_heads * selection.row_tiles
        is_even = (
            -(-max(tiles) // selection.cluster_size) <= total // min(selection.ctas, total) + selection.slack_tiles
        )
        found = [x for x in found if (x["slack_tiles"] > 0) == is_even]
    return float(min(launch["us"] for launch in found))


@pytest.fixture(scope="module")
def chosen_us() -> dict[str, dict[int, float]]:
    """What is chosen for each bound of the rows of one query token that were measured on an H100, as measured."""
    measured = expanded(read("launch_choice_h100.json"))
    device = device_of(measured)
    every: dict[str, dict[int, float]] = {}
    for record in measured["rows"]:
        row = Row.read({name: value for name, value in record.items() if name != "launches"})
        if row.kv_heads and row.q_len == 1:
            # A single request's clusters have other numbers of CTAs than those measured, where they have a choice.
            for bound in row.bounds if row.batch > 1 else [bound for bound in row.bounds if bound <= 8192]:
                (made,) = select_decode(KERNELS, shape_of(row, bound), device)
                every.setdefault(row.name, {})[bound] = us_of(made, row, record["launches"])
    return every


def test_no_bound_up_to_16384_costs_a_row_of_one_query_token_more_than_5_percent_and_0_7_us_on_an_h100(
    chosen_us: dict[str, dict[int, float]],
) -> None:
    lost = {name: max(times.values()) - min(times.values()) for name, times in chosen_us.items()}
    assert len(lost) > 250
    assert [name for name, us in lost.items() if us > max(0.05 * min(chosen_us[name].values()), 0.7)] == []


def costly(us: dict[str, dict[str, float]]) -> list[str]:
    """Rows of which a bound costs more than 5% and more than 0.7 us."""
    least = {name: min(times.values()) for name, times in us.items()}
    most = {name: max(times.values()) for name, times in us.items()}
    return [name for name in least if most[name] - least[name] > max(0.05 * least[name], 0.7)]


def test_in_few_rows_a_bound_costs_much() -> None:
    measured = read("launch_bounds_h200.json")
    assert [len(costly(measured[when]["us"])) for when in ("before", "after")] == [121, 13]


def test_single_requests_over_fewer_ctas_are_rarely_slower_than_before() -> None:
    """Of sizes that no choice was tuned on as of the others; two rows, one of them with 8 query tokens, lose more."""
    rows = read("launch_turns_h200.json")["rows"]
    pairs = [(row["name"], us, row["after"][bound]) for row in rows for bound, us in row["before"].items()]
    slower = {name for name, before, after in pairs if after - before > max(0.03 * before, 0.3)}
    assert slower == {"8/1 d128 e4m3 q_len 8 1x100000", "8/1 d64 bf16 1x6000"}
    ratios = [after / before for _, before, after in pairs if after != before]
    assert sum(ratio < 0.95 for ratio in ratios) > len(ratios) / 2


def test_several_query_tokens_over_e4m3_caches_gain_more_than_they_lose() -> None:
    """Of sizes that no constant was fitted to."""
    rows = read("launch_turns_e4m3_h200.json")["rows"]
    ratios = [row["after"][bound] / us for row in rows for bound, us in row["before"].items()]
    assert max(ratios) < 1.35
    assert sum(ratios) / len(ratios) < 0.89
    assert sum(ratio < 0.9 for ratio in ratios) > 5 * sum(ratio > 1.1 for ratio in ratios)


def test_single_requests_far_below_their_bound_gain_more_than_longer_ones_lose() -> None:
    """Of sizes that nothing was fitted to."""
    rows = [row for row in read("launch_turns_alone_h200.json")["rows"] if " 1x" in row["name"]]
    pairs = [
        (int(row["name"].rpartition("x")[2]), b, row["after"][b] / us)
        for row in rows
        for b, us in row["before"].items()
    ]
    short = [ratio for keys, bound, ratio in pairs if bound == "131072" and keys <= 11000]
    assert max(short) < 1.15
    assert sum(short) / len(short) < 0.89
    ratios = [ratio for *_, ratio in pairs]
    assert sum(ratios) / len(ratios) < 0.97
    assert sum(ratio < 0.9 for ratio in ratios) > 2 * sum(ratio > 1.1 for ratio in ratios)


def test_mla_requests_of_mixed_lengths_gain_and_others_lose_little() -> None:
    """Of lengths that no constant was fitted to."""
    rows = read("launch_turns_mla_h200.json")["rows"]
    ratios = {(row["name"], b): row["after"][b] / us for row in rows for b, us in row["before"].items()}
    assert max(ratios.values()) < 1.09
    unequal = [ratio for (name, _), ratio in ratios.items() if " equal " not in name]
    assert sum(unequal) / len(unequal) < 0.92
    assert sum(ratio < 0.9 for ratio in unequal) > 5 * sum(ratio > 1.03 for ratio in unequal)


def test_most_predictions_of_single_requests_held_back_are_within_fifteen_percent() -> None:
    kept, held_back = halves(samples_of(expanded(read("launch_alone_h200.json")), KERNELS, H200))
    assert len(kept) > 2500
    assert within(errors(held_back, COSTS)) > 0.78


def test_row_tiles_that_keep_together_gain_more_than_they_lose() -> None:
    """Of sizes that no choice was tuned on, among them single long requests beside short ones."""
    rows = read("launch_turns_h100.json")["rows"]
    ratios = [row["after"][bound] / us for row in rows for bound, us in row["before"].items()]
    assert max(ratios) < 1.1
    assert sum(ratio < 0.97 for ratio in ratios) > 3 * sum(ratio > 1.03 for ratio in ratios)
