from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.grids import ANY_ROWS, DecodeShape, split_count
from cubin_runtime.kernels.native.decode.select import select_decode
from tests.kernels.decode_kernels import HOPPER, decode_kernel
from tests.kernels.select_cases import ALL, H200_DEVICE, SHAPE, WARPGROUPS, chosen, launches, one, shapes, words
from tests.launch.examples import H100


def test_by_default_one_launch_takes_all_requests() -> None:
    made = chosen(q_len=16, tokens=300, ragged=True)
    assert (made.min_rows, made.max_rows) == (0, ANY_ROWS)


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
    taking = [s for s in select_decode(HOPPER, among, H100) if s.min_rows <= alone.rows <= s.max_rows]
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
    assert "warps for all requests, at most 8 splits per output tile" in reason
