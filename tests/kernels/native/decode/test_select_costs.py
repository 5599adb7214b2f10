from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.cost_model import (
    H100,
    H200,
    OTHER,
    Costs,
    Estimate,
    costs_of,
    pace_of,
    restated,
    stated,
)
from cubin_runtime.kernels.native.kernel_costs import Calibration, KernelCost

COSTS = Costs(
    gpu="made up",
    calibration=Calibration("a GPU", "2026-01-02", "rows.json", "abcdef" * 10 + "0123", 40, 20, 0.95),
    launch_us=3.0,
    read_tb_per_s=4.0,
    l2_tb_per_s=5.0,
    merge_us=2.5,
    merge_parts=16,
    merge_cells=4096,
    cluster_saved_us=1.5,
    alone_saved_us=2.5,
    alone_choice_us=0.75,
    cluster_merge_us=1.0,
    cta_tb_per_s=0.16384,
    equal_within=0.02,
    max_cta_group_size=8,
    idle_share=32,
    kernels=(
        KernelCost(2, 64, 16, 1, 5.0, 0.4, 1.5),
        KernelCost(2, 128, 8, 1, 1.0, 0.4, 0.5),
        KernelCost(2, 128, 16, 1, 2.0, 0.6, 1.5),
        KernelCost(2, 128, 16, 2, 3.0, 1.0, 2.0, shared_tile_us=0.5, reread_share=0.2),
        KernelCost(2, 128, 64, 1, 8.0, 1.2, 3.0, least_share=0.75),
        KernelCost(1, 128, 16, 1, 2.0, 0.5, 1.5, least_share=0.6),
    ),
)


class Work(NamedTuple):
    """A problem on a kernel and grid: what its pace follows from, and its size."""

    kv_bytes: int
    item_bytes: int
    q_item_bytes: int
    rows: int
    head_dim: int
    resident: int
    row_tiles: float
    tile_tokens: int
    tiles_per_cta: int
    splits: int
    multiprocessors: int
    shared: bool = True
    output_tiles_per_cta: int = 0
    active_ctas: int = 1 << 20
    in_clusters: bool = False
    alone: bool = False
    may_choose: bool = False


SIZES = (
    "kv_bytes",
    "row_tiles",
    "shared",
    "tiles_per_cta",
    "splits",
    "output_tiles_per_cta",
    "active_ctas",
    "in_clusters",
    "alone",
    "may_choose",
)


def estimate(work: Work, costs: Costs) -> Estimate:
    given = work._asdict()
    sizes = {name: given.pop(name) for name in SIZES}
    return pace_of(costs, **given).estimate(**sizes)


WORK = Work(
    kv_bytes=100_000_000,
    item_bytes=2,
    q_item_bytes=2,
    rows=16,
    head_dim=128,
    resident=1,
    row_tiles=1.0,
    tile_tokens=64,
    tiles_per_cta=20,
    splits=4,
    multiprocessors=132,
)

sizes = st.integers(1, 1 << 20)
works = st.builds(
    Work,
    kv_bytes=st.integers(0, 1 << 40),
    item_bytes=st.just(2),
    q_item_bytes=st.just(2),
    rows=st.integers(1, 128),
    head_dim=st.integers(8, 1024),
    resident=st.sampled_from([1, 2]),
    row_tiles=st.floats(1, 64),
    tile_tokens=st.sampled_from([64, 128, 256]),
    tiles_per_cta=sizes,
    splits=sizes,
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
        ((5, 25, 30, 40, 2), "a CTA's tiles"),
        ((5, 6, 3, 2, 2), "latency"),
    ],
)
def test_the_limit_is_what_most_of_the_time_goes_to(terms: tuple[float, ...], limit: str) -> None:
    assert Estimate(*terms).limit == limit


def test_row_tiles_read_the_cache_again_from_l2_alone() -> None:
    thrice = estimate(WORK._replace(row_tiles=3.0), COSTS)
    assert (thrice.dram_us, thrice.l2_us) == (25.0, 60.0)


def test_each_output_tile_of_a_cta_takes_time_of_its_own() -> None:
    assert estimate(WORK._replace(output_tiles_per_cta=4), COSTS).tiles_us == 12.0 + 4 * 1.5


def test_fewer_multiprocessors_draw_less_from_l2() -> None:
    assert estimate(WORK._replace(multiprocessors=66), COSTS).l2_us == 40.0


@pytest.mark.parametrize(("splits", "us"), [(1, 0.0), (2, 2.5), (16, 2.5), (24, 3.75), (128, 20.0)])
def test_merging_grows_with_the_parts(splits: int, us: float) -> None:
    assert estimate(WORK._replace(splits=splits), COSTS).merge_us == us


def test_a_cluster_starts_earlier_and_merges_sooner() -> None:
    alone = estimate(WORK._replace(in_clusters=True), COSTS)
    together = estimate(WORK, COSTS)
    assert (together.fixed_us - alone.fixed_us, alone.merge_us) == (1.5, 1.0)
    assert alone.tiles_us == together.tiles_us


@pytest.mark.parametrize(("ctas", "tile_us"), [(132, 0.6), (99, 0.45), (66, 0.3), (44, 0.2), (8, 0.2), (500, 0.6)])
def test_few_ctas_draw_more_each_up_to_a_limit(ctas: int, tile_us: float) -> None:
    work = WORK._replace(multiprocessors=132, active_ctas=ctas)
    assert estimate(work, COSTS).tiles_us == pytest.approx(tile_us * work.tiles_per_cta)


def test_few_ctas_of_warpgroups_are_bound_by_their_products() -> None:
    work = WORK._replace(rows=64, multiprocessors=132, active_ctas=8)
    assert estimate(work, COSTS).tiles_us == pytest.approx(0.75 * 1.2 * work.tiles_per_cta)


def test_few_ctas_are_bound_by_the_conversion_of_e4m3_keys() -> None:
    work = WORK._replace(item_bytes=1, multiprocessors=132, active_ctas=8)
    assert estimate(work, COSTS).tiles_us == pytest.approx(0.6 * 0.5 * work.tiles_per_cta)


@pytest.mark.parametrize(
    ("row_tiles", "shared", "tile_us", "dram_us"),
    [
        *((1.0, True, 1.0, 25.0), (1.5, True, 0.75, 25.0), (2.0, True, 0.5, 25.0), (8.0, True, 0.5, 25.0)),
        *((1.0, False, 1.0, 25.0), (2.0, False, 1.0, 30.0), (6.0, False, 1.0, 50.0)),
    ],
)
def test_row_tiles_of_the_same_keys_take_less_each_if_they_keep_together(
    row_tiles: float, shared: bool, tile_us: float, dram_us: float
) -> None:
    work = WORK._replace(resident=2, row_tiles=row_tiles, shared=shared)
    made = estimate(work, COSTS)
    assert (made.tiles_us, made.dram_us) == pytest.approx((tile_us * work.tiles_per_cta, dram_us))


def test_merging_many_parts_grows_with_their_rows() -> None:
    assert (
        estimate(WORK._replace(rows=64, splits=16), COSTS).merge_us
        == 2 * estimate(WORK._replace(splits=16), COSTS).merge_us
    )


def test_merging_few_parts_takes_the_same_for_any_rows() -> None:
    assert estimate(WORK._replace(rows=64, splits=2), COSTS).merge_us == 2.5


def test_one_part_needs_no_merge_in_a_cluster() -> None:
    assert estimate(WORK._replace(in_clusters=True, splits=1), COSTS).merge_us == 0


@pytest.mark.parametrize(
    ("rows", "start", "tile"),
    [(4, 1.0, 0.4), (8, 1.0, 0.4), (12, 1.5, 0.5), (16, 2.0, 0.6), (40, 5.0, 0.9), (64, 8.0, 1.2), (128, 8.0, 2.4)],
)
def test_a_kernel_costs_by_its_rows(rows: int, start: float, tile: float) -> None:
    kernel = COSTS.kernel_us(2, 128, rows, 1)
    assert (kernel.start_us, kernel.tile_us) == pytest.approx((start, tile))


@pytest.mark.parametrize(("head_dim", "us"), [(32, 0.2), (64, 0.4), (96, 0.6), (128, 0.6), (512, 2.4)])
def test_a_tile_costs_in_proportion_to_the_nearest_head_below(head_dim: int, us: float) -> None:
    assert COSTS.kernel_us(2, head_dim, 16, 1).tile_us == pytest.approx(us)


def test_ctas_that_share_a_multiprocessor_have_costs_of_their_own() -> None:
    shared = {"shared_tile_us": 0.5, "reread_share": 0.2}
    assert COSTS.kernel_us(2, 128, 16, 2) == KernelCost(2, 128, 16, 2, 3.0, 1.0, 2.0, q_item_bytes=2, **shared)


def test_where_two_ctas_were_not_measured_those_of_one_serve() -> None:
    assert COSTS.kernel_us(2, 64, 16, 2) == COSTS.kernel_us(2, 64, 16, 1)._replace(resident=2)


def test_one_known_kernel_gives_the_others_of_its_item() -> None:
    few, many = (COSTS.kernel_us(1, 128, rows, 1) for rows in (8, 32))
    assert (few.start_us, few.tile_us, few.output_tile_us, few.least_share) == (2.0, 0.5, 1.5, 0.6)
    assert many == few._replace(rows=32, tile_us=1.0, shared_tile_us=1.0)


def test_an_item_without_costs_is_named() -> None:
    with pytest.raises(UsageError, match="made up: none for a KV item of 4 bytes"):
        COSTS.kernel_us(4, 128, 8, 1)


@given(works, st.sampled_from(["kv_bytes", "tiles_per_cta", "splits"]), sizes)
def test_more_work_never_takes_less(work: Work, name: str, more: int) -> None:
    larger = work._replace(**{name: getattr(work, name) + more})
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
        "read_tb_per_s": 4.0,
        "l2_tb_per_s": 5.0,
        "merge_us": 2.5,
        "merge_parts": 16,
        "merge_cells": 4096,
        "cluster_saved_us": 1.5,
        "alone_saved_us": 2.5,
        "alone_choice_us": 0.75,
        "cluster_merge_us": 1.0,
        "cta_tb_per_s": 0.16384,
        "equal_within": 0.02,
        "max_cta_group_size": 8,
        "idle_share": 32,
        "start_us_16bit_d64_rows16_ctas1": 5.0,
        "tile_us_16bit_d64_rows16_ctas1": 0.4,
        "output_tile_us_16bit_d64_rows16_ctas1": 1.5,
        "start_us_16bit_d128_rows8_ctas1": 1.0,
        "tile_us_16bit_d128_rows8_ctas1": 0.4,
        "output_tile_us_16bit_d128_rows8_ctas1": 0.5,
        "start_us_16bit_d128_rows16_ctas1": 2.0,
        "tile_us_16bit_d128_rows16_ctas1": 0.6,
        "output_tile_us_16bit_d128_rows16_ctas1": 1.5,
        "start_us_16bit_d128_rows16_ctas2": 3.0,
        "tile_us_16bit_d128_rows16_ctas2": 1.0,
        "output_tile_us_16bit_d128_rows16_ctas2": 2.0,
        "shared_tile_us_16bit_d128_rows16_ctas2": 0.5,
        "reread_share_16bit_d128_rows16_ctas2": 0.2,
        "start_us_16bit_d128_rows64_ctas1": 8.0,
        "tile_us_16bit_d128_rows64_ctas1": 1.2,
        "output_tile_us_16bit_d128_rows64_ctas1": 3.0,
        "least_share_16bit_d128_rows64_ctas1": 0.75,
        "start_us_8bit_d128_rows16_ctas1": 2.0,
        "tile_us_8bit_d128_rows16_ctas1": 0.5,
        "output_tile_us_8bit_d128_rows16_ctas1": 1.5,
        "least_share_8bit_d128_rows16_ctas1": 0.6,
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


def test_a_cluster_of_a_single_request_starts_sooner() -> None:
    starts = [estimate(WORK._replace(in_clusters=True, alone=alone), COSTS).fixed_us for alone in (False, True)]
    assert starts == [3.5, 2.5]
    assert estimate(WORK._replace(alone=True), COSTS).fixed_us == 5.0


def test_a_single_request_s_clusters_take_time_to_choose_where_there_are_other_ctas() -> None:
    assert estimate(WORK._replace(in_clusters=True, may_choose=True), COSTS).fixed_us == 3.25
    assert estimate(WORK._replace(may_choose=True), COSTS).fixed_us == 5.0


def test_a_larger_tile_takes_a_cta_the_time_of_its_tokens() -> None:
    assert estimate(WORK._replace(tile_tokens=128), H200).tiles_us == pytest.approx(2 * estimate(WORK, H200).tiles_us)
