from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.hopper.costs import (
    H100,
    H200,
    OTHER,
    Costs,
    Estimate,
    TileCost,
    Work,
    costs_of,
    estimate,
    restated,
    stated,
)

COSTS = Costs(
    gpu="made up",
    launch_us=3.0,
    first_byte_us=2.0,
    read_tb_per_s=4.0,
    l2_tb_per_s=5.0,
    merge_us=2.5,
    merge_parts=16,
    equal_within=0.02,
    tiles_for_full_residency=200,
    heads_together=8,
    idle_share=32,
    tiles=(TileCost(2, 8, 0.4), TileCost(2, 16, 0.6), TileCost(2, 64, 1.2), TileCost(1, 16, 0.5)),
)
WORK = Work(
    kv_bytes=100_000_000,
    item_bytes=2,
    rows=16,
    head_dim=128,
    tile_tokens=64,
    row_tiles=1.0,
    tiles_per_cta=20,
    parts=4,
    multiprocessors=132,
)

sizes = st.integers(1, 1 << 20)
works = st.builds(
    Work,
    kv_bytes=st.integers(0, 1 << 40),
    item_bytes=st.just(2),
    rows=st.integers(1, 128),
    head_dim=st.integers(8, 1024),
    tile_tokens=st.just(64),
    row_tiles=st.floats(1, 64),
    tiles_per_cta=sizes,
    parts=sizes,
    multiprocessors=st.integers(1, 200),
)


def test_the_terms_are_those_of_the_formula() -> None:
    assert estimate(WORK, COSTS) == Estimate(fixed_us=5.0, dram_us=25.0, l2_us=20.0, tiles_us=12.0, merge_us=2.5)


def test_only_the_longest_of_what_runs_side_by_side_counts() -> None:
    assert Estimate(5.0, 25.0, 20.0, 12.0, 2.5).microseconds == 32.5


@pytest.mark.parametrize(
    ("terms", "limit"),
    [
        ((5, 25, 20, 12, 2), "DRAM reads"),
        ((5, 25, 30, 12, 2), "L2 reads"),
        ((5, 25, 30, 40, 2), "computing"),
        ((5, 6, 3, 2, 2), "latency"),
    ],
)
def test_the_limit_is_what_most_of_the_time_goes_to(terms: tuple[float, ...], limit: str) -> None:
    assert Estimate(*terms).limit == limit


def test_row_tiles_read_the_cache_again_from_l2_alone() -> None:
    thrice = estimate(replace(WORK, row_tiles=3.0), COSTS)
    assert (thrice.dram_us, thrice.l2_us) == (25.0, 60.0)


def test_fewer_multiprocessors_draw_less_from_l2() -> None:
    assert estimate(replace(WORK, multiprocessors=66), COSTS).l2_us == 40.0


@pytest.mark.parametrize(("parts", "us"), [(1, 0.0), (2, 2.5), (16, 2.5), (24, 3.75), (128, 20.0)])
def test_merging_grows_with_the_parts(parts: int, us: float) -> None:
    assert estimate(replace(WORK, parts=parts), COSTS).merge_us == us


@pytest.mark.parametrize(("rows", "us"), [(4, 0.4), (8, 0.4), (12, 0.5), (16, 0.6), (40, 0.9), (64, 1.2), (128, 2.4)])
def test_a_tile_costs_by_its_rows(rows: int, us: float) -> None:
    assert COSTS.tile_us(2, rows, 128) == pytest.approx(us)


@pytest.mark.parametrize(("head_dim", "us"), [(32, 0.1), (64, 0.2), (512, 1.6)])
def test_a_tile_costs_in_proportion_to_the_head(head_dim: int, us: float) -> None:
    assert COSTS.tile_us(2, 8, head_dim) == pytest.approx(us)


def test_one_known_tile_gives_the_others_of_its_item() -> None:
    assert (COSTS.tile_us(1, 8, 128), COSTS.tile_us(1, 32, 128)) == (0.5, 1.0)


def test_an_item_without_costs_is_named() -> None:
    with pytest.raises(UsageError, match="made up: none for a KV item of 4 bytes"):
        COSTS.tile_us(4, 8, 128)


@given(works, st.sampled_from(["kv_bytes", "row_tiles", "tiles_per_cta", "parts", "rows", "head_dim"]), sizes)
def test_more_work_never_takes_less(work: Work, name: str, more: int) -> None:
    larger = replace(work, **{name: getattr(work, name) + more})
    assert estimate(larger, H200).microseconds >= estimate(work, H200).microseconds


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA GH200 480GB", H200),
        ("NVIDIA A100-SXM4-80GB", OTHER),
    ],
)
def test_a_device_has_the_constants_of_its_name(name: str, costs: Costs) -> None:
    assert costs_of(name) == costs


def test_constants_are_told_by_name() -> None:
    assert stated(COSTS) == {
        "launch_us": 3.0,
        "first_byte_us": 2.0,
        "read_tb_per_s": 4.0,
        "l2_tb_per_s": 5.0,
        "merge_us": 2.5,
        "merge_parts": 16,
        "equal_within": 0.02,
        "tiles_for_full_residency": 200,
        "heads_together": 8,
        "idle_share": 32,
        "tile_us_16bit_rows8": 0.4,
        "tile_us_16bit_rows16": 0.6,
        "tile_us_16bit_rows64": 1.2,
        "tile_us_8bit_rows16": 0.5,
    }


def test_what_is_told_can_be_read_back() -> None:
    assert restated(H100, stated(H200)) == replace(H200, gpu="H100")


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"speed": 1.0}, "'speed': expected one of launch_us, "),
        ({"launch_us": 0.0}, "launch_us=0.0: expected float above 0"),
        ({"merge_us": float("nan")}, "expected float above 0"),
        ({"merge_parts": 2.5}, "merge_parts=2.5: expected int above 0"),
    ],
)
def test_constants_that_cannot_be_are_refused(constants: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        restated(COSTS, constants)
