from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.kernels.trtllm_gen.errors import PlanRefused
from cubin_runtime.kernels.trtllm_gen.grid import lay_out
from cubin_runtime.kernels.trtllm_gen.select import first_key
from cubin_runtime.kernels.trtllm_gen.traits import KernelType, MaskType, MultiCtasMode, TileScheduler
from tests.kernels.trtllm_examples import MLA, PROBLEM, ROW, SPARSE_MLA

KEY = first_key(PROBLEM)._replace(kernel_type=KernelType.SWAPS_AB)
ALONE = replace(PROBLEM, multi_ctas=False)
ALONE_KEY = first_key(ALONE)._replace(kernel_type=KernelType.SWAPS_AB)
MLA_ROW = replace(ROW, head_dim_qk=576, head_dim_v=512, head_dim_per_cta_v=512, tile_q=16, step_q=16)
MLA_KEY = first_key(MLA)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16)


def alone(problem=ALONE, row=ROW, **changes):
    return lay_out(replace(problem, **changes), row, ALONE_KEY, allows_cga=True)


def test_context_takes_its_steps_along_the_queries() -> None:
    row = replace(ROW, step_q=256, groups_heads_q=False, groups_tokens_heads_q=False)
    geometry = alone(row=row, kernel_type=KernelType.CONTEXT, max_q=1000, batch=3)
    assert (geometry.grid, geometry.ctas_q) == ((4, 32, 3), 4)


def test_a_kernel_that_groups_heads_takes_a_cta_a_token() -> None:
    assert alone(row=replace(ROW, groups_tokens_heads_q=False), max_q=5).grid == (5, 8, 1)


def test_a_kernel_that_groups_tokens_and_heads_takes_a_cta_for_as_many_tokens_as_fit() -> None:
    assert alone(max_q=9).grid == (3, 8, 1)


def test_a_group_larger_than_a_step_still_takes_a_cta_a_token() -> None:
    assert alone(heads_q=32 * 8, max_q=3).ctas_q == 3


def test_heads_beyond_a_step_take_more_ctas() -> None:
    assert alone(heads_q=64 * 8).grid == (1, 32, 1)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanRefused, match="24 query heads over 1 KV heads"):
        alone(heads_q=24, heads_kv=1)


def test_values_wider_than_a_cta_take_more_ctas() -> None:
    row = replace(ROW, head_dim_v=512, head_dim_per_cta_v=256)
    assert alone(row=row, head_dim_v=512).grid == (1, 16, 1)


def test_kv_is_split_until_the_gpu_is_full() -> None:
    geometry = lay_out(replace(PROBLEM, batch=2, max_kv=100_000), ROW, KEY, allows_cga=False)
    assert (geometry.grid, geometry.ctas_kv) == ((9, 8, 2), 9)


def test_every_cta_gets_two_steps_of_kv() -> None:
    assert lay_out(replace(PROBLEM, max_kv=1025), ROW, KEY, allows_cga=False).ctas_kv == 5


@pytest.mark.parametrize(("window", "splits"), [(1024, 5), (1153, 5), (1154, 6)])
def test_a_window_bounds_the_kv_that_is_split(window: int, splits: int) -> None:
    key = KEY._replace(mask=MaskType.SLIDING_OR_CHUNKED_CAUSAL)
    geometry = lay_out(replace(PROBLEM, max_kv=100_000, window=window), ROW, key, allows_cga=False)
    assert geometry.ctas_kv == splits


@pytest.mark.parametrize(("window", "ctas_kv"), [(129, 1), (130, 2)])
def test_a_window_may_begin_anywhere_in_a_step_of_kv(window: int, ctas_kv: int) -> None:
    key = KEY._replace(mask=MaskType.SLIDING_OR_CHUNKED_CAUSAL)
    geometry = lay_out(replace(PROBLEM, max_kv=100_000, window=window), ROW, key, allows_cga=False)
    assert geometry.ctas_kv == ctas_kv


def test_sparse_kv_is_split_by_its_tokens() -> None:
    key = first_key(SPARSE_MLA)._replace(kernel_type=KernelType.SWAPS_AB, tile_q=16, head_dim_per_cta_v=256)
    row = replace(MLA_ROW, head_dim_per_cta_v=256)
    assert lay_out(replace(SPARSE_MLA, max_kv=10**6), row, key, allows_cga=False).ctas_kv == 8


def test_a_split_of_one_is_switched_off_and_selected_again() -> None:
    asked = lay_out(replace(PROBLEM, max_kv=200), ROW, KEY, allows_cga=True).next_key
    assert asked == KEY._replace(multi_ctas=MultiCtasMode.DISABLED, scheduler=TileScheduler.PERSISTENT)


def test_up_to_sixteen_parts_merge_within_a_cluster() -> None:
    geometry = lay_out(replace(PROBLEM, max_kv=4096), ROW, KEY, allows_cga=True)
    assert geometry.ctas_kv == 16
    assert geometry.next_key == KEY._replace(multi_ctas=MultiCtasMode.CGA)


@pytest.mark.parametrize(
    ("changed", "key", "allows"),
    [
        ({"max_kv": 4097}, KEY, True),
        ({"max_kv": 4096}, KEY, False),
        ({"max_kv": 4096}, KEY._replace(kernel_type=KernelType.KEEPS_AB), True),
        ({"max_kv": 4096}, KEY._replace(multi_ctas=MultiCtasMode.SEPARATE_KERNEL), True),
        ({"max_kv": 4096, "head_dim_v": 512}, KEY, True),
    ],
    ids=["over sixteen", "forbidden", "operands kept", "separate reduction", "wide values"],
)
def test_other_splits_merge_through_global_memory(changed, key, allows) -> None:
    row = replace(ROW, head_dim_per_cta_v=changed.get("head_dim_v", 128))
    assert lay_out(replace(PROBLEM, **changed), row, key, allows_cga=allows).next_key is None


def test_a_cluster_is_as_large_as_the_split() -> None:
    key = KEY._replace(multi_ctas=MultiCtasMode.CGA)
    assert lay_out(replace(PROBLEM, max_kv=2048), ROW, key, allows_cga=True).cluster_x == 8


@pytest.mark.parametrize(
    ("changed", "head_dim"),
    [
        ({"batch": 1, "max_kv": 256}, 128),
        ({"batch": 37, "max_kv": 256}, 128),
        ({"batch": 38, "max_kv": 256}, 256),
        ({"batch": 74, "max_kv": 256}, 256),
        ({"batch": 75, "max_kv": 256}, None),
    ],
)
def test_mla_shares_its_values_while_the_gpu_has_room(changed, head_dim) -> None:
    key = MLA_KEY._replace(multi_ctas=MultiCtasMode.DISABLED)
    asked = lay_out(replace(MLA, **changed), MLA_ROW, key, allows_cga=True).next_key
    assert (asked and asked.head_dim_per_cta_v) == head_dim


def test_one_short_sequence_of_mla_counts_single() -> None:
    key = MLA_KEY._replace(multi_ctas=MultiCtasMode.DISABLED)
    small = replace(MLA, multiprocessors=16, max_q=16)
    assert lay_out(small, MLA_ROW, key, allows_cga=True).next_key.head_dim_per_cta_v == 256
    assert lay_out(replace(small, max_q=17), MLA_ROW, key, allows_cga=True).next_key is None


def test_mla_on_two_ctas_pairs_them_along_x() -> None:
    row = replace(MLA_ROW, tile_q=64, step_q=64, head_dim_per_cta_v=256, two_cta_mma=True)
    key = MLA_KEY._replace(tile_q=64, two_cta=True, head_dim_per_cta_v=256, multi_ctas=0)
    geometry = lay_out(replace(MLA, heads_q=128, batch=5), row, key, allows_cga=True)
    assert (geometry.grid, geometry.cluster_x, geometry.next_key) == ((2, 1, 5), 2, None)


def test_two_ctas_refuse_other_divisions() -> None:
    row = replace(MLA_ROW, tile_q=64, step_q=64, head_dim_per_cta_v=512, two_cta_mma=True)
    key = MLA_KEY._replace(tile_q=64, two_cta=True, multi_ctas=0)
    with pytest.raises(PlanRefused, match="2 x 1"):
        lay_out(replace(MLA, heads_q=128), row, key, allows_cga=True)


def test_the_experimental_tile_is_asked_for_by_its_switch_alone() -> None:
    problem = replace(MLA, max_kv=8192, multiprocessors=100)
    on = lay_out(replace(problem, allows_tile_kv_64=True), MLA_ROW, MLA_KEY, allows_cga=True)
    off = lay_out(problem, MLA_ROW, MLA_KEY, allows_cga=True)
    assert (on.next_key.tile_kv, (off.next_key or MLA_KEY).tile_kv) == (64, 128)
