from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.kernels.trtllm_gen.errors import PlanRefused
from cubin_runtime.kernels.trtllm_gen.grid import Geometry
from cubin_runtime.kernels.trtllm_gen.problem import Bindings
from cubin_runtime.kernels.trtllm_gen.reduction import lse_after, reduction_after
from cubin_runtime.kernels.trtllm_gen.traits import MultiCtasMode, SparseType
from tests.kernels.trtllm_examples import MLA, PROBLEM, ROW

KEEPS = replace(ROW, tile_q=64, head_dim_per_cta_v=256, two_cta_mma=True, multi_ctas_kv_mode=2)
WIDE = replace(MLA, heads_q=128, max_q=4)
GEOMETRY = Geometry((144, 1, 1), 2, 4, 18, 64, None)
WITH_LSE = Bindings(query=1, key=2, value=3, out=4, lse=0x70, softmax_stats=0x80)


@pytest.mark.parametrize("mode", [MultiCtasMode.DISABLED, MultiCtasMode.GMEM, MultiCtasMode.CGA])
def test_kernels_that_merge_by_themselves_are_followed_by_no_reduction(mode: MultiCtasMode) -> None:
    assert reduction_after(WIDE, replace(KEEPS, multi_ctas_kv_mode=mode), GEOMETRY, 1, WIDE.bindings) is None


def test_a_reduction_slices_each_tile_by_eight_kibibytes() -> None:
    launch = reduction_after(WIDE, KEEPS, GEOMETRY, 1, WIDE.bindings)
    assert (launch.grid, launch.block) == ((32, 2, 1), (512, 1, 1))
    assert [launch.values[name] for name in ("ctas_per_tile", "value_ctas", "head_dim")] == [8, 1, 512]


def test_a_reduction_fills_the_gpu_twice_at_most() -> None:
    launch = reduction_after(replace(WIDE, batch=12), KEEPS, GEOMETRY, 1, WIDE.bindings)
    assert (launch.values["ctas_per_tile"], launch.grid) == (3, (12, 2, 12))


def test_a_reduction_has_one_cta_a_tile_at_least() -> None:
    assert reduction_after(replace(WIDE, batch=1000), KEEPS, GEOMETRY, 1, WIDE.bindings).values["ctas_per_tile"] == 1


@pytest.mark.parametrize(("out", "partial"), [("fp16", "fp16"), ("e4m3", "fp16"), ("bf16", "bf16")])
def test_partial_results_are_two_bytes_wide(out: str, partial: str) -> None:
    assert reduction_after(replace(WIDE, dtype_q="e4m3", dtype_o=out), KEEPS, GEOMETRY, 1, WIDE.bindings).traits == {
        "dtype_partial": partial,
        "dtype_out": out,
    }


@pytest.mark.parametrize(("query", "out"), [("bf16", "fp16"), ("e4m3", "e2m1"), ("fp16", "e4m3")])
def test_types_without_a_reduction_are_refused(query: str, out: str) -> None:
    with pytest.raises(PlanRefused, match=f"no kernel from {query} to {out}"):
        reduction_after(replace(WIDE, dtype_q=query, dtype_o=out), KEEPS, GEOMETRY, 1, WIDE.bindings)


def test_a_reduction_knows_sparse_kv() -> None:
    bindings = WIDE.bindings._replace(top_k_lens=0x90)
    launch = reduction_after(replace(WIDE, sparse=SparseType.DYNAMIC, top_k=64), KEEPS, GEOMETRY, 1, bindings)
    assert (launch.values["top_k"], launch.values["top_k_lens"]) == (64, 0x90)


def test_a_reduction_takes_each_binding_in_its_own_field() -> None:
    bindings = Bindings(*range(0x1000, 0x1000 + len(Bindings._fields)))
    problem = replace(WIDE, sparse=SparseType.STATIC, top_k=64)
    assert reduction_after(problem, KEEPS, GEOMETRY, 7, bindings).values == {
        "out": bindings.out,
        "partial_out": bindings.partial_out,
        "partial_statistics": bindings.scratch,
        "softmax_statistics": bindings.softmax_stats,
        "seq_lens": bindings.seq_lens,
        "cum_seq_lens_q": bindings.cum_seq_lens_q,
        "top_k_lens": bindings.top_k_lens,
        "sinks": bindings.sinks,
        "device_softmax_scale_log2": bindings.device_softmax_scale_log2,
        "max_q": 4,
        "ctas_q": 4,
        "ctas_kv": 18,
        "ctas_per_tile": 8,
        "value_ctas": 1,
        "heads_q": 128,
        "heads_per_cta": 64,
        "tokens_per_cta": 7,
        "tile_q": 64,
        "tile_kv": 128,
        "head_dim": 512,
        "head_dim_v": 512,
        "top_k": 64,
        "softmax_scale_log2": bindings.softmax_scale_log2,
        "sum_scale": 1.0,
    }


@pytest.mark.parametrize(("query", "scale"), [("bf16", 1.0), ("e4m3", 448.0)])
def test_sums_of_e4m3_queries_carry_the_largest_e4m3_number(query: str, scale: float) -> None:
    launch = reduction_after(replace(WIDE, dtype_q=query), KEEPS, GEOMETRY, 1, WIDE.bindings)
    assert launch.values["sum_scale"] == scale


@pytest.mark.parametrize("pdl", [True, False])
def test_what_follows_is_launched_dependently_like_the_main_kernel(pdl: bool) -> None:
    problem = replace(WIDE, pdl=pdl, bindings=WITH_LSE)
    assert reduction_after(problem, KEEPS, GEOMETRY, 1, WITH_LSE).pdl is pdl
    assert lse_after(problem, WITH_LSE).pdl is pdl


def test_an_lse_has_the_strides_of_the_call() -> None:
    problem = replace(WIDE, bindings=WITH_LSE, strides=replace(WIDE.strides, lse=(5, 6)), tokens_q=3)
    assert lse_after(problem, WITH_LSE).values == {
        "statistics": 0x80,
        "lse": 0x70,
        "token_stride": 5,
        "head_stride": 6,
        "rows": 3 * 128,
        "heads_q": 128,
    }


def test_without_an_lse_nothing_follows() -> None:
    assert lse_after(PROBLEM, PROBLEM.bindings) is None


@pytest.mark.parametrize(
    ("tokens", "heads", "grid", "threads"), [(1, 1, 1, 1), (17, 8, 1, 256), (16, 64, 1, 1024), (33, 32, 2, 1024)]
)
def test_an_lse_takes_a_thread_a_row(tokens: int, heads: int, grid: int, threads: int) -> None:
    launch = lse_after(replace(PROBLEM, tokens_q=tokens, heads_q=heads, heads_kv=1, bindings=WITH_LSE), WITH_LSE)
    assert (launch.grid, launch.block, launch.values["rows"]) == ((grid, 1, 1), (threads, 1, 1), tokens * heads)
    assert (launch.values["statistics"], launch.values["lse"]) == (0x80, 0x70)
