"""Every rule of the XQA operators, broken one at a time: an error that names the argument, and no launch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cubin_runtime.attention import BackendError, Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory, made, tensor
from tests.attention.xqa_calls import trtllm_arguments, xqa_arguments, xqa_batch_arguments

pytestmark = pytest.mark.usefixtures("hopper")

FP8 = "float8_e4m3fn"
DRAFTS = {"q": tensor("bfloat16", 4, 1, 3, 64, 128), "output": tensor("bfloat16", 4, 1, 3, 64, 128), "q_seq_len": 3}
RAGGED = {
    "q": tensor("bfloat16", 7, 64, 128),
    "output": tensor("bfloat16", 7, 64, 128),
    "q_seq_len": 4,
    "q_cu_seq_lens": tensor("int32", 5),
}

RANKS = {"cp_world": 2, "causal_seqlens_kv_global": tensor("int32", 4)}

XQA: list[tuple[dict[str, Any], str]] = [
    ({"q": tensor("bfloat16", 4, 2, 64, 128), "output": tensor("bfloat16", 4, 2, 64, 128)}, r"q: shape .*\[batch, 1,"),
    ({"q": tensor("bfloat16", 64, 128), "output": tensor("bfloat16", 64, 128)}, r"q: shape .*\[batch, 1, heads"),
    ({"q": tensor("float32", 4, 1, 64, 128)}, "q: dtype float32"),
    ({"q": tensor("float16", 4, 1, 64, 128)}, "q: dtype float16, expected bfloat16 with bfloat16 caches"),
    ({"q": tensor("bfloat16", 4, 1, 60, 128), "output": tensor("bfloat16", 4, 1, 60, 128)}, "q: 60 heads over 8"),
    ({**DRAFTS, "q_seq_len": 2}, r"q: shape .*expected \[batch, 1, 2, heads, head_dim\]"),
    ({"q_seq_len": "1"}, "q_seq_len='1': expected an integer"),
    ({"sliding_win_size": None}, "sliding_win_size=None: expected an integer"),
    ({"q_seq_len": 0}, "q_seq_len=0: expected 1 or more"),
    ({**RAGGED, "q_seq_len": 65}, "^q_seq_len=65: expected 1 to 64"),
    ({**RAGGED, "q": tensor("bfloat16", 7, 1, 64, 128)}, "output: shape"),
    ({**RAGGED, "q_cu_seq_lens": tensor("int64", 5)}, "q_cu_seq_lens: dtype int64"),
    ({**RAGGED, "q_cu_seq_lens": tensor("int32", 4)}, "q_cu_seq_lens: shape"),
    ({"output": tensor("bfloat16", 4, 64, 128)}, "output: shape"),
    ({"output": tensor("float32", 4, 1, 64, 128)}, "output: dtype float32"),
    ({"k_cache": tensor("int8", 100, 64, 8, 128)}, "k_cache: dtype int8, expected"),
    ({"k_cache": tensor("uint8", 100, 64, 8, 64)}, "k_cache: shape|k_cache: dtype uint8"),
    ({"k_cache": tensor("bfloat16", 100, 64, 128)}, "k_cache: shape .*4 dimensions"),
    ({"v_cache": tensor("bfloat16", 100, 64, 8, 64)}, "v_cache: shape"),
    ({"v_cache": tensor(FP8, 100, 64, 8, 128)}, "v_cache: dtype float8_e4m3fn"),
    ({"page_size": "64"}, "page_size='64': expected an integer"),
    ({"num_kv_heads": 4}, "num_kv_heads=4: k_cache has 8 in layout NHD"),
    ({"page_size": 32}, "page_size=32: k_cache has 64 in layout NHD"),
    ({"kv_layout": "HND"}, "num_kv_heads=8: k_cache has 64 in layout HND"),
    ({"kv_layout": "NDH"}, "kv_layout='NDH': expected NHD or HND"),
    ({"page_table": tensor("int64", 4, 16)}, "page_table: dtype int64"),
    ({"page_table": tensor("int32", 64)}, "page_table: shape"),
    ({"seq_lens": tensor("int64", 4)}, "seq_lens: dtype int64"),
    ({"seq_lens": tensor("uint32", 4, 2)}, r"seq_lens: shape .*expected \[batch\] or \[batch, 1\]"),
    ({"workspace_buffer": tensor("uint8", 4, 4, strides=(8, 1))}, "workspace_buffer: strides"),
    ({"workspace_buffer": tensor("uint8", 1 << 20, device=1)}, "workspace_buffer: on device 1"),
    ({"semaphores": tensor("uint32", 1 << 20, device=1)}, "semaphores: on device 1"),
    ({"semaphores": tensor("uint32", 0)}, "^semaphores: no bytes, expected memory"),
    ({"semaphores": tensor("uint32", 0, pointer=0)}, "^semaphores: no bytes, expected memory"),
    ({"sinks": tensor("float32", 8)}, "sinks: shape"),
    ({"sinks": tensor("float16", 64)}, "sinks: dtype float16"),
    ({"mask": tensor("uint16", 4, 3, 2)}, "mask: shape"),
    ({**DRAFTS, "mask": tensor("int32", 4, 3, 1)}, "mask: dtype int32"),
    ({"q_scale": math.nan}, "q_scale=nan: expected a finite number"),
    ({"q_scale": tensor("float16", 1)}, "q_scale: float16 .*expected one float32"),
    ({"kv_scale": tensor("float32", 2)}, "kv_scale: float32 .*expected one float32"),
    ({"kv_scale": math.inf}, "kv_scale=inf: expected a finite number"),
    ({"kv_scale": "1"}, "kv_scale: got str"),
    ({"rcp_out_scale": 2.0}, "rcp_out_scale=2.0: output is bfloat16, expected 1.0"),
    ({"sliding_win_size": -1}, "sliding_win_size=-1: expected 0"),
    ({"sliding_win_size": (1 << 31) + 1}, "sliding_win_size=2147483649: expected 0 .* at most 2\\^31"),
    ({"q_scale": 1e300}, r"^q_scale=1e\+300: expected a finite number"),
    ({"q_scale": 1e30, "kv_scale": 1e30}, r"^q_scale \* kv_scale=.*: expected a finite number"),
    ({"output": tensor("bfloat16", 4, 1, 64, 128, strides=(0, 0, 0, 1))}, "^output: strides .*overlapping"),
    (
        {"workspace_buffer": tensor("uint8", 1 << 27, pointer=0x7F08)},
        "workspace_buffer: address 0x7f08, expected a mul",
    ),
    ({"sm_count": 16}, "sm_count=16: the device has"),
    ({"k_sf_cache": tensor(FP8, 100, 64, 8, 8)}, "k_sf_cache=a TensorView: xqa has no kernel"),
    ({"v_sf_cache": tensor(FP8, 100, 64, 8, 8)}, "v_sf_cache=a TensorView: xqa has no kernel"),
]
# What both operators with a flat batch refuse.
BATCH: list[tuple[dict[str, Any], str]] = [
    ({"query": tensor("bfloat16", 4, 1, 64, 128)}, "query: shape .*expected 3 dimensions"),
    ({"query": tensor("bfloat16", 5, 64, 128)}, "query: 5 tokens for 4 requests of 1"),
    ({"query": tensor("float16", 4, 64, 128)}, "query: dtype float16, expected bfloat16 with bfloat16 caches"),
    ({"query": tensor("bfloat16", 4, 60, 128)}, "query: 60 heads over"),
    ({"q_len_per_req": 0}, "query: 4 tokens for 4 requests of 0"),
    ({"query": tensor("bfloat16", 260, 64, 128), "q_len_per_req": 65}, "query: 65 tokens per request, expected 1 to"),
    ({"kv_cache": tensor("bfloat16", 100, 3, 64, 8, 128)}, r"kv_cache: shape .*\[pages, 2, ...\]"),
    ({"kv_cache": tensor("int8", 100, 2, 32, 32, 128)}, r"kv_cache \(K\): dtype int8"),
    ({"kv_cache": tensor("uint8", 100, 2, 32, 32, 64)}, r"kv_cache \(K\): "),
    ({"kv_layout": "NDH"}, "kv_layout='NDH'"),
    ({"block_tables": tensor("int64", 4, 16)}, "block_tables: dtype int64"),
    ({"block_tables": tensor("int32", 3, 16)}, "block_tables: shape"),
    ({"block_tables": tensor("int32")}, "block_tables: shape"),
    ({"seq_lens": tensor("int64", 4)}, "seq_lens: dtype int64"),
    ({"seq_lens": tensor("int32", 5)}, "query: 4 tokens for 5 requests"),
    ({"max_seq_len": "all"}, "max_seq_len='all': expected an integer"),
    ({"q_len_per_req": 1.5}, "1.5"),
    ({"max_seq_len": -1}, "max_seq_len=-1: expected 0"),
    ({"bmm1_scale": math.nan}, "bmm1_scale=nan: expected a finite number"),
    ({"bmm2_scale": math.inf}, "bmm2_scale=inf: expected a finite number"),
    ({"bmm1_scale": tensor("float16", 1)}, "bmm1_scale: float16 .*expected one float32"),
    ({"bmm2_scale": tensor("float32", 1, device=1)}, "bmm2_scale: on device 1"),
    ({"o_scale": math.nan}, "o_scale=nan: expected a finite number"),
    ({"window_left": -2}, "window_left=-2"),
    ({"bmm2_scale": 10**400}, "bmm2_scale=inf: expected a finite number"),
    (
        {"workspace_buffer": tensor("uint8", 1 << 27, pointer=0x7F08)},
        "workspace_buffer: address 0x7f08, expected a mul",
    ),
    ({"out": tensor("bfloat16", 4, 64, 64)}, "out: shape"),
    ({"out": tensor("float32", 4, 64, 128)}, "out: dtype float32"),
    ({"out": flashinfer.FP4Tensor(None, None)}, "out_dtype or out is nvfp4: backend xqa writes"),
    ({"sinks": tensor("float32", 16)}, "sinks: shape"),
    ({"mask": tensor("uint16", 4, 2, 2)}, "mask: shape"),
    ({"kv_cache_sf": tensor(FP8, 100, 2, 64, 8, 8)}, "kv_cache_sf=a TensorView: .*no kernel that honours it"),
    ({"workspace_buffer": tensor("uint8", 1 << 25, device=1)}, "workspace_buffer: on device 1"),
]
XQA_BATCH: list[tuple[dict[str, Any], str]] = [
    ({"q_len_per_req": None}, "q_len_per_req: None"),
    (
        {"query": tensor("bfloat16", 7, 64, 128), "q_cu_seq_lens": tensor("int32", 5), "q_len_per_req": 65},
        "^q_len_per_req=65: expected 1 to 64",
    ),
    ({"query": tensor("bfloat16", 7, 64, 128), "q_cu_seq_lens": tensor("int64", 5)}, "q_cu_seq_lens: dtype int64"),
]
TRTLLM: list[tuple[dict[str, Any], str]] = [
    ({"out_dtype": "nvfp4"}, "out_dtype or out is nvfp4: backend xqa writes"),
    ({"o_sf_scale": 1.0}, "o_sf_scale=1.0: .*by backend 'xqa' has no kernel"),
    ({"o_sf_vec_size": 16}, "o_sf_vec_size=16: .*by backend 'xqa' has no kernel"),
    (
        {"skip_softmax_threshold_scale_factor": -1.0},
        "skip_softmax_threshold_scale_factor=-1.0: expected None, 0 or more",
    ),
    ({"skip_softmax_threshold_scale_factor": math.nan}, "skip_softmax_threshold_scale_factor=nan"),
    ({"skip_softmax_threshold_scale_factor": "1"}, "skip_softmax_threshold_scale_factor='1'"),
    ({"uses_shared_paged_kv_idx": False}, r"block_tables: shape \(4, 16\), expected \[batch, 2, columns\] with uses_"),
    (
        {"block_tables": tensor("int32", 4, 2, 16)},
        r"block_tables: shape \(4, 2, 16\), expected \[batch, columns\] with",
    ),
    ({"bmm1_scale": 1.0, "bmm1_scale_log2": tensor("float16", 1)}, "bmm1_scale_log2: float16"),
    ({"cp_world": 2}, "cp_world=2, cp_rank=0: expected 1 and 0 without causal_seqlens_kv_global"),
    ({"cp_rank": 1}, "cp_world=1, cp_rank=1: expected 1 and 0 without causal_seqlens_kv_global"),
    ({**RANKS, "cp_world": 0}, "cp_world=0: expected 1 or more"),
    ({**RANKS, "cp_world": 2.5}, "cp_world=2.5: expected an integer"),
    ({**RANKS, "cp_rank": 2}, "cp_rank=2: expected 0 to 1, below cp_world"),
    ({**RANKS, "cp_rank": -1}, "cp_rank=-1: expected 0 to 1"),
    ({**RANKS, "cp_world": 1, "cp_rank": 1}, "cp_rank=1: expected 0 to 0"),
    ({**RANKS, "causal_seqlens_kv_global": tensor("int32", 5)}, "causal_seqlens_kv_global: 5 entries, expected 4"),
    ({**RANKS, "causal_seqlens_kv_global": tensor("int64", 4)}, "causal_seqlens_kv_global: dtype int64, expected int"),
    ({**RANKS, "causal_seqlens_kv_global": tensor("int32", 4, 1)}, "causal_seqlens_kv_global: shape"),
    ({**RANKS, "causal_seqlens_kv_global": tensor("int32", 4, strides=(2,))}, "causal_seqlens_kv_global: stride 2"),
    ({**RANKS, "causal_seqlens_kv_global": tensor("int32", 4, device=1)}, "causal_seqlens_kv_global: on device 1"),
    ({**RANKS, "mask": tensor("uint16", 4, 2)}, "mask: given with cp_world=2, expected None"),
    ({**RANKS, "sinks": tensor("float32", 64)}, "sinks: given with cp_world=2, expected None: the merge of the ranks"),
    ({"request_order": tensor("int32", 4)}, "request_order=a TensorView: .*expected None"),
    ({"request_order_plan": object()}, "request_order_plan=a object: .*expected None"),
    ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention=True"),
    ({"sparse_top_k": 64}, "sparse_top_k=64: .*expected 0"),
    ({"length_aware_schedule": 1}, "length_aware_schedule=1: expected True or False"),
    ({"bf16q_fp8kv_transform_mode": "x"}, "bf16q_fp8kv_transform_mode='x'"),
    ({"q_len_per_req": None}, "q_len_per_req: None without cum_seq_lens_q"),
    ({"max_q_len": 2}, "max_q_len=2 without cum_seq_lens_q"),
    ({"cum_seq_lens_q": tensor("int32", 5), "q_len_per_req": None, "max_q_len": 1.5}, "max_q_len=1.5: expected an int"),
    ({"cum_seq_lens_q": tensor("int32", 5), "max_q_len": 1}, "q_len_per_req=1 with cum_seq_lens_q"),
    ({"lse": tensor("float32", 4, 32)}, "lse: shape"),
    ({"lse": tensor("float32")}, "lse: shape"),
    (
        {"query": tensor("bfloat16", 12, 64, 128), "q_len_per_req": 3, "lse": tensor("float32", 4, 3, 64)},
        r"lse: shape \(4, 3, 64\), expected \(12, 64\)",
    ),
    ({"lse": tensor("float16", 4, 64)}, "lse: dtype float16"),
    ({"out": tensor("bfloat16", 4, 64, 128), "out_dtype": "torch.float16"}, "out: dtype bfloat16, out_dtype says"),
    ({"backend": "trtllm-gen"}, "no backend supports it"),
    ({"backend": "fa2"}, "backend='fa2': expected auto or one of xqa, trtllm-gen"),
]


def refused(standin: StandIn, operator: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, BackendError), match=words):
        operator(**arguments)
    assert "cuLaunchKernelEx" not in standin.names()


@pytest.mark.parametrize(("changes", "words"), XQA)
def test_xqa_refuses(standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    refused(standin, flashinfer.xqa, {**xqa_arguments(memory), **made(memory, changes)}, words)


@pytest.mark.parametrize(("changes", "words"), BATCH + XQA_BATCH)
def test_xqa_batch_refuses(standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    given = {**xqa_batch_arguments(memory), **made(memory, changes)}
    refused(standin, flashinfer.xqa_batch_decode_with_kv_cache, given, words)


@pytest.mark.parametrize(("changes", "words"), BATCH + TRTLLM)
def test_trtllm_refuses(standin: StandIn, memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    given = {**trtllm_arguments(memory), **made(memory, changes)}
    refused(standin, flashinfer.trtllm_batch_decode_with_kv_cache, given, words)


@pytest.mark.parametrize("factor", [None, 0, 0.0, 1e-30, 1000.0])
def test_a_skip_factor_is_taken_as_no_key_need_be_skipped(
    standin: StandIn, memory: MadeUpMemory, factor: float | None
) -> None:
    given = trtllm_arguments(memory, skip_softmax_threshold_scale_factor=factor)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    assert "cuLaunchKernelEx" in standin.names()


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (flashinfer.xqa, xqa_arguments),
        (flashinfer.xqa_batch_decode_with_kv_cache, xqa_batch_arguments),
    ],
)
def test_a_device_without_kernels_is_told_those_with(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime, operator: Any, arguments: Any
) -> None:
    standin.pose_as(7, 5)
    with pytest.raises(BackendError, match=r"^xqa.*capability 7.5.*measured on 9.0, built for 8.0"):
        operator(**arguments(memory))


def test_ragged_tokens_need_no_multiple_of_the_batch(standin: StandIn, memory: MadeUpMemory) -> None:
    q = memory.tensor("bfloat16", 7, 64, 128)
    given = xqa_arguments(memory, q=q, output=replace(q), q_seq_len=4, q_cu_seq_lens=memory.tensor("int32", 5))
    flashinfer.xqa(**given)
    assert "cuLaunchKernelEx" in standin.names()


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (flashinfer.xqa, xqa_arguments),
        (flashinfer.xqa_batch_decode_with_kv_cache, xqa_batch_arguments),
        (flashinfer.trtllm_batch_decode_with_kv_cache, partial(trtllm_arguments, backend="xqa")),
    ],
)
def test_kernels_that_were_not_run_come_with_one_warning(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime, operator: Any, arguments: Any
) -> None:
    standin.pose_as(10, 0)
    with pytest.warns(UserWarning, match="^paged_decode: backend 'native' was built") as seen:  # noqa: SIM117
        with pytest.raises(UsageError, match="no decode kernel"):
            operator(**arguments(memory))
    assert len(seen) == 1
