from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.launches import KernelFile, NativeLaunch
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.prefill.params import CONTEXT_ATTENTION, CONTEXT_ATTENTION_E4M3
from cubin_runtime.kernels.native.prefill.plan import (
    ContextProblem,
    context_launch,
    context_launches,
    copy_of_cache,
)
from cubin_runtime.kernels.native.prefill.select import (
    ContextShape,
    select_context_attention,
    select_context_launches,
)
from cubin_runtime.kernels.native.problem import CacheStrides
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.tensormap import check_tensor_map
from tests.kernels.context_examples import KERNELS
from tests.launch.examples import DIGEST, H100

RAGGED = ContextProblem(
    dtype="bf16",
    kv_dtype="bf16",
    batch=3,
    tokens=500,
    q_len=400,
    heads=24,
    kv_heads=2,
    head_dim=128,
    value_dim=128,
    max_seq_len=1000,
    kv_tokens=1500,
    ragged=True,
    window_left=-1,
    window_right=0,
    soft_cap=0.0,
    softmax_scale=0.5,
    output_scale=2.0,
    lse_natural=False,
    lse_with_sink=True,
    q_strides=(24 * 128, 128),
    out_strides=(24 * 128, 128),
    lse_strides=(24, 1),
    k_strides=CacheStrides(128, 256, 128),
    v_strides=CacheStrides(128, 256, 128),
    table_stride=0,
)
PAGED = replace(
    RAGGED,
    kv_tokens=0,
    ragged=False,
    page_size=16,
    num_pages=90,
    k_strides=CacheStrides(16 * 512, 512, 256),
    v_strides=CacheStrides(16 * 512, 512, 256),
    table_stride=64,
)


E4M3 = replace(PAGED, kv_dtype="e4m3", k_scale_strides=(2, 1), v_scale_strides=(0, 3))


def plan(problem: ContextProblem = RAGGED) -> LaunchPlan:
    kv_dtype, bound = problem.kv_dtype, problem.max_seq_len
    shape = ContextShape("bf16", kv_dtype, 128, 12, 2, problem.batch, tokens=problem.tokens, max_seq_len=bound)
    layout = CONTEXT_ATTENTION_E4M3 if kv_dtype == "e4m3" else CONTEXT_ATTENTION
    path = ArtifactPath("hopper-0.1.0/prefill/kernel.cubin")
    selection = select_context_attention(KERNELS, shape, H100)
    return context_launch(selection, problem, KernelFile(path, DIGEST, layout)).plan


@pytest.mark.parametrize("problem", [RAGGED, PAGED, E4M3])
def test_every_field_of_the_struct_has_a_value(problem: ContextProblem) -> None:
    maps = {name: bytes(128) for name in ("q_map", "k_map", "v_map")}
    launch = plan(problem)
    assert len(launch.layout.pack({**launch.values, **maps})) == launch.layout.size


@pytest.mark.parametrize("problem", [RAGGED, PAGED, E4M3])
@pytest.mark.parametrize("name", ["q_map", "k_map", "v_map"])
def test_the_descriptors_are_ones_that_the_driver_takes(problem: ContextProblem, name: str) -> None:
    check_tensor_map(plan(problem).values[name]._replace(address=0x7F0000100000))


def test_a_box_of_queries_is_a_warpgroups_rows_of_packed_heads() -> None:
    spec = plan().values["q_map"]
    assert (spec.dims, spec.strides, spec.box) == ((128, 24, 500), (256, 24 * 256), (64, 4, 16))


def test_ragged_keys_are_one_page() -> None:
    spec = plan().values["k_map"]
    assert (spec.dims, spec.box) == ((128, 1500, 2, 1), (64, 128, 1, 1))
    assert plan().values["num_pages"] == 0


@pytest.mark.parametrize(("page_size", "rows"), [(16, 16), (128, 128), (256, 128)])
def test_a_box_of_paged_keys_lies_in_one_page(page_size: int, rows: int) -> None:
    given = plan(replace(PAGED, page_size=page_size)).values
    assert given["k_map"].box == (64, rows, 1, 1)
    assert 1 << given["page_size_log2"] == page_size


@pytest.mark.parametrize(
    ("head_dim", "of_keys", "of_values"),
    # Bytes of a row in one box, in whose size they are swizzled.
    [(64, 64, 64), (128, 128, 128), (192, 64, 128), (256, 128, 128)],
)
def test_boxes_of_e4m3_have_rows_that_divide_the_columns(head_dim: int, of_keys: int, of_values: int) -> None:
    given = plan(replace(E4M3, head_dim=head_dim, value_dim=128 if head_dim == 192 else head_dim)).values
    for name, row in (("k_map", of_keys), ("v_map", of_values)):
        assert (given[name].box[0], given[name].swizzle, given[name].dtype) == (row, f"{row}B", "uint8")
    assert given["q_map"].dtype == "bfloat16"
    assert given["k_map"].strides == (512, 256, 16 * 512)


def test_scales_of_e4m3_have_a_stride_of_requests_and_of_heads() -> None:
    given = plan(E4M3).values
    assert (given["k_scale_request_stride"], given["k_scale_head_stride"]) == (2, 1)
    assert (given["v_scale_request_stride"], given["v_scale_head_stride"]) == (0, 3)
    assert {name: plan(E4M3).inputs[name] for name in ("k_scale", "v_scale")} == {
        "k_scale": "k_scale",
        "v_scale": "v_scale",
    }


def test_strides_of_keys_and_values_are_their_own() -> None:
    given = plan(replace(PAGED, v_strides=CacheStrides(1 << 14, 1024, 128))).values
    assert given["k_map"].strides == (1024, 512, 16 * 1024)
    assert given["v_map"].strides == (2048, 256, 1 << 15)


def test_values_have_columns_of_their_own() -> None:
    given = plan(replace(RAGGED, head_dim=192, value_dim=128)).values
    assert (given["q_map"].dims[0], given["k_map"].dims[0], given["v_map"].dims[0]) == (192, 192, 128)


def test_heads_are_packed_by_tokens() -> None:
    given = plan().values
    assert (given["group"], given["packed_log2"], given["head_packs"]) == (12, 2, 6)


def test_windows_that_hide_nothing_are_far_beyond_any_key() -> None:
    given = plan(replace(RAGGED, window_right=-1)).values
    assert given["window_left"] == given["window_right"] == 1 << 30
    given = plan(replace(RAGGED, window_left=7, window_right=5)).values
    assert (given["window_left"], given["window_right"]) == (7, 5)


@pytest.mark.parametrize(("natural", "factor"), [(False, 1.0), (True, math.log(2))])
def test_the_base_of_the_log_sum_exp_is_a_factor(natural: bool, factor: float) -> None:
    assert plan(replace(RAGGED, lse_natural=natural)).values["lse_scale"] == factor


def test_the_workspace_is_a_status_word_and_two_counters() -> None:
    assert {plan().inputs[name] for name in ("status", "counters")} == {"status", "counters"}


LONG = {"tokens": 8192, "q_len": 8192, "max_seq_len": 9000, "batch": 1, "k_scale_strides": (0, 0)}
LONG_E4M3 = replace(E4M3, **LONG, v_scale_strides=(0, 0), scale_tensors=frozenset({"k_scale"}))
FORMS = [
    LONG_E4M3,
    replace(LONG_E4M3, page_size=0, num_pages=0, kv_tokens=10000),
    replace(LONG_E4M3, page_size=0, num_pages=0, kv_tokens=10000, ragged=True),
]


def converted(problem: ContextProblem) -> tuple[LaunchPlan, LaunchPlan]:
    sizes = {"tokens": problem.tokens, "max_seq_len": problem.max_seq_len, "copied": copy_of_cache(problem)}
    shape = ContextShape("bf16", "e4m3", 128, 12, 2, problem.batch, **sizes)
    path = ArtifactPath("hopper-0.1.0/prefill/kernel.cubin")
    selections = select_context_launches(KERNELS, shape, H100)
    launches = context_launches(selections, shape, problem, lambda k: KernelFile(path, DIGEST, LAYOUTS[k.struct]))
    first, second = launches
    regions = {region.name: region.nbytes for region in first.regions}
    requests, tokens = copy_of_cache(problem)
    assert regions == {"status": 4, **dict.fromkeys(("converted_k", "converted_v"), requests * tokens * 2 * 128 * 2)}
    return first.plan, second.plan


@pytest.mark.parametrize("problem", FORMS)
def test_a_converted_cache_is_read_in_the_order_in_which_it_is_written(problem: ContextProblem) -> None:
    requests, tokens = copy_of_cache(problem)
    assert tokens == (9000 if problem.num_pages else 10000)
    first, second = converted(problem)
    assert len(first.layout.pack(first.values)) == first.layout.size
    assert (first.values["tokens"], first.grid) == (tokens, (4, -(-tokens // 128), requests))
    assert (first.values["k_page_stride"], first.values["v_token_stride"]) == (16 * 512, 512)
    for name in ("k", "v"):
        spec = second.values[f"{name}_map"]
        check_tensor_map(spec._replace(address=0x7F0000100000))
        assert (spec.dims, spec.dtype) == ((128, tokens, 2, requests), "bfloat16")
        assert spec.strides == (256, tokens * 256, tokens * 512)
        assert second.inputs[f"{name}_map"] == f"converted_{name}"
    assert second.inputs["softmax_scale_device"] == "k_scale"
    assert second.inputs["output_scale_device"] == "output_scale_device"
    assert second.attributes.programmatic_serialization
    assert "page_table" not in second.inputs
    assert second.values["page_table"] == 0
    assert (second.values["kv_tokens"], second.values["page_size_log2"]) == (tokens, 30)


def test_all_ragged_tokens_are_converted_and_of_others_those_of_the_lengths() -> None:
    paged, even, ragged = [converted(problem)[0] for problem in FORMS]
    assert paged.inputs["seq_lens"] == even.inputs["seq_lens"] == "seq_lens"
    assert paged.inputs["max_seq_len"] == "max_seq_len"
    assert not {"seq_lens", "q_cu_seq_lens", "max_seq_len"} & ragged.inputs.keys()
    assert (ragged.values["seq_lens"], ragged.values["max_seq_len"]) == (0, 10000)


def split(problem: ContextProblem = PAGED, **more: object) -> list[NativeLaunch[Any]]:
    """The launches of a problem whose keys are split."""
    problem = replace(problem, **{"batch": 1, "tokens": 16, "q_len": 16, "max_seq_len": 1 << 14, **more})
    sizes = {"tokens": problem.tokens, "q_len": problem.q_len, "max_seq_len": problem.max_seq_len}
    shape = ContextShape("bf16", problem.kv_dtype, 128, 12, 2, 1, **sizes)

    def file_of(kernel: NativeKernel) -> KernelFile:
        return KernelFile(ArtifactPath("hopper-0.1.0/prefill/kernel.cubin"), DIGEST, LAYOUTS[kernel.struct])

    return context_launches(select_context_launches(KERNELS, shape, H100), shape, problem, file_of)


def test_split_keys_give_parts_that_the_second_launch_merges() -> None:
    attention, merge = split(out_strides=(5000, 200), lse_strides=(40, 2))
    splits = attention.selection.splits
    assert splits > 1
    regions = {region.name: region.nbytes for region in attention.regions}
    assert regions["counters"] >= 8 * splits
    assert regions["parts"] >= 4 * splits * 16 * 24 * 128
    assert regions["part_lses"] >= 4 * splits * 16 * 24
    assert regions == {region.name: region.nbytes for region in split(tokens=1, q_len=1)[0].regions}
    inputs, values = attention.plan.inputs, attention.plan.values
    assert (inputs["out"], inputs["lse"]) == ("parts", "part_lses")
    assert "sinks" not in inputs
    assert (values["out_token_stride"], values["out_head_stride"]) == (splits * 24 * 128, 128)
    assert (values["lse_token_stride"], values["lse_head_stride"]) == (splits * 24, 1)
    inputs, values = merge.plan.inputs, merge.plan.values
    assert inputs == {name: name for name in ("parts", "part_lses", "out", "lse", "sinks", "q_cu_seq_lens")}
    assert (values["out_token_stride"], values["out_head_stride"]) == (5000, 200)
    assert (values["lse_token_stride"], values["lse_head_stride"], values["splits"]) == (40, 2, splits)
    assert (values["batch"], values["tokens"], values["heads"], values["columns"]) == (1, 16, 24, 128)
    assert merge.plan.grid == (-(-16 * 24 * merge.selection.warps // 8), 1, 1)
    assert merge.plan.attributes.programmatic_serialization


@pytest.mark.parametrize(("natural", "factor"), [(False, 1.0), (True, math.log(2))])
def test_parts_are_in_base_2_and_merged_to_the_base_that_is_asked_for(natural: bool, factor: float) -> None:
    attention, merge = split(lse_natural=natural)
    assert (attention.plan.values["lse_scale"], merge.plan.values["lse_scale"]) == (1.0, factor)
