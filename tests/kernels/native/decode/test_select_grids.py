from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.cost_model import OTHER
from cubin_runtime.kernels.native.decode.grids import (
    ANY_ROWS,
    DecodeShape,
    Grid,
    Part,
    estimates_of,
    extent_of,
    grids_of,
    tiling_of,
)
from cubin_runtime.kernels.native.decode.select import select_decode
from tests.kernels.decode_kernels import HOPPER, decode_kernel
from tests.kernels.select_cases import ALL, SHAPE, chosen, fit_of, one, shapes
from tests.launch.examples import H100, device

EVERY = Part(0, ANY_ROWS, None)
# KV heads, rows and bounds of single requests with more clusters than output tiles, and their CTAs.
CHOICES = [
    (1, 8, 1 << 14, 32),
    (1, 8, 1 << 17, 48),
    (2, 8, 1 << 17, 64),
    (4, 8, 1 << 17, 64),
    (1, 16, 1 << 17, 96),
    (1, 32, 1 << 17, 96),
]


def grids(kernel: NativeKernel, shape: DecodeShape) -> list[Grid]:
    tiling = tiling_of(kernel, shape, EVERY, H100, OTHER)
    return grids_of(tiling, extent_of(tiling, shape, EVERY), shape, H100, OTHER)


@given(shapes)
def test_the_grid_holds_what_the_kernel_relies_on(shape: DecodeShape) -> None:
    for made in select_decode(HOPPER, shape, H100):
        most = int(made.kernel.traits["ctas_per_multiprocessor"]) * H100.multiprocessors
        assert 1 <= made.ctas <= most
        assert (made.ctas % made.cta_group_size, shape.kv_heads % made.cta_group_size) == (0, 0)
        rows = min(shape.q_len * shape.group, made.max_rows)
        assert (made.row_tiles - 1) * int(made.kernel.traits["rows"]) < rows
        assert made.row_tiles * int(made.kernel.traits["rows"]) >= rows


def test_a_large_problem_gets_two_ctas_a_multiprocessor() -> None:
    assert chosen(batch=40).ctas == 264


def test_a_grid_ends_on_borders_of_pairs_where_few_ctas_idle_for_it() -> None:
    assert chosen().ctas == 256
    assert chosen(batch=8, max_seq_len=65536).ctas == 128
    assert chosen(batch=40).ctas == 264


def test_a_grid_does_not_count_on_borders_of_pairs_that_differ() -> None:
    assert chosen(ragged=True, tokens=SHAPE.batch).ctas == 264
    assert chosen(batch_invariant=True).ctas == 128


def test_no_cta_idles_where_heads_share_a_line() -> None:
    assert chosen(dtype="e4m3", head_dim=64).ctas == 264


def test_pairs_that_stay_whole_are_not_merged() -> None:
    assert fit_of(chosen(batch=64)).estimate.merge_us == 0
    assert fit_of(chosen(batch=40)).estimate.merge_us > 0


def test_a_problem_of_medium_size_gets_one() -> None:
    assert chosen(batch=8, max_seq_len=4096).ctas == 128


def test_a_kernel_that_fills_a_multiprocessor_alone_gets_one() -> None:
    assert chosen(q_len=8).ctas == 128


@pytest.mark.parametrize(
    ("kv_heads", "together"), [(1, 1), (2, 2), (3, 3), (5, 5), (7, 7), (8, 8), (12, 6), (16, 8), (11, 1)]
)
def test_heads_are_read_side_by_side_in_divisors_up_to_eight(kv_heads: int, together: int) -> None:
    assert chosen(kv_heads=kv_heads, dtype="e4m3", head_dim=64).cta_group_size == together


def test_heads_are_not_read_side_by_side_where_too_many_ctas_would_idle() -> None:
    few = replace(SHAPE, kv_heads=7, batch=1, max_seq_len=64 * 40)
    tiling = tiling_of(decode_kernel(), few, EVERY, H100, OTHER)
    small = replace(H100, multiprocessors=13)
    made = grids_of(tiling, extent_of(tiling, few, EVERY), few, small, OTHER)
    assert {grid.cta_group_size for grid in made if not grid.cluster_size and grid.resident == 1} == {1}


def test_a_small_problem_gets_one_cta_a_tile() -> None:
    assert chosen(batch=1, max_seq_len=65).ctas == 16


@pytest.mark.parametrize(
    ("batch", "max_seq_len", "parts"),
    [
        (1, 64, 1),
        (1, 1024, 8),
        (1, 1 << 14, 8),
        (1, 1 << 17, 8),
        (4, 512, 4),
        (16, 512, 1),
        (2, 4096, 8),
        (2, 8192, 8),
        (17, 64, 0),
    ],
)
def test_a_pair_has_a_cluster_where_little_can_be_lost(batch: int, max_seq_len: int, parts: int) -> None:
    assert chosen(batch=batch, max_seq_len=max_seq_len).cluster_size == parts


@pytest.mark.parametrize(("kv_heads", "rows", "max_seq_len", "ctas"), CHOICES)
def test_a_single_request_s_length_decides_between_clusters_and_few_ctas_that_divide_it(
    kv_heads: int, rows: int, max_seq_len: int, ctas: int
) -> None:
    """So few that merging what they computed is quick, and no more than have a multiprocessor each."""
    chosen_one = chosen(batch=1, kv_heads=kv_heads, group=rows, max_seq_len=max_seq_len)
    assert (chosen_one.cluster_size, chosen_one.ctas, chosen_one.alone) == (8, ctas, False)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_single_request_leaves_its_clusters_where_both_take_as_long(kv_heads: int) -> None:
    shape = replace(SHAPE, batch=1, kv_heads=kv_heads, max_seq_len=1 << 17)
    fit = fit_of(chosen(batch=1, kv_heads=kv_heads, max_seq_len=1 << 17))
    lengths = range(2, 512)
    extent, grid = extent_of(fit.tiling, shape, EVERY), fit.grid
    every = estimates_of(fit.tiling, extent, grid, shape, lengths)
    last = max(i for i in range(len(every) - 1) if every[i].merge_us < every[i + 1].merge_us)
    (divided,) = estimates_of(fit.tiling, extent, grid._replace(slack_tiles=0), shape, [lengths[last]])
    assert every[last].microseconds == pytest.approx(divided.microseconds, rel=0.1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fewer_ctas_take_no_longer_at_the_bound_than_all(kv_heads: int) -> None:
    shape = replace(SHAPE, batch=1, kv_heads=kv_heads, max_seq_len=1 << 17)
    fit = fit_of(chosen(batch=1, kv_heads=kv_heads, max_seq_len=1 << 17))
    extent = extent_of(fit.tiling, shape, EVERY)
    every = fit.grid._replace(ctas=H100.multiprocessors // kv_heads * kv_heads)
    assert fit.grid.ctas < every.ctas
    (estimate,) = estimates_of(fit.tiling, extent, every, shape, [fit.tiling.tiles])
    assert fit.microseconds <= estimate.microseconds


def test_batch_invariance_has_all_ctas() -> None:
    assert chosen(batch=1, kv_heads=1, max_seq_len=1 << 17, batch_invariant=True).ctas > 48


@pytest.mark.parametrize(("max_seq_len", "alone"), [(1 << 13, True), (1 << 14, False), (1 << 15, False)])
def test_a_single_request_has_clusters_alone_while_its_bound_is_short(max_seq_len: int, alone: bool) -> None:
    assert chosen(batch=1, kv_heads=1, max_seq_len=max_seq_len).alone is alone


def test_batch_invariance_has_no_clusters() -> None:
    assert chosen(batch=1, max_seq_len=1024, batch_invariant=True).cluster_size == 0


def test_kernels_without_bulk_copies_have_no_clusters() -> None:
    assert one(ALL, replace(SHAPE, batch=1, max_seq_len=1024), device(10, 0)).cluster_size == 0


@pytest.mark.parametrize(
    ("max_seq_len", "said"),
    [(64, "one for each KV head and row tile of a request"), (1024, "a cluster of 8 for each KV head and row tile")],
)
def test_the_reason_says_what_a_pair_has_for_itself(max_seq_len: int, said: str) -> None:
    assert said in chosen(batch=1, max_seq_len=max_seq_len).reason


def test_every_row_tile_is_work_of_its_own() -> None:
    made = chosen(batch=1, max_seq_len=64, head_dim=512, q_len=3)
    assert (made.row_tiles, made.ctas) == (3, 24)


def test_ragged_requests_are_counted_by_their_tokens() -> None:
    made = chosen(batch=16, kv_heads=1, max_seq_len=64, head_dim=512, q_len=16, tokens=6, ragged=True)
    assert (made.row_tiles, made.ctas) == (16, 22)


def test_a_bound_of_zero_still_gets_the_ctas_that_write_the_outputs() -> None:
    assert chosen(batch=2, max_seq_len=0).ctas == 128


def test_ragged_requests_without_a_token_still_get_a_grid() -> None:
    assert chosen(batch=2, tokens=0, ragged=True).ctas > 0


def test_shared_memory_limits_the_ctas_of_a_multiprocessor() -> None:
    large = tuple(replace(k, dynamic_shared_bytes=200 << 10) for k in HOPPER)
    assert one(large, SHAPE).ctas == 128


def test_what_the_driver_keeps_of_shared_memory_counts_for_each_cta() -> None:
    half = H100.shared_bytes_per_multiprocessor // 2
    for nbytes, most in ((half - 1024, 2), (half - 1023, 1)):
        made = grids(decode_kernel(dynamic_shared_bytes=nbytes), SHAPE)
        assert max(grid.resident for grid in made) == most


def test_work_for_one_cta_a_multiprocessor_gets_no_grid_of_two() -> None:
    exact = replace(SHAPE, batch=33, kv_heads=4, max_seq_len=64)
    assert {grid.resident for grid in grids(decode_kernel(), exact)} == {1}
    more = replace(exact, max_seq_len=65)
    assert {grid.resident for grid in grids(decode_kernel(), more)} == {1, 2}


@pytest.mark.parametrize(
    ("window_left", "q_len", "ctas"), [(-1, 1, 64), (0, 1, 16), (127, 1, 16), (255, 2, 32), (1 << 30, 1, 64)]
)
def test_a_window_limits_the_tiles(window_left: int, q_len: int, ctas: int) -> None:
    assert chosen(batch=1, group=4, window_left=window_left, q_len=q_len).ctas == ctas


@given(shapes, st.integers(0, 5000), st.sampled_from([64, 128, 256]))
def test_a_window_never_reads_more(shape: DecodeShape, window_left: int, tile: int) -> None:
    narrow = replace(shape, window_left=window_left)
    assert narrow.kv_tokens(tile) <= replace(narrow, window_left=window_left + 1).kv_tokens(tile) <= shape.max_seq_len
