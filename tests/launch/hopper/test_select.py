from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from decode_kernels import HOPPER, PORTABLE, decode_kernel
from examples import H100, device
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.artifacts.own_kernels import OwnKernel
from cubin_runtime.errors import UsageError
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.launch.hopper.costs import H200, Costs, restated
from cubin_runtime.launch.hopper.grids import ANY_ROWS
from cubin_runtime.launch.hopper.select import Candidate, DecodeSelection, Fit, select_decode
from cubin_runtime.launch.hopper.shape import DecodeShape, split_count

SHAPE = DecodeShape("bf16", 128, group=8, kv_heads=8, batch=64, max_seq_len=8192)
ALL = (*PORTABLE, *HOPPER)
WARPGROUPS = "warpgroups of 64 rows"
H200_DEVICE = replace(H100, name="NVIDIA H200")

shapes = st.builds(
    DecodeShape,
    dtype=st.sampled_from(["bf16", "fp16", "e4m3"]),
    head_dim=st.sampled_from([32, 64, 128, 256, 512]),
    group=st.integers(1, 32),
    kv_heads=st.integers(1, 64),
    batch=st.integers(1, 300),
    q_len=st.integers(1, 16),
    tokens=st.integers(0, 300),
    ragged=st.booleans(),
    max_seq_len=st.integers(0, 1 << 20),
    window_left=st.integers(-1, 5000),
    batch_invariant=st.booleans(),
)


def one(
    kernels: Iterable[OwnKernel], shape: DecodeShape, on: DeviceFacts = H200_DEVICE, costs: Costs | None = None
) -> DecodeSelection:
    """The only launch."""
    (selection,) = select_decode(kernels, shape, on, costs)
    return selection


def chosen(**changes: Any) -> DecodeSelection:
    return one(ALL, replace(SHAPE, **changes))


def launches(**changes: Any) -> list[tuple[object, int, int]]:
    """Arithmetic and rows of each launch of a batch_invariant decode."""
    made = select_decode(ALL, replace(SHAPE, batch_invariant=True, **changes), H200_DEVICE)
    return [(launch.kernel.traits["arithmetic"], launch.least_rows, launch.most_rows) for launch in made]


def rows_of(selection: DecodeSelection) -> tuple[object, int]:
    return selection.kernel.traits["rows"], selection.row_tiles


def fit_of(selection: DecodeSelection) -> Fit:
    return next(c.fit for c in selection.candidates if c.fit and c.kernel == selection.kernel)


def words(selection: DecodeSelection) -> dict[str, str]:
    return {candidate.kernel.name: str(candidate) for candidate in selection.candidates}


def microseconds(candidate: Candidate) -> float:
    return candidate.fit.estimate.microseconds if candidate.fit else float("inf")


# -- which kernel


@pytest.mark.parametrize(
    ("capability", "sm"),
    [
        ((8, 0), "80"),
        ((8, 6), "86"),
        ((8, 7), "86"),
        ((8, 9), "89"),
        ((9, 0), "90a"),
        ((10, 3), "100"),
        ((12, 1), "120"),
    ],
)
def test_of_equals_the_closest_target_that_runs_is_chosen(capability: tuple[int, int], sm: str) -> None:
    assert one(ALL, SHAPE, device(*capability)).kernel.sm == sm


@pytest.mark.parametrize(
    ("q_len", "group", "rows", "row_tiles"),
    [
        (1, 1, 8, 1),
        (1, 8, 8, 1),
        (8, 1, 8, 1),
        (3, 3, 16, 1),
        (2, 8, 16, 1),
        (1, 17, 64, 1),
        (8, 8, 64, 1),
        (5, 13, 128, 1),
        (16, 32, 128, 4),
    ],
)
def test_rows_are_those_that_read_the_cache_least(q_len: int, group: int, rows: int, row_tiles: int) -> None:
    assert rows_of(chosen(q_len=q_len, group=group)) == (rows, row_tiles)


@pytest.mark.parametrize(("head_dim", "rows"), [(32, 16), (64, 8), (128, 8), (256, 8), (512, 8)])
def test_every_head_dim_of_the_metadata_is_served(head_dim: int, rows: int) -> None:
    assert rows_of(chosen(head_dim=head_dim, dtype="e4m3")) == (rows, 1)


def test_a_head_dim_that_nobody_thought_of_is_served_if_a_kernel_has_it() -> None:
    made = decode_kernel(head_dim=96)
    assert one((*ALL, made), replace(SHAPE, head_dim=96)).kernel == made


def test_large_groups_loop_over_row_tiles() -> None:
    assert rows_of(chosen(head_dim=512, q_len=16, group=32)) == (8, 64)


def test_a_slower_tile_is_not_taken_for_less_padding() -> None:
    slow = restated(H200, {f"start_us_16bit_d128_rows8_ctas{ctas}": 500.0 for ctas in (1, 2)})
    assert rows_of(one(ALL, SHAPE, costs=slow)) == (16, 1)


def test_the_least_padding_is_taken_where_times_are_equal() -> None:
    by_reading = restated(H200, {"read_tb_per_s": 0.01})
    selection = one(ALL, SHAPE, costs=by_reading)
    assert max(microseconds(c) for c in selection.candidates if c.fit) < 1.02 * selection.microseconds
    assert rows_of(selection) == (8, 1)


def test_predictions_that_hardly_differ_are_equal() -> None:
    exact = restated(H200, {"equal_within": 1e-9})
    draft = replace(SHAPE, batch=32, q_len=2, max_seq_len=16384)
    assert rows_of(one(ALL, draft)) == (16, 1)
    assert rows_of(one(ALL, draft, costs=exact)) == (64, 1)


def test_equals_with_equal_padding_read_the_cache_fewer_times() -> None:
    alike = restated(H200, {"start_us_16bit_d128_rows16_ctas1": 6.6})
    assert rows_of(one(ALL, replace(SHAPE, batch=1, q_len=2, max_seq_len=64), costs=alike)) == (16, 1)


def test_shared_memory_that_the_device_does_not_have_rules_a_kernel_out() -> None:
    large = decode_kernel("86", dynamic_shared_bytes=120 << 10)
    small = replace(device(8, 6), shared_bytes_per_block_optin=99 << 10)
    selection = one((large, decode_kernel("80", dynamic_shared_bytes=90 << 10)), SHAPE, small)
    assert selection.kernel.sm == "80"
    assert words(selection)[large.name] == "needs 122880 bytes of shared memory a block, the device has 101376"


@given(shapes)
def test_no_candidate_is_predicted_to_be_much_faster(shape: DecodeShape) -> None:
    for selection in select_decode(HOPPER, shape, H100):
        assert selection.microseconds <= 1.02 * min(map(microseconds, selection.candidates))


@given(shapes, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(shape: DecodeShape, random: Any) -> None:
    shuffled = list(ALL)
    random.shuffle(shuffled)
    made, again = select_decode(ALL, shape, H100), select_decode(shuffled, shape, H100)
    assert [launch.kernel for launch in made] == [launch.kernel for launch in again]


# -- which grid


@given(shapes)
def test_the_grid_holds_what_the_kernel_relies_on(shape: DecodeShape) -> None:
    for made in select_decode(HOPPER, shape, H100):
        most = int(made.kernel.traits["ctas_per_multiprocessor"]) * H100.multiprocessors
        assert 1 <= made.ctas <= most
        assert (made.ctas % made.heads_together, shape.kv_heads % made.heads_together) == (0, 0)
        rows = min(shape.q_len * shape.group, made.most_rows)
        assert (made.row_tiles - 1) * int(made.kernel.traits["rows"]) < rows
        assert made.row_tiles * int(made.kernel.traits["rows"]) >= rows


def test_a_large_problem_gets_two_ctas_a_multiprocessor() -> None:
    assert chosen(batch=40).ctas == 264


def test_a_grid_ends_on_borders_of_pairs_where_few_ctas_idle_for_it() -> None:
    assert chosen().ctas == 256
    assert chosen(batch=8, max_seq_len=65536).ctas == 256
    assert chosen(batch=40).ctas == 264


def test_a_grid_does_not_count_on_borders_of_pairs_that_differ() -> None:
    assert chosen(ragged=True, tokens=SHAPE.batch).ctas == 264
    assert chosen(batch_invariant=True).ctas == 264


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
    assert chosen(kv_heads=kv_heads, dtype="e4m3", head_dim=64).heads_together == together


def test_heads_are_not_read_side_by_side_where_too_many_ctas_would_idle() -> None:
    few = replace(SHAPE, kv_heads=7, batch=1, max_seq_len=64 * 40)
    assert one(ALL, few, replace(H100, multiprocessors=13)).heads_together == 1


def test_a_small_problem_gets_one_cta_a_tile() -> None:
    assert chosen(batch=1, max_seq_len=65).ctas == 16


@pytest.mark.parametrize(
    ("batch", "max_seq_len", "parts"),
    [
        (1, 64, 1),
        (1, 1024, 8),
        (1, 1 << 14, 8),
        (1, 1 << 17, 0),
        (4, 512, 4),
        (16, 512, 1),
        (2, 4096, 8),
        (2, 8192, 0),
        (17, 64, 0),
    ],
)
def test_a_pair_has_a_cluster_where_little_can_be_lost(batch: int, max_seq_len: int, parts: int) -> None:
    assert chosen(batch=batch, max_seq_len=max_seq_len).cluster_parts == parts


def test_one_kv_head_of_many_keys_is_cut_over_the_whole_gpu() -> None:
    made = chosen(batch=1, kv_heads=1, max_seq_len=1 << 17)
    assert (made.cluster_parts, made.ctas) == (0, 132)


def test_batch_invariance_has_no_clusters() -> None:
    assert chosen(batch=1, max_seq_len=1024, batch_invariant=True).cluster_parts == 0


def test_kernels_without_bulk_copies_have_no_clusters() -> None:
    assert one(ALL, replace(SHAPE, batch=1, max_seq_len=1024), device(10, 0)).cluster_parts == 0


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
    assert chosen(batch=2, max_seq_len=0).ctas == 16


def test_ragged_requests_without_a_token_still_get_a_grid() -> None:
    assert chosen(batch=2, tokens=0, ragged=True).ctas > 0


def test_shared_memory_limits_the_ctas_of_a_multiprocessor() -> None:
    large = tuple(replace(k, dynamic_shared_bytes=200 << 10) for k in HOPPER)
    assert one(large, SHAPE).ctas == 128


@pytest.mark.parametrize(
    ("window_left", "q_len", "ctas"), [(-1, 1, 64), (0, 1, 16), (127, 1, 16), (255, 2, 32), (1 << 30, 1, 64)]
)
def test_a_window_limits_the_tiles(window_left: int, q_len: int, ctas: int) -> None:
    assert chosen(batch=1, group=4, window_left=window_left, q_len=q_len).ctas == ctas


@given(shapes, st.integers(0, 5000), st.sampled_from([64, 128, 256]))
def test_a_window_never_reads_more(shape: DecodeShape, window_left: int, tile: int) -> None:
    narrow = replace(shape, window_left=window_left)
    assert narrow.kv_tokens(tile) <= replace(narrow, window_left=window_left + 1).kv_tokens(tile) <= shape.max_seq_len


# -- batch_invariant: launches and splits


def test_by_default_one_launch_takes_all_requests() -> None:
    made = chosen(q_len=16, tokens=300, ragged=True)
    assert (made.least_rows, made.most_rows) == (0, ANY_ROWS)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "fp16"), (128, "bf16"), (128, "e4m3")])
@pytest.mark.parametrize(
    ("q_len", "group", "arithmetic"),
    [(1, 1, "warps"), (2, 8, "warps"), (1, 16, "warps"), (1, 17, WARPGROUPS), (3, 8, WARPGROUPS), (16, 32, WARPGROUPS)],
)
def test_requests_of_one_number_of_rows_get_its_arithmetic(
    head_dim: int, dtype: str, q_len: int, group: int, arithmetic: str
) -> None:
    asked = launches(head_dim=head_dim, dtype=dtype, q_len=q_len, group=group)
    assert asked == [(arithmetic, 0, ANY_ROWS)]


def test_ragged_requests_of_either_arithmetic_get_a_launch_each() -> None:
    assert launches(q_len=3, tokens=99, ragged=True) == [("warps", 0, 16), (WARPGROUPS, 17, ANY_ROWS)]


@pytest.mark.parametrize(("q_len", "group", "arithmetic"), [(2, 8, "warps"), (16, 1, "warps"), (2, 17, WARPGROUPS)])
def test_ragged_requests_that_cannot_have_the_other_arithmetic_get_one(q_len: int, group: int, arithmetic: str) -> None:
    assert launches(q_len=q_len, group=group, tokens=99, ragged=True) == [(arithmetic, 0, ANY_ROWS)]


def test_ragged_requests_of_few_tokens_together_get_one_launch() -> None:
    assert launches(q_len=16, tokens=2, ragged=True) == [("warps", 0, ANY_ROWS)]


@pytest.mark.parametrize("head_dim", [32, 256, 512])
def test_warps_take_all_where_there_is_nothing_else(head_dim: int) -> None:
    assert launches(head_dim=head_dim, q_len=16, tokens=99, ragged=True) == [("warps", 0, ANY_ROWS)]


@given(shapes, shapes)
def test_a_request_s_own_rows_decide_its_arithmetic(bound: DecodeShape, own: DecodeShape) -> None:
    alone = replace(own, dtype=bound.dtype, head_dim=bound.head_dim, batch_invariant=True, ragged=False)
    q_len, tokens = max(bound.q_len, alone.q_len), max(bound.tokens, alone.q_len)
    among = replace(bound, group=alone.group, q_len=q_len, tokens=tokens, batch_invariant=True, ragged=True)
    taking = [s for s in select_decode(HOPPER, among, H100) if s.least_rows <= alone.rows <= s.most_rows]
    expected = one(HOPPER, alone).kernel.traits["arithmetic"]
    assert [s.kernel.traits["arithmetic"] for s in taking] == [expected]


def test_a_kernel_of_other_arithmetic_is_told_so() -> None:
    few, many = select_decode(ALL, replace(SHAPE, q_len=3, tokens=99, ragged=True, batch_invariant=True), H200_DEVICE)
    wanted = "batch_invariant has warps for requests of up to 16 rows"
    assert words(few)["decode_bf16_d128_rows64_sm90a"] == f"{WARPGROUPS}; {wanted}"
    wanted = f"batch_invariant has {WARPGROUPS} for requests of at least 17 rows"
    assert words(many)["decode_bf16_d128_rows128_sm90a"] == f"warpgroups of 128 rows; {wanted}"


def test_a_release_without_warps_has_nothing_for_few_rows() -> None:
    lone = decode_kernel(rows=64)
    with pytest.raises(UsageError, match=f"{lone.name}: {WARPGROUPS}; batch_invariant has warps for all requests"):
        select_decode((lone,), replace(SHAPE, batch_invariant=True), H100)


def test_a_launch_for_few_rows_is_sized_for_few() -> None:
    few, many = select_decode(ALL, replace(SHAPE, q_len=16, tokens=64, ragged=True, batch_invariant=True), H200_DEVICE)
    assert "1 row tile of 16" in few.reason or "1 row tile of 8" in few.reason
    assert "in 2 row tiles of 64" in many.reason
    assert few.row_tiles * int(few.kernel.traits["rows"]) == 16


@pytest.mark.parametrize(("kv_heads", "splits"), [(1, 64), (2, 64), (3, 43), (8, 16), (64, 2), (128, 1), (200, 1)])
def test_long_pairs_are_split_by_the_kv_heads(kv_heads: int, splits: int) -> None:
    assert chosen(kv_heads=kv_heads, max_seq_len=65536, batch_invariant=True).splits == splits


@pytest.mark.parametrize(
    ("tokens", "splits"),
    [(0, 1), (1, 1), (256, 1), (257, 2), (769, 4), (4096, 4), (4097, 5), (16384, 16), (1 << 20, 128)],
)
def test_a_bound_on_the_keys_bounds_the_splits(tokens: int, splits: int) -> None:
    assert chosen(kv_heads=1, max_seq_len=tokens, batch_invariant=True).splits == splits


def test_a_window_bounds_the_splits() -> None:
    assert chosen(kv_heads=1, max_seq_len=1 << 20, window_left=127, batch_invariant=True).splits == 1


def test_the_grid_cuts_the_pairs_by_default() -> None:
    assert chosen().splits == 0


@given(st.integers(1, 1 << 14), st.integers(1, 1 << 14), st.sampled_from([64, 128, 256]))
def test_the_parts_of_a_pair_never_fall_with_its_tiles(tiles: int, more: int, tile: int) -> None:
    assert 1 <= split_count(tiles, tile) <= min(tiles, split_count(tiles + more, tile))


@pytest.mark.parametrize("tokens", [256, 512, 1024, 4096, 5120, 65536])
def test_the_parts_of_a_pair_come_from_its_tokens(tokens: int) -> None:
    assert len({split_count(tokens // tile, tile) for tile in (64, 128, 256)}) == 1


@given(shapes, st.integers(0, 1 << 20), st.integers(0, 16), st.integers(0, 1 << 20), st.sampled_from([64, 128, 256]))
def test_the_parts_of_a_request_do_not_depend_on_the_bounds(
    shape: DecodeShape, length: int, q_len: int, bound: int, tile: int
) -> None:
    """As the kernel counts a request's tiles and parts, under two bounds."""
    tight = replace(shape, batch_invariant=True, q_len=max(1, q_len), max_seq_len=length)
    wide = replace(tight, q_len=16, max_seq_len=length + bound)
    begin = max(0, length - q_len - 1 - shape.window_left) if shape.window_left >= 0 else 0
    tiles = max(1, -(-length // tile) - begin // tile)
    assert tiles <= tight.tiles(tile)
    assert min(tight.splits(tile), split_count(tiles, tile)) == min(wide.splits(tile), split_count(tiles, tile))


def test_a_batch_invariant_grid_has_at_most_a_cta_a_part() -> None:
    assert chosen(batch=1, kv_heads=4, max_seq_len=8192, batch_invariant=True).ctas == 32
    assert chosen(batch=1, kv_heads=4, max_seq_len=640, batch_invariant=True).ctas == 12


def test_the_reason_says_what_the_splits_come_from() -> None:
    reason = chosen(batch_invariant=True).reason
    assert "warps for all requests, at most 8 splits a pair by its own tiles" in reason


# -- words


def test_the_reason_tells_rows_grid_and_time() -> None:
    reason = chosen(batch=8, q_len=2, max_seq_len=4096).reason
    assert "2 query tokens x 8 query heads a KV head in 1 row tile of 16" in reason
    assert "4096 tiles of 64 keys over 128 CTAs (1 on each of 132 multiprocessors), 8 KV heads side by side" in reason
    assert "us, limited by a CTA's tiles" in reason


def test_the_reason_names_a_window_that_counts() -> None:
    assert "of 64 keys in the window" in chosen(window_left=100).reason
    assert "window" not in chosen(window_left=1 << 20).reason


def test_a_kernel_that_was_not_run_says_so() -> None:
    assert "built for sm_80 (built, not run)" in one(ALL, SHAPE, device(8, 0)).reason


def test_every_candidate_is_told_with_a_word() -> None:
    told = words(chosen(q_len=2))
    assert told["decode_bf16_d128_rows16_sm90a"].startswith("fits, 1 row tile of 16, about ")
    assert told["decode_bf16_d128_rows8_sm90a"].startswith("fits, 2 row tiles of 8, about ")
    assert told["decode_bf16_d64_rows8_sm90a"] == "head_dim is 64"
    assert told["decode_fp16_d128_rows8_sm90a"] == "dtype is fp16"
    assert told["decode_bf16_d128_rows8_sm80"] == "built for sm_80"


@pytest.mark.parametrize(
    ("changes", "capability", "said"),
    [
        (
            {"head_dim": 96},
            (9, 0),
            r"its kernels take bf16 with head_dim 32, 64, 128, 256, 512; fp16 with .*; e4m3 with",
        ),
        ({"dtype": "e5m2"}, (9, 0), "no decode kernel for e5m2 KV with head_dim 128 on H100 .*: its kernels take bf16"),
        ({"dtype": "fp16"}, (8, 0), "its kernels take bf16 with head_dim 128$"),
        ({}, (7, 5), "has decode kernels for sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120$"),
    ],
)
def test_what_no_kernel_does_is_refused_with_what_they_do(
    changes: dict[str, Any], capability: tuple[int, int], said: str
) -> None:
    asked = replace(H100, capability=capability)
    with pytest.raises(UsageError, match=said):
        select_decode(ALL, replace(SHAPE, **changes), asked)


def test_a_kernel_that_is_too_large_is_named_with_its_bytes() -> None:
    with pytest.raises(UsageError, match="decode_bf16_d128_rows8_sm90a: needs 307200 bytes"):
        select_decode((decode_kernel(dynamic_shared_bytes=300 << 10),), SHAPE, H100)


def test_kernels_of_another_operation_are_not_looked_at() -> None:
    with pytest.raises(UsageError, match="the release has no decode kernel"):
        select_decode((decode_kernel(operation="prefill"),), SHAPE, H100)
