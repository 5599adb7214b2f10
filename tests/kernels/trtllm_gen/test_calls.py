from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from cubin_runtime.attention import TensorView
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.trtllm_gen.arguments import Device, OutScales, Sage, Scale
from cubin_runtime.kernels.trtllm_gen.arithmetic import INT32_MAX
from cubin_runtime.kernels.trtllm_gen.call import Call
from cubin_runtime.kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall, TwoPoolCall
from cubin_runtime.kernels.trtllm_gen.errors import ARGUMENT, CHECK, ArgumentRefused, PlanRefused, WorkspaceRefused
from cubin_runtime.kernels.trtllm_gen.problem import Problem
from cubin_runtime.kernels.trtllm_gen.traits import KernelType, MaskType, SparseType, TileScheduler
from cubin_runtime.kernels.trtllm_gen.workspace_layout import COUNTER_BYTES


def tensor(pointer: int, dtype: str, *shape: int) -> TensorView:
    return TensorView.contiguous(pointer, dtype, shape)


DEVICE = Device(100, 148)
WORKSPACE = (0x10000, 128 << 20)
KEY = tensor(0x1000, "bfloat16", 50, 8, 32, 128)
VALUE = tensor(0x2000, "bfloat16", 50, 8, 32, 128)
LENGTHS = tensor(0x300, "int32", 2)
CUMULATED = tensor(0x400, "int32", 3)
LSE = tensor(0x500, "float32", 6, 32)
OF_ALL = {
    "query": tensor(0x100, "bfloat16", 6, 32, 128),
    "out": tensor(0x200, "bfloat16", 6, 32, 128),
    "seq_lens": LENGTHS,
    "max_q": 3,
    "max_kv": 800,
}
PAGED = {**OF_ALL, "key": KEY, "value": VALUE, "block_tables": tensor(0x600, "int32", 2, 25)}
DECODE = DecodeCall(**PAGED)
CONTEXT = ContextCall(**PAGED, cum_seq_lens_kv=CUMULATED)
MLA_POOL = tensor(0x1000, "bfloat16", 50, 1, 64, 576)
MLA = replace(
    DECODE,
    query=tensor(0x100, "bfloat16", 6, 16, 576),
    out=tensor(0x200, "bfloat16", 2, 3, 16, 512),
    key=MLA_POOL,
    value=MLA_POOL,
)
RAGGED_KEY = tensor(0x1000, "bfloat16", 900, 8, 128)
RAGGED = RaggedCall(**OF_ALL, key=RAGGED_KEY, value=RAGGED_KEY, cum_seq_lens_kv=CUMULATED)
POOL = tensor(0x1000, "float8_e4m3fn", 50, 1, 64, 512)
TWO_POOLS = TwoPoolCall(
    query=tensor(0x100, "float8_e4m3fn", 6, 16, 512),
    out=tensor(0x200, "bfloat16", 6, 16, 512),
    seq_lens=LENGTHS,
    max_q=3,
    max_kv=128,
    pool=POOL,
    window_pool=replace(POOL, pointer=0x9000),
    indices=tensor(0x700, "int32", 6, 128),
    top_k_lens=tensor(0x800, "int32", 6),
)


def problem_of(call: Call, device: Device = DEVICE, workspace: tuple[int, int] = WORKSPACE, **changes) -> Problem:
    return replace(call, **changes).problem(device, workspace)


def test_decoding_is_causal_and_split() -> None:
    problem = problem_of(DECODE)
    assert (problem.mask, problem.kernel_type) == (MaskType.CAUSAL, KernelType.GENERATION)
    assert (problem.scheduler, problem.multi_ctas) == (TileScheduler.STATIC, True)


def test_decoding_without_splits_is_persistent() -> None:
    problem = problem_of(DECODE, batch_invariant=True)
    assert (problem.scheduler, problem.multi_ctas) == (TileScheduler.PERSISTENT, False)


def test_mla_is_dense() -> None:
    assert problem_of(MLA).mask == MaskType.DENSE


@pytest.mark.parametrize(("causal", "mask"), [(True, MaskType.CAUSAL), (False, MaskType.DENSE)])
def test_context_is_persistent_and_masked_as_asked(causal: bool, mask: MaskType) -> None:
    problem = problem_of(CONTEXT, causal=causal)
    assert (problem.mask, problem.kernel_type, problem.multi_ctas) == (mask, KernelType.CONTEXT, False)
    assert problem.scheduler == TileScheduler.PERSISTENT


def test_strides_of_the_keys_serve_the_values() -> None:
    problem = problem_of(DECODE, value=replace(VALUE, strides=(1, 2, 3, 4)))
    assert problem.strides.key == problem.strides.value == (128, 4096, 32768)


def test_packed_fp4_counts_two_numbers_a_byte() -> None:
    packed = tensor(0x1000, "uint8", 50, 8, 32, 64)
    scales = tensor(0x3000, "float8_e4m3fn", 50, 8, 32, 8)
    problem = problem_of(DECODE, key=packed, value=packed, key_scales=scales, value_scales=scales)
    assert (problem.strides.key, problem.dtype_k) == ((128, 4096, 32768), "e2m1")
    assert problem.strides.key_scales == (256, 2048)


def test_a_packed_output_has_twice_the_head_dimension() -> None:
    assert problem_of(DECODE, out=tensor(0x200, "uint8", 6, 32, 64)).head_dim_v == 128


@pytest.mark.parametrize(("value", "pages"), [(0x1000, 50), (0x2000, 100), (0x1800, 100)])
def test_the_pool_counts_twice_where_values_lie_elsewhere(value: int, pages: int) -> None:
    assert problem_of(DECODE, value=replace(VALUE, pointer=value)).pages == pages


@pytest.mark.parametrize(("left", "window"), [(-1, INT32_MAX), (0, 1), (127, 128), (INT32_MAX, -(2**31))])
def test_a_window_counts_the_token_itself(left: int, window: int) -> None:
    assert problem_of(DECODE, window_left=left).window == window


def test_scales_are_rounded_to_float32() -> None:
    bound = problem_of(DECODE, bmm1=Scale(0.125), bmm2=Scale(0.1)).bindings
    assert (bound.softmax_scale_log2, bound.output_scale) == (0.18033687770366669, 0.10000000149011612)


def test_scales_on_the_device_leave_one_on_the_host() -> None:
    bound = problem_of(DECODE, bmm1=Scale(7.0, 0x40), bmm2=Scale(7.0, 0x50)).bindings
    assert (bound.softmax_scale_log2, bound.output_scale) == (1.4426950216293335, 1.0)
    assert (bound.device_softmax_scale_log2, bound.device_output_scale) == (0x40, 0x50)


def test_a_scale_beyond_float32_is_infinite() -> None:
    assert problem_of(DECODE, bmm2=Scale(1e300)).bindings.output_scale == inf


@pytest.mark.parametrize(("factor", "skips"), [(0.0, False), (1e-60, False), (1000.0, True)])
def test_softmax_is_skipped_for_a_factor_that_float32_can_tell_from_zero(factor: float, skips: bool) -> None:
    assert problem_of(DECODE, skip_softmax_factor=factor).skips_softmax is skips


def test_strides_are_narrowed_like_in_c() -> None:
    assert problem_of(DECODE, key=replace(KEY, strides=(2**31 + 5, 1, 1, 1))).strides.key[2] == -(2**31) + 5


def test_sparse_decoding_is_static_without_lengths_and_dynamic_with() -> None:
    static = problem_of(MLA, top_k=128)
    dynamic = problem_of(MLA, top_k=128, top_k_lens=LENGTHS)
    assert (static.sparse, dynamic.sparse) == (SparseType.STATIC, SparseType.DYNAMIC)
    assert (static.bindings.top_k_lens, dynamic.bindings.top_k_lens) == (0, LENGTHS.pointer)


def test_sparse_decoding_needs_mla() -> None:
    with pytest.raises(ArgumentRefused, match="sparse KV needs MLA"):
        problem_of(DECODE, top_k=128)


@pytest.mark.parametrize("top_k", [1, 127, 130])
def test_sparse_tokens_come_in_fours(top_k: int) -> None:
    with pytest.raises(ArgumentRefused, match=f"top_k={top_k}"):
        problem_of(MLA, top_k=top_k)


@pytest.mark.parametrize("block", [0, 8, 32])
def test_output_scales_are_shared_by_sixteen(block: int) -> None:
    with pytest.raises(ArgumentRefused, match=f"o_sf_vec_size={block}") as caught:
        problem_of(DECODE, out_scales=OutScales(block=block))
    assert caught.value.kind == ARGUMENT


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanRefused, match="32 query heads over 7 KV heads") as caught:
        problem_of(DECODE, key=tensor(0x1000, "bfloat16", 50, 7, 32, 128))
    assert caught.value.kind == CHECK


def test_paged_context_refuses_a_dense_window() -> None:
    with pytest.raises(ArgumentRefused, match="window_left=127"):
        problem_of(CONTEXT, window_left=127, causal=False)


def test_a_small_workspace_is_refused() -> None:
    with pytest.raises(WorkspaceRefused):
        problem_of(DECODE, workspace=(0x10000, COUNTER_BYTES - 1))


def test_context_takes_no_workspace() -> None:
    assert problem_of(CONTEXT, workspace=(0, 0)).bindings.scratch == problem_of(CONTEXT).bindings.scratch == 0


def test_ragged_context_takes_one() -> None:
    with pytest.raises(WorkspaceRefused):
        problem_of(RAGGED, workspace=(0x10000, 1))


def test_ragged_queries_are_taken_as_contiguous() -> None:
    assert problem_of(RAGGED).strides.query == (0, 0)


def test_ragged_keys_have_no_pages() -> None:
    problem = problem_of(RAGGED)
    assert (problem.page, problem.pages, problem.table_width, problem.tokens_kv) == (0, 0, 0, 900)
    assert problem.strides.key == (1024, 128, 900 * 1024)
    assert problem.scale_kv_scales == 0.0


def test_an_lse_of_ragged_context_has_the_strides_of_its_tensor() -> None:
    assert problem_of(RAGGED, lse=LSE).strides.lse == (32, 1)


def test_an_lse_of_paged_attention_has_the_strides_that_are_given() -> None:
    assert problem_of(DECODE, lse=replace(LSE, strides=(7, 8))).strides.lse == (7, 8)


def test_sage_scales_come_along() -> None:
    problem = problem_of(RAGGED, sage=Sage((LENGTHS, CUMULATED, OF_ALL["out"], LSE), (1, 4, 8, 16)))
    at = problem.bindings
    assert (at.sage_q, at.sage_k, at.sage_p, at.sage_v) == (0x300, 0x400, 0x200, 0x500)
    assert problem.sage_blocks == (1, 4, 8, 16)


def test_sparse_decoding_of_two_pools_visits_single_tokens_of_two_pools() -> None:
    problem = problem_of(TWO_POOLS)
    assert (problem.page, problem.pages, problem.max_kv, problem.top_k, problem.table_width) == (1, 3200, 128, 128, 128)
    assert (problem.window, problem.sparse, problem.bindings.window_pool) == (128, SparseType.DYNAMIC, 0x9000)
    assert problem.strides.key == (512, 32768, 512)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query": tensor(1, "float64", 6, 32, 128)}, "float64"),
        ({"query": tensor(1, "bfloat16", 6, 128)}, "query of shape"),
        ({"seq_lens": tensor(1, "int32", 0)}, "batch=0"),
        ({"max_q": -1}, "max_q_len=-1"),
        ({"max_kv": 0}, "max_kv_len=0"),
        ({"key": tensor(1, "bfloat16", 8, 32, 128)}, "key_cache of shape"),
        ({"block_tables": tensor(1, "int32", 2)}, "block_tables of shape"),
        ({"device": Device(100, 0)}, "multiprocessors=0"),
    ],
)
def test_what_no_call_has_is_named(changes, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        problem_of(DECODE, **changes)
