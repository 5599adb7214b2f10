from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.trtllm_gen.arguments import Common, Device, OutScales, PagedKv, Sage, Scale, TensorInfo
from cubin_runtime.kernels.trtllm_gen.entries import context, decode, decode_dsv4, ragged
from cubin_runtime.kernels.trtllm_gen.problem import Problem
from cubin_runtime.kernels.trtllm_gen.refusals import ARGUMENT, CHECK, ArgumentRefused, PlanRefused, WorkspaceRefused
from cubin_runtime.kernels.trtllm_gen.traits import INT32_MAX, KernelType, MaskType, SparseType, TileScheduler
from cubin_runtime.kernels.trtllm_gen.workspace_layout import COUNTER_BYTES


def tensor(pointer: int, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(pointer, dtype, shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))))


QUERY = tensor(0x100, "bfloat16", 6, 32, 128)
KEY = tensor(0x1000, "bfloat16", 50, 8, 32, 128)
VALUE = tensor(0x2000, "bfloat16", 50, 8, 32, 128)
LENGTHS = tensor(0x300, "int32", 2)
CUMULATED = tensor(0x400, "int32", 3)
LSE = tensor(0x500, "float32", 6, 32)
COMMON = Common(
    device=Device(100, 148),
    query=QUERY,
    out=tensor(0x200, "bfloat16", 6, 32, 128),
    seq_lens=LENGTHS,
    workspace=(0x10000, 128 << 20),
    batch=2,
    max_q=3,
)
KV = PagedKv(key=KEY, value=VALUE, table=tensor(0x600, "int32", 2, 25), max_kv=800)
MLA_POOL = tensor(0x1000, "bfloat16", 50, 1, 64, 576)
MLA_COMMON = replace(COMMON, query=tensor(0x100, "bfloat16", 6, 16, 576), out=tensor(0x200, "bfloat16", 2, 3, 16, 512))
MLA_KV = replace(KV, key=MLA_POOL, value=MLA_POOL)
POOL = tensor(0x1000, "float8_e4m3fn", 50, 1, 64, 512)
DSV4_COMMON = replace(
    COMMON, query=tensor(0x100, "float8_e4m3fn", 6, 16, 512), out=tensor(0x200, "bfloat16", 6, 16, 512)
)
INDICES = tensor(0x700, "int32", 6, 128)
RAGGED_KEY = tensor(0x1000, "bfloat16", 900, 8, 128)


def run_ragged(common: Common = COMMON, **changes) -> Problem:
    return ragged(common, RAGGED_KEY, RAGGED_KEY, CUMULATED, 800, **changes)


def run_dsv4() -> Problem:
    return decode_dsv4(DSV4_COMMON, POOL, replace(POOL, pointer=0x9000), INDICES, tensor(0x800, "int32", 6))


def test_decoding_is_causal_and_split() -> None:
    problem = decode(COMMON, KV)
    assert (problem.mask, problem.kernel_type) == (MaskType.CAUSAL, KernelType.GENERATION)
    assert (problem.scheduler, problem.multi_ctas) == (TileScheduler.STATIC, True)


def test_decoding_without_splits_is_persistent() -> None:
    problem = decode(replace(COMMON, multi_ctas_enabled=False), KV)
    assert (problem.scheduler, problem.multi_ctas) == (TileScheduler.PERSISTENT, False)


def test_mla_is_dense() -> None:
    assert decode(MLA_COMMON, MLA_KV).mask == MaskType.DENSE


@pytest.mark.parametrize(("causal", "mask"), [(True, MaskType.CAUSAL), (False, MaskType.DENSE)])
def test_context_is_persistent_and_masked_as_asked(causal: bool, mask: MaskType) -> None:
    problem = context(COMMON, KV, CUMULATED, causal=causal)
    assert (problem.mask, problem.kernel_type, problem.multi_ctas) == (mask, KernelType.CONTEXT, False)
    assert problem.scheduler == TileScheduler.PERSISTENT


def test_strides_of_the_keys_serve_the_values() -> None:
    problem = decode(COMMON, replace(KV, value=replace(VALUE, strides=(1, 2, 3, 4))))
    assert problem.strides.key == problem.strides.value == (128, 4096, 32768)


def test_packed_fp4_counts_two_numbers_a_byte() -> None:
    packed = tensor(0x1000, "uint8", 50, 8, 32, 64)
    scales = tensor(0x3000, "float8_e4m3fn", 50, 8, 32, 8)
    kv = replace(KV, key=packed, value=packed, key_scales=scales, value_scales=scales)
    problem = decode(COMMON, kv)
    assert (problem.strides.key, problem.dtype_k) == ((128, 4096, 32768), "e2m1")
    assert problem.strides.key_scales == (256, 2048)


def test_a_packed_output_has_twice_the_head_dimension() -> None:
    assert decode(replace(COMMON, out=tensor(0x200, "uint8", 6, 32, 64)), KV).head_dim_v == 128


@pytest.mark.parametrize(("value", "pages"), [(0x1000, 50), (0x2000, 100), (0x1800, 100)])
def test_the_pool_counts_twice_where_values_lie_elsewhere(value: int, pages: int) -> None:
    assert decode(COMMON, replace(KV, value=replace(VALUE, pointer=value))).pages == pages


@pytest.mark.parametrize(("left", "window"), [(-1, INT32_MAX), (0, 1), (127, 128), (INT32_MAX, -(2**31))])
def test_a_window_counts_the_token_itself(left: int, window: int) -> None:
    assert decode(replace(COMMON, window_left=left), KV).window == window


def test_scales_are_rounded_to_float32() -> None:
    problem = decode(replace(COMMON, bmm1=Scale(0.125), bmm2=Scale(0.1)), KV)
    assert (problem.softmax_scale_log2, problem.output_scale) == (0.18033687770366669, 0.10000000149011612)


def test_scales_on_the_device_leave_one_on_the_host() -> None:
    problem = decode(replace(COMMON, bmm1=Scale(7.0, 0x40), bmm2=Scale(7.0, 0x50)), KV)
    assert (problem.softmax_scale_log2, problem.output_scale) == (1.4426950216293335, 1.0)
    assert (problem.pointers.softmax_scale_log2, problem.pointers.output_scale) == (0x40, 0x50)


def test_a_scale_beyond_float32_is_infinite() -> None:
    assert decode(replace(COMMON, bmm2=Scale(1e300)), KV).output_scale == inf


@pytest.mark.parametrize(("factor", "skips"), [(0.0, False), (1e-60, False), (1000.0, True)])
def test_softmax_is_skipped_for_a_factor_that_float32_can_tell_from_zero(factor: float, skips: bool) -> None:
    assert decode(replace(COMMON, skip_softmax_factor=factor), KV).skips_softmax is skips


def test_strides_are_narrowed_like_in_c() -> None:
    assert decode(COMMON, replace(KV, key=replace(KEY, strides=(2**31 + 5, 1, 1, 1)))).strides.key[2] == -(2**31) + 5


def test_sparse_decoding_is_static_without_lengths_and_dynamic_with() -> None:
    static = decode(MLA_COMMON, MLA_KV, top_k=128)
    dynamic = decode(MLA_COMMON, MLA_KV, top_k=128, top_k_lens=LENGTHS)
    assert (static.sparse, dynamic.sparse) == (SparseType.STATIC, SparseType.DYNAMIC)


def test_sparse_decoding_needs_mla() -> None:
    with pytest.raises(ArgumentRefused, match="sparse KV needs MLA"):
        decode(COMMON, KV, top_k=128)


@pytest.mark.parametrize("top_k", [1, 127, 130])
def test_sparse_tokens_come_in_fours(top_k: int) -> None:
    with pytest.raises(ArgumentRefused, match=f"top_k={top_k}"):
        decode(MLA_COMMON, MLA_KV, top_k=top_k)


@pytest.mark.parametrize("block", [0, 8, 32])
def test_output_scales_are_shared_by_sixteen(block: int) -> None:
    with pytest.raises(ArgumentRefused, match=f"o_sf_vec_size={block}") as caught:
        decode(COMMON, KV, OutScales(block=block))
    assert caught.value.kind == ARGUMENT


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanRefused, match="32 query heads over 7 KV heads") as caught:
        decode(COMMON, replace(KV, key=tensor(0x1000, "bfloat16", 50, 7, 32, 128)))
    assert caught.value.kind == CHECK


def test_paged_context_refuses_a_dense_window() -> None:
    with pytest.raises(ArgumentRefused, match="window_left=127"):
        context(replace(COMMON, window_left=127), KV, CUMULATED, causal=False)


def test_a_small_workspace_is_refused() -> None:
    with pytest.raises(WorkspaceRefused):
        decode(replace(COMMON, workspace=(0x10000, COUNTER_BYTES - 1)), KV)


def test_context_takes_no_workspace() -> None:
    assert context(replace(COMMON, workspace=(0, 0)), KV, CUMULATED).pointers.scratch == 0


def test_ragged_context_takes_one() -> None:
    with pytest.raises(WorkspaceRefused):
        run_ragged(replace(COMMON, workspace=(0x10000, 1)))


def test_ragged_queries_are_taken_as_contiguous() -> None:
    assert run_ragged().strides.query == (0, 0)


def test_ragged_keys_have_no_pages() -> None:
    problem = run_ragged()
    assert (problem.page, problem.pages, problem.table_width, problem.tokens_kv) == (0, 0, 0, 900)
    assert problem.strides.key == (1024, 128, 900 * 1024)
    assert problem.scale_kv_scales == 0.0


def test_an_lse_of_ragged_context_has_the_strides_of_its_tensor() -> None:
    assert run_ragged(replace(COMMON, lse=LSE, lse_strides=(7, 7))).strides.lse == (32, 1)


def test_an_lse_of_paged_attention_has_the_strides_that_are_given() -> None:
    assert decode(replace(COMMON, lse=LSE, lse_strides=(7, 8)), KV).strides.lse == (7, 8)


def test_sage_scales_come_along() -> None:
    problem = run_ragged(sage=Sage((LENGTHS, CUMULATED, None, LSE), (1, 4, 0, 16)))
    at = problem.pointers
    assert (at.sage_q, at.sage_k, at.sage_p, at.sage_v) == (0x300, 0x400, 0, 0x500)
    assert problem.sage_blocks == (1, 4, 0, 16)


def test_dsv4_visits_single_tokens_of_two_pools() -> None:
    problem = run_dsv4()
    assert (problem.page, problem.pages, problem.max_kv, problem.top_k, problem.table_width) == (1, 3200, 128, 128, 128)
    assert (problem.window, problem.sparse, problem.pointers.window_pool) == (128, SparseType.DYNAMIC, 0x9000)
    assert problem.strides.key == (512, 32768, 512)


@pytest.mark.parametrize(
    ("common", "kv", "named"),
    [
        (replace(COMMON, query=tensor(1, "float64", 6, 32, 128)), KV, "float64"),
        (replace(COMMON, query=tensor(1, "bfloat16", 6, 128)), KV, "query of shape"),
        (replace(COMMON, batch=0), KV, "batch=0"),
        (replace(COMMON, max_q=-1), KV, "max_q_len=-1"),
        (COMMON, replace(KV, max_kv=0), "max_kv_len=0"),
        (COMMON, replace(KV, key=tensor(1, "bfloat16", 8, 32, 128)), "key_cache of shape"),
        (COMMON, replace(KV, table=tensor(1, "int32", 2)), "block_tables of shape"),
        (replace(COMMON, device=Device(100, 0)), KV, "multiprocessors=0"),
    ],
)
def test_what_no_call_has_is_named(common: Common, kv: PagedKv, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        decode(common, kv)
