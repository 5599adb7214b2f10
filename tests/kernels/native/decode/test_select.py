from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.cost_model import H200, restated
from cubin_runtime.kernels.native.decode import select
from cubin_runtime.kernels.native.decode.grids import DecodeShape, Part, extent_of, least_us
from cubin_runtime.kernels.native.decode.select import select_decode
from tests.kernels.decode_kernels import HOPPER, decode_kernel
from tests.kernels.select_cases import ALL, SHAPE, chosen, fit_of, microseconds, one, rows_of, shapes, words
from tests.launch.examples import H100, device


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
    exact = restated(H200, {"equal_within": 1e-9, "start_us_16bit_d128_rows16_ctas1": 2.15})
    alike = restated(exact, {"equal_within": 0.5})
    few = replace(SHAPE, batch=1, max_seq_len=64)
    assert one(ALL, few, costs=alike).microseconds >= one(ALL, few, costs=exact).microseconds
    assert rows_of(one(ALL, few, costs=alike)) == (8, 1)


def test_shared_memory_that_the_device_does_not_have_rules_a_kernel_out() -> None:
    large = decode_kernel("86", dynamic_shared_bytes=120 << 10)
    small = replace(device(8, 6), shared_bytes_per_block_optin=99 << 10)
    selection = one((large, decode_kernel("80", dynamic_shared_bytes=90 << 10)), SHAPE, small)
    assert selection.kernel.sm == "80"
    assert words(selection)[large.name] == "needs 122880 bytes of shared memory per block, the device has 101376"


@pytest.mark.parametrize(("dynamic", "static"), [(232448, 0), (231424, 1024)])
def test_all_of_a_device_s_shared_memory_may_be_asked_for(dynamic: int, static: int) -> None:
    full = decode_kernel(dynamic_shared_bytes=dynamic, static_shared_bytes=static)
    assert one((full,), SHAPE).kernel is full


@pytest.mark.parametrize(("dynamic", "static"), [(232449, 0), (231424, 1025)])
def test_static_and_dynamic_shared_memory_count_together(dynamic: int, static: int) -> None:
    with pytest.raises(UsageError, match="needs 232449 bytes of shared memory per block, the device has 232448"):
        one((decode_kernel(dynamic_shared_bytes=dynamic, static_shared_bytes=static),), SHAPE)


@given(shapes)
def test_where_the_bound_alone_counts_no_candidate_is_predicted_to_be_much_faster(shape: DecodeShape) -> None:
    for selection in select_decode(HOPPER, replace(shape, batch_invariant=True), H100):
        assert selection.microseconds <= 1.02**2 * min(map(microseconds, selection.candidates))


@pytest.mark.parametrize("bound", [200, 4096, 131072])
def test_a_bound_far_above_short_requests_keeps_a_launch_that_is_good_for_them(bound: int) -> None:
    times = fit_of(chosen(batch=256, group=4, max_seq_len=bound)).times
    shortest = [
        fit.times[-1 if bound < 1024 else 1]
        for c in chosen(batch=256, group=4, max_seq_len=bound).candidates
        if c.fit
        for fit in (c.fit, *c.other_fits)
    ]
    assert times[-1 if bound < 1024 else 1] <= 1.3 * min(shortest)


@given(shapes)
def test_no_grid_is_faster_than_the_bound_that_rules_kernels_out(shape: DecodeShape) -> None:
    for launch in select_decode(ALL, shape, H100):
        part = Part(launch.min_rows, launch.max_rows, None)
        fits = [fit for c in launch.candidates if c.fit for fit in (c.fit, *c.other_fits)]
        assert all(least_us(fit.tiling, extent_of(fit.tiling, shape, part), shape) <= fit.microseconds for fit in fits)


@given(shapes, st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4000)), min_size=2, max_size=6))
def test_a_selection_does_not_depend_on_earlier_ones_of_other_sizes(
    shape: DecodeShape, sizes: list[tuple[int, int]]
) -> None:
    others = [replace(shape, batch=batch, tokens=max(batch, tokens), ragged=True) for batch, tokens in sizes]
    selections = [select_decode(HOPPER, other, H100) for other in others]
    for other, launches in zip(others, selections, strict=True):
        for cached in (select._selection, select._fits, select._shape_of):
            cached.cache_clear()
        anew = select_decode(HOPPER, other, H100)
        assert launches == anew
        assert [launch.explain() for launch in launches] == [launch.explain() for launch in anew]


@given(shapes, st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(shape: DecodeShape, random: Any) -> None:
    shuffled = list(ALL)
    random.shuffle(shuffled)
    made, again = select_decode(ALL, shape, H100), select_decode(shuffled, shape, H100)
    assert [launch.kernel for launch in made] == [launch.kernel for launch in again]


def test_the_reason_tells_rows_and_grid() -> None:
    reason = chosen(batch=8, q_len=2, max_seq_len=4096).reason
    assert "2 query tokens x 8 query heads per KV head in 2 row tiles of 8" in reason
    assert (
        "8192 tiles of 64 keys over 128 CTAs (up to 1 on each of 132 multiprocessors), 8 KV heads side by side"
        in reason
    )


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
