from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.kernels.trtllm_gen.arithmetic import INT32_MAX
from cubin_runtime.kernels.trtllm_gen.decision import decide
from cubin_runtime.kernels.trtllm_gen.errors import PlanRefused
from cubin_runtime.kernels.trtllm_gen.problem import Bindings, Strides
from cubin_runtime.kernels.trtllm_gen.tensor_maps import describe_tensors
from cubin_runtime.kernels.trtllm_gen.traits import KernelType, Policy, QkvLayout
from cubin_runtime.launch.tensormap import TensorMapSpec
from tests.kernels.trtllm_examples import PROBLEM, ROW, SPARSE_MLA, recorded_cases, recorded_kernels

FP8 = replace(PROBLEM, dtype_q="e4m3", dtype_k="e4m3", dtype_v="e4m3")
MIXED = replace(PROBLEM, dtype_k="e4m3", dtype_v="e4m3", head_dim_qk=64, head_dim_v=64)
MIXED = replace(MIXED, strides=Strides(query=(2048, 64), key=(64, 2048, 16384), value=(64, 2048, 16384)))
FP4 = replace(PROBLEM, dtype_q="e4m3", dtype_k="e2m1", dtype_v="e2m1")
FP4 = replace(FP4, strides=replace(FP4.strides, key_scales=(256, 2048)))
RAGGED = replace(
    PROBLEM,
    layout=QkvLayout.SEPARATE,
    kernel_type=KernelType.CONTEXT,
    head_dim_qk=192,
    tokens_kv=5000,
    page=0,
    strides=Strides(key=(1536, 192, -7), value=(1024, 128, 99)),
)


def shapes(spec: TensorMapSpec | None):
    assert spec is not None
    return spec.dims, spec.strides, spec.box


def test_queries_that_are_not_grouped_are_boxed_by_tokens() -> None:
    row = replace(ROW, groups_heads_q=False, groups_tokens_heads_q=False, tile_q=128)
    maps = describe_tensors(replace(PROBLEM, tokens_q=77), row)
    assert shapes(maps.query) == ((128, 1, 32, 77), (256, 256, 8192), (64, 1, 1, 128))
    assert maps.tokens_per_cta == 128


def test_queries_grouped_by_tokens_and_heads_are_boxed_by_both() -> None:
    maps = describe_tensors(PROBLEM, ROW)
    assert shapes(maps.query) == ((128, 4, 8, 1), (256, 1024, 8192), (64, 4, 1, 4))
    assert maps.tokens_per_cta == 4


def test_queries_grouped_by_heads_are_boxed_by_heads() -> None:
    maps = describe_tensors(PROBLEM, replace(ROW, groups_tokens_heads_q=False))
    assert maps.query.box == (64, 16, 1, 1)
    assert maps.tokens_per_cta == 1


def test_more_heads_than_a_tile_are_grouped_by_the_tile() -> None:
    maps = describe_tensors(replace(PROBLEM, heads_q=512), replace(ROW, groups_tokens_heads_q=False))
    assert maps.query.dims == (128, 16, 32, 1)


def test_heads_that_do_not_divide_into_tiles_are_refused() -> None:
    with pytest.raises(PlanRefused, match="heads: 36 query heads do not divide into tiles of 8 heads"):
        describe_tensors(replace(PROBLEM, heads_q=36, heads_kv=3), replace(ROW, tile_q=8))


def test_a_group_that_does_not_divide_a_tile_leaves_rows_of_it_empty() -> None:
    maps = describe_tensors(replace(PROBLEM, heads_q=15, heads_kv=3), ROW)
    assert maps.query.box == (64, 5, 1, 3)
    assert maps.tokens_per_cta == 3


def test_queries_without_strides_are_contiguous() -> None:
    maps = describe_tensors(replace(PROBLEM, strides=replace(PROBLEM.strides, query=(0, 0))), ROW)
    assert maps.query.strides == (256, 1024, 8192)


def test_queries_with_strides_keep_them() -> None:
    maps = describe_tensors(replace(PROBLEM, strides=replace(PROBLEM.strides, query=(9000, 200))), ROW)
    assert maps.query.strides == (400, 1600, 18000)


def test_a_box_row_of_the_output_is_as_long_as_that_of_the_query() -> None:
    assert describe_tensors(replace(PROBLEM, head_dim_qk=64, head_dim_v=32), ROW).out.box[0] == 64


def test_the_output_has_the_element_type_of_the_query() -> None:
    maps = describe_tensors(replace(PROBLEM, dtype_o="e2m1"), ROW)
    assert maps.out.dtype == "bfloat16"
    assert shapes(maps.out) == ((128, 1, 8, 4, 1), (8192, 256, 2048, 0), (64, 16, 1, 1, 1))


def test_pages_are_boxed_by_page_and_tile() -> None:
    maps = describe_tensors(PROBLEM, ROW)
    assert shapes(maps.key) == ((128, 32, 8, 1000), (256, 8192, 65536), (64, 32, 1, 1))
    assert describe_tensors(replace(PROBLEM, page=512), ROW).key.box == (64, 128, 1, 1)


def test_both_pools_take_the_larger_head_dimension() -> None:
    maps = describe_tensors(replace(PROBLEM, head_dim_qk=192, head_dim_v=128), ROW)
    assert (maps.key.dims[0], maps.value.dims[0]) == (192, 192)


def test_ragged_keys_and_values_take_their_own_head_dimension_and_all_tokens() -> None:
    maps = describe_tensors(RAGGED, ROW)
    assert shapes(maps.key) == ((192, 5000, 8, 1), (3072, 384, 0), (64, 128, 1, 1))
    assert shapes(maps.value) == ((128, 5000, 8, 1), (2048, 256, 198), (64, 128, 1, 1))


@pytest.mark.parametrize(("head_dim", "swizzle"), [(64, "64B"), (32, "32B"), (128, "128B")])
def test_the_swizzle_is_that_of_a_box_row(head_dim: int, swizzle: str) -> None:
    assert describe_tensors(replace(FP8, head_dim_qk=head_dim, head_dim_v=head_dim), ROW).key.swizzle == swizzle


def test_keys_of_another_type_than_the_query_are_folded_and_not_swizzled() -> None:
    maps = describe_tensors(MIXED, ROW)
    assert (maps.reshape_factor, maps.key.swizzle) == (2, "none")
    assert shapes(maps.key) == ((128, 16, 8, 1000), (128, 2048, 16384), (128, 16, 1, 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype_q": "e4m3"},
        {"head_dim_qk": 96},
        {"strides": Strides(key=(512, 2048, 16384), value=(512, 2048, 16384))},
        {"layout": QkvLayout.SEPARATE, "tokens_kv": 100},
    ],
    ids=["swizzled", "two head dimensions", "tokens apart", "not paged"],
)
def test_other_keys_are_not_folded(changed) -> None:
    assert describe_tensors(replace(MIXED, **changed), ROW).reshape_factor == 1


def test_values_of_another_width_keep_the_bytes_of_a_row() -> None:
    maps = describe_tensors(replace(RAGGED, dtype_v="e4m3", head_dim_qk=128), ROW)
    assert (maps.key.box, maps.value.box) == ((64, 128, 1, 1), (128, 128, 1, 1))


def test_fp4_is_widened_by_the_copy_where_the_operands_are_swapped() -> None:
    maps = describe_tensors(FP4, ROW)
    assert (maps.key.dtype, maps.key.swizzle) == ("16u4_align16b", "128B")
    assert shapes(maps.key) == ((128, 32, 8, 1000), (64, 2048, 16384), (128, 32, 1, 1))


def test_fp4_stays_packed_where_the_operands_are_kept() -> None:
    maps = describe_tensors(FP4, replace(ROW, kernel_type=KernelType.KEEPS_AB))
    assert (maps.key.dtype, maps.key.swizzle, maps.reshape_factor) == ("uint8", "none", 1)
    assert shapes(maps.key) == ((64, 32, 8, 1000), (64, 2048, 16384), (64, 32, 1, 1))


def test_scales_of_fp4_are_folded_to_lines_by_the_strides_of_the_keys() -> None:
    maps = describe_tensors(replace(FP4, bindings=FP4.bindings._replace(key_scales=16, value_scales=32)), ROW)
    expected = ((128, 2, 8, 1000), (128, 256, 2048), (128, 2, 1, 1))
    assert (shapes(maps.key_scales), shapes(maps.value_scales)) == (expected, expected)
    assert (maps.key_scales.address, maps.value_scales.address) == (16, 32)


def test_other_keys_have_no_scales() -> None:
    maps = describe_tensors(FP8, ROW)
    assert (maps.key_scales, maps.value_scales) == (None, None)


def test_sparse_keys_are_single_tokens_without_an_end() -> None:
    maps = describe_tensors(SPARSE_MLA, ROW)
    assert shapes(maps.key) == ((576, INT32_MAX), (1152,), (64, 1))
    assert maps.value.box == (64, 1, 1, 1)


def test_a_window_pool_is_described_like_the_keys() -> None:
    bindings = Bindings(query=16, key=32, value=32, out=48, window_pool=64)
    maps = describe_tensors(replace(SPARSE_MLA, bindings=bindings), ROW)
    assert maps.window_pool == maps.key._replace(address=64)


def test_without_a_window_pool_there_is_no_descriptor_of_it() -> None:
    assert describe_tensors(SPARSE_MLA, ROW).window_pool is None


def test_every_recorded_descriptor_keeps_the_rules_of_the_driver() -> None:
    specs = set()
    for record in recorded_cases():
        if record["ok"]:
            decision = decide(problem_of(record["case"]), recorded_kernels(), occupancy_of(record["case"]), Policy.BEST)
            specs |= {value for value in decision.values.values() if isinstance(value, TensorMapSpec)}
    assert len(specs) > 5000
    for spec in specs:
        spec.check()
