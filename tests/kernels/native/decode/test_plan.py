from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.kernels.native.decode.grids import ANY_ROWS
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_COPY, PAGED_DECODE_TMA
from cubin_runtime.kernels.native.decode.plan import DecodeProblem, decode_launches
from cubin_runtime.kernels.native.decode.select import DecodeSelection
from cubin_runtime.kernels.native.launches import WORKSPACE_FIELDS, KernelFile, NativeLaunch
from cubin_runtime.kernels.native.problem import CacheStrides
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.tensormap import TensorMapSpec
from tests.kernels.decode_kernels import decode_kernel

PROBLEM = DecodeProblem(
    batch=3,
    tokens=11,
    q_len=4,
    kv_heads=2,
    group=5,
    head_dim=128,
    page_size=32,
    num_pages=7,
    max_seq_len=640,
    window_left=100,
    kv_dtype="bf16",
    q_dtype="bf16",
    out_dtype="bf16",
    softmax_scale=0.25,
    output_scale=3.0,
    q_strides=(1280, 128),
    out_strides=(2560, 256),
    lse_strides=(1, 11),
    table_stride=20,
    k_strides=CacheStrides(page=8192, token=256, head=128),
    v_strides=CacheStrides(page=8192, token=256, head=128),
)


def selection(rows: int = 8, splits: int = 0, cluster_size: int = 0, **traits: Any) -> DecodeSelection:
    """24 CTAs; row tiles as the problem's 20 rows make them."""
    return DecodeSelection(
        kernel=decode_kernel(rows=rows, **traits),
        min_rows=0,
        max_rows=ANY_ROWS,
        ctas=24,
        cta_group_size=2,
        cluster_size=cluster_size,
        row_tiles=-(-20 // rows),
        splits=splits,
        microseconds=1.0,
        explain=lambda: ("made up", ()),
    )


def launches(*chosen: DecodeSelection, problem: DecodeProblem = PROBLEM, tma: bool = True) -> tuple[NativeLaunch, ...]:
    file = KernelFile(ArtifactPath("r/k.cubin"), "0" * 64, PAGED_DECODE_TMA if tma else PAGED_DECODE_COPY)
    return decode_launches(chosen, problem, lambda _: file)


def plan(problem: DecodeProblem = PROBLEM, chosen: DecodeSelection | None = None, tma: bool = True) -> LaunchPlan:
    strides = CacheStrides(64 * problem.head_dim, 2 * problem.head_dim, problem.head_dim)
    (launch,) = launches(chosen or selection(), problem=replace(problem, k_strides=strides, v_strides=strides), tma=tma)
    return launch.plan


def sizes(*chosen: DecodeSelection) -> dict[str, int]:
    return {region.name: region.nbytes for launch in launches(*chosen) for region in launch.regions}


def test_a_grid_that_cuts_the_pairs_has_two_partials_and_a_counter_a_cta() -> None:
    assert sizes(selection()) == {
        "status": 4,
        "counters": 24 * 4,
        "partial_statistics": 2 * 24 * 8 * 2 * 4,
        "partial_out": 2 * 24 * 8 * 128 * 4,
    }


def test_pairs_cut_into_a_fixed_number_have_a_counter_each_and_that_many_partials() -> None:
    pairs = 3 * 2 * 2  # requests, KV heads, row tiles
    assert sizes(selection(rows=16, splits=64)) == {
        "status": 4,
        "counters": pairs * 4,
        "partial_statistics": pairs * 64 * 16 * 2 * 4,
        "partial_out": pairs * 64 * 16 * 128 * 4,
    }


@pytest.mark.parametrize("splits", [0, 64])
def test_status_and_counters_begin_as_zeros(splits: int) -> None:
    (launch,) = launches(selection(splits=splits))
    assert {region.name for region in launch.regions if region.zeroed} == {"status", "counters"}


def test_launches_share_the_status_word_and_nothing_else() -> None:
    apart = sizes(selection(rows=16, splits=4), selection(rows=64, splits=4))
    assert apart == {
        "status": 4,
        "counters 1": 12 * 4,
        "partial_statistics 1": 12 * 4 * 16 * 2 * 4,
        "partial_out 1": 12 * 4 * 16 * 128 * 4,
        "counters 2": 6 * 4,
        "partial_statistics 2": 6 * 4 * 64 * 2 * 4,
        "partial_out 2": 6 * 4 * 64 * 128 * 4,
    }


def test_a_launch_s_regions_stand_in_the_order_of_its_pointers() -> None:
    for launch in launches(selection(), selection()):
        assert tuple(region.name.split()[0] for region in launch.regions) == WORKSPACE_FIELDS


def test_every_field_says_what_was_planned() -> None:
    values = plan(chosen=selection(splits=64)).values
    expected = {
        "q_token_stride": 1280,
        "q_head_stride": 128,
        "out_token_stride": 2560,
        "out_head_stride": 256,
        "lse_token_stride": 1,
        "lse_head_stride": 11,
        "table_stride": 20,
        "batch": 3,
        "tokens": 11,
        "q_len": 4,
        "kv_heads": 2,
        "group": 5,
        "cta_group_size": 2,
        "cluster_size_log2": -1,
        "splits": 64,
        "page_size_log2": 5,
        "num_pages": 7,
        "max_seq_len": 640,
        "window_left": 100,
        "q_type": 0,
        "out_type": 0,
        "softmax_scale_log2": 0.25 * math.log2(math.e),
        "output_scale": 3.0,
    }
    assert {name: values[name] for name in expected} == expected


def test_a_cluster_for_each_pair_is_a_row_of_the_grid() -> None:
    made = plan(chosen=selection(cluster_size=4))
    assert made.grid == (4, 2, selection().ctas // 8)
    assert (made.attributes.cluster, made.values["cluster_size_log2"]) == ((4, 1, 1), 2)


def test_one_cta_for_each_pair_needs_no_cluster() -> None:
    made = plan(chosen=selection(cluster_size=1))
    assert (made.attributes.cluster, made.grid[0], made.values["cluster_size_log2"]) == (None, 1, 0)


def test_clusters_have_scratch_for_when_a_request_is_far_longer_than_others() -> None:
    assert sizes(selection(cluster_size=4)) == sizes(selection())


def test_clusters_without_a_choice_have_no_scratch_for_partials() -> None:
    assert sum(sizes(replace(selection(cluster_size=4), alone=True)).values()) == sizes(selection())["status"]


def test_a_launch_says_which_requests_it_takes() -> None:
    values = plan(chosen=replace(selection(), min_rows=17, max_rows=40)).values
    assert (values["min_rows"], values["max_rows"]) == (17, 40)


def test_what_a_step_brings_is_null_in_the_plan() -> None:
    made = plan()
    given = {name for name in made.inputs if made.values[name]}
    assert given == {"k_map", "v_map", "max_seq_len", "softmax_scale_log2", "output_scale"}


@pytest.mark.parametrize("tma", [True, False])
def test_a_run_brings_every_address(tma: bool) -> None:
    made = plan(tma=tma)
    pointers = {field.name for field in made.layout.fields if field.type in ("ptr", "CUtensorMap")}
    assert pointers <= set(made.inputs)


@pytest.mark.parametrize(
    ("kv", "q", "out", "codes"),
    [("fp16", "fp16", "e4m3", (1, 2)), ("e4m3", "bf16", "fp16", (0, 1)), ("e4m3", "e4m3", "bf16", (2, 0))],
)
def test_types_are_told_by_number(kv: str, q: str, out: str, codes: tuple[int, int]) -> None:
    values = plan(replace(PROBLEM, kv_dtype=kv, q_dtype=q, out_dtype=out)).values
    assert (values["q_type"], values["out_type"]) == codes


@pytest.mark.parametrize(
    ("dtype", "head_dim", "word", "inner", "swizzle"),
    [
        ("bf16", 32, "bfloat16", 32, "64B"),
        ("bf16", 64, "bfloat16", 64, "128B"),
        ("fp16", 512, "float16", 64, "128B"),
        ("e4m3", 32, "uint8", 32, "32B"),
        ("e4m3", 64, "uint8", 64, "64B"),
        ("e4m3", 128, "uint8", 128, "128B"),
        ("e4m3", 256, "uint8", 128, "128B"),
    ],
)
def test_a_box_is_as_wide_as_its_swizzle(dtype: str, head_dim: int, word: str, inner: int, swizzle: str) -> None:
    spec = plan(replace(PROBLEM, kv_dtype=dtype, head_dim=head_dim)).values["k_map"]
    assert isinstance(spec, TensorMapSpec)
    spec.check()
    assert (spec.dtype, spec.box, spec.swizzle) == (word, (inner, 32, 1, 1), swizzle)
    assert spec.dims == (head_dim, 32, 2, 7)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("bf16", 2), ("fp16", 2), ("e4m3", 1)])
def test_strides_of_a_descriptor_are_bytes(dtype: str, item_bytes: int) -> None:
    spec = plan(replace(PROBLEM, kv_dtype=dtype)).values["v_map"]
    assert isinstance(spec, TensorMapSpec)
    assert spec.strides == (256 * item_bytes, 128 * item_bytes, 8192 * item_bytes)


@pytest.mark.parametrize(
    ("page_size", "tile_tokens", "tokens"),
    [(16, 64, 16), (64, 64, 64), (256, 64, 64), (64, 128, 64), (256, 128, 128), (256, 256, 256)],
)
def test_a_box_has_a_tile_s_tokens_or_a_page_s(page_size: int, tile_tokens: int, tokens: int) -> None:
    spec = plan(replace(PROBLEM, page_size=page_size), selection(tile_tokens=tile_tokens)).values["k_map"]
    assert isinstance(spec, TensorMapSpec)
    assert spec.box[1] == tokens


def test_a_kernel_without_tma_gets_pointers_and_strides_in_elements() -> None:
    made = plan(tma=False)
    assert (made.inputs["k"], made.inputs["v"]) == ("k_cache", "v_cache")
    assert [made.values[f"v_{name}_stride"] for name in ("page", "token", "head")] == [8192, 256, 128]
