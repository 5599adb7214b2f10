"""Every rule of the operators, broken one at a time: an error that names the argument, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    made,
    mla_arguments,
    ragged_arguments,
    tensor,
)

pytestmark = pytest.mark.usefixtures("runtime")

FP8 = "float8_e4m3fn"
RAGGED_QUERIES = {"query": tensor("bfloat16", 7, 32, 128), "q_len_per_req": None}
FP4_OUT = {"out_dtype": "nvfp4", "query": tensor(FP8, 4, 32, 128)}
FP4_CACHE = {"kv_cache": tensor("uint8", 64, 2, 4, 32, 64), "query": tensor(FP8, 4, 32, 128)}

DECODE: list[tuple[dict[str, Any], str]] = [
    ({"query": tensor("bfloat16", 4, 1, 32, 128)}, r"query: shape .*expected 3 dimensions"),
    ({"query": tensor("float32", 4, 32, 128)}, "query: dtype float32, expected one of float16"),
    ({"query": tensor("bfloat16", 0, 32, 128)}, "query: shape .*at least one token"),
    ({"query": tensor("bfloat16", 5, 32, 128)}, "query: 5 tokens for 4 requests of 1"),
    ({"query": tensor("bfloat16", 4, 32, 128, strides=(8192, 256, 2))}, "query: last stride 2, expected 1"),
    ({"query": tensor("bfloat16", 4, 32, 64)}, r"^kv_cache \(K\): head dimension 128, query has 64"),
    ({"query": object()}, "query: got object"),
    ({"kv_cache": tensor("bfloat16", 64, 3, 4, 32, 128)}, r"kv_cache: shape .*\[pages, 2, ...\]"),
    ({"kv_cache": tensor("bfloat16", 64, 2, 32, 128)}, r"kv_cache: shape .*\[pages, 2, ...\]"),
    ({"kv_cache": ()}, "kv_cache: 0 tensors, expected K and V"),
    ({"kv_cache": tensor("float32", 64, 2, 4, 32, 128)}, r"^kv_cache \(K\): dtype float32"),
    (
        {"kv_cache": tensor("bfloat16", 64, 2, 4, 32, 128, device=1)},
        r"^kv_cache \(K\): on device 1, query is on device 0",
    ),
    ({"kv_cache": tensor("bfloat16", 0, 2, 4, 32, 128)}, r"^kv_cache \(K\): shape .*at least one page"),
    ({"kv_layout": "NDH"}, "kv_layout='NDH': expected NHD or HND"),
    ({"block_tables": tensor("int32", 3, 64)}, r"block_tables: shape \(3, 64\), expected \[4, columns\]"),
    ({"block_tables": tensor("int32", 4)}, r"block_tables: shape \(4,\)"),
    ({"block_tables": tensor("int64", 4, 64)}, "block_tables: dtype int64, expected int32"),
    ({"block_tables": tensor("int32", 4, 64, strides=(128, 1))}, "block_tables: strides .*contiguous"),
    ({"block_tables": tensor("int32", 4, 64, device=1)}, "block_tables: on device 1"),
    ({"uses_shared_paged_kv_idx": False}, r"block_tables: shape \(4, 64\), expected \[4, 2, columns\]"),
    ({"seq_lens": tensor("int32", 4, 2)}, "seq_lens: shape .*one dimension"),
    ({"seq_lens": tensor("int64", 4)}, "seq_lens: dtype int64, expected int32"),
    ({"seq_lens": tensor("int32", 4, device=1)}, "seq_lens: on device 1"),
    ({"seq_lens": tensor("int32", 5)}, "query: 4 tokens for 5 requests"),
    ({"max_seq_len": 0}, "^max_seq_len=0: expected 1"),
    ({"max_seq_len": 1.5}, "max_seq_len=1.5: expected an integer"),
    ({"bmm1_scale": math.nan}, "bmm1_scale=nan: expected a finite number"),
    ({"bmm2_scale": math.inf}, "bmm2_scale=inf: expected a finite number"),
    ({"bmm2_scale": 10**400}, "bmm2_scale=inf: expected a finite number"),
    ({"bmm1_scale": 2.5e38}, r"^bmm1_scale=2.5e\+38: expected a finite number"),
    ({"bmm2_scale": -1e39}, r"^bmm2_scale=-1e\+39: expected a finite number"),
    ({"bmm1_scale": tensor("float16", 1)}, "bmm1_scale: float16 .*expected one float32"),
    ({"bmm2_scale": tensor("float32", 2)}, "bmm2_scale: float32 .*expected one float32"),
    ({"bmm1_scale": tensor("float32", 1, device=1)}, "bmm1_scale: on device 1"),
    ({"bmm1_scale": 1.0, "bmm1_scale_log2": tensor("float16", 1)}, "bmm1_scale_log2: float16"),
    ({"window_left": -2}, "window_left=-2: expected -1"),
    ({"window_left": None}, "window_left=None: expected an integer"),
    ({"out": tensor("bfloat16", 4, 32, 64)}, "out: shape"),
    ({"out": tensor("bfloat16", 4, 32, 128, strides=(8192, 256, 1))}, "out: strides .*contiguous"),
    ({"out": tensor("bfloat16", 4, 32, 128, device=1)}, "out: on device 1"),
    ({"out": tensor("bfloat16", 4, 32, 128), "out_dtype": "torch.float16"}, "out: dtype bfloat16, out_dtype says"),
    ({"o_sf_scale": 1.0}, "o_sf_scale or o_sf_vec_size without an nvfp4 output"),
    ({"out_dtype": "nvfp4"}, "query: dtype bfloat16, expected float8_e4m3fn for an nvfp4 output"),
    (FP4_OUT, "o_sf_scale: None, expected a number"),
    ({**FP4_OUT, "o_sf_scale": 1e39}, r"^o_sf_scale=1e\+39: expected a finite number"),
    ({**FP4_OUT, "o_sf_scale": 1.0, "o_sf_vec_size": 32}, "o_sf_vec_size=32: expected 16"),
    ({**FP4_OUT, "o_sf_scale": 1.0, "out": tensor("uint8", 4, 32, 64)}, "expected an FP4Tensor"),
    (FP4_CACHE, r"^kv_cache_sf \(K\): None, expected float8_e4m3fn"),
    ({**FP4_CACHE, "kv_cache_sf": tensor(FP8, 64, 2, 4, 32, 4)}, r"^kv_cache_sf \(K\): .*expected float8_e4m3fn"),
    (
        {**FP4_CACHE, "kv_cache_sf": tensor(FP8, 64, 2, 4, 32, 8, strides=(2048, 1024, 8, 32, 1))},
        r"^kv_cache_sf \(K\): strides .*in one piece",
    ),
    (
        {
            **FP4_CACHE,
            "kv_cache_sf": lambda m: (
                m.tensor(FP8, 64, 4, 32, 8),
                replace(m.tensor(FP8, 64, 4, 32, 8), strides=(2048, 256, 8, 1)),
            ),
        },
        r"^kv_cache_sf \(V\): strides .*one set serves both",
    ),
    ({"kv_cache_sf": tensor(FP8, 64, 2, 4, 32, 8)}, r"^kv_cache_sf \(K\): given for a cache of bfloat16"),
    ({"query": tensor("bfloat16", 4, 32, 128, strides=(2**32 + 4096, 128, 1))}, "query: strides .*at most 2147483647"),
    (
        {"kv_cache": tensor("bfloat16", 64, 2, 4, 32, 128, strides=(32768, 16384, 4096, 2**32 + 128, 1))},
        r"kv_cache \(K\): strides .*at most 2147483647",
    ),
    (
        {"kv_cache": tensor("uint8", 64, 2, 4, 32, 64, strides=(2**30, 16384, 4096, 64, 1))},
        r"kv_cache \(K\): strides .*at most 1073741823",
    ),
    (
        {**FP4_CACHE, "kv_cache_sf": tensor(FP8, 64, 2, 4, 32, 8, strides=(2**32 + 2048, 1024, 256, 8, 1))},
        r"kv_cache_sf \(K\): strides .*at most 2147483647",
    ),
    (
        {"kv_cache": tensor("bfloat16", 2**31 + 64, 2, 4, 32, 128, strides=(0, 0, 4096, 128, 1))},
        r"kv_cache \(K\): shape .*at most 1073741823 pages",
    ),
    ({"block_tables": tensor("int32", 4, 2**32 + 64)}, "block_tables: shape .*at most 2147483647 columns"),
    ({"sinks": tensor("float32", 16)}, "sinks: 16 entries, expected 32"),
    ({"sinks": tensor("float16", 32)}, "sinks: dtype float16"),
    ({"lse": tensor("float32", 4, 16)}, "lse: float32 .*expected float32"),
    ({"lse": tensor("float16", 4, 32)}, "lse: float16"),
    ({"mask": tensor("uint16", 4, 2)}, "mask=a TensorView: .*no kernel that honours it"),
    ({"mask": object()}, "mask=a object: .*expected None"),
    ({"sinks": []}, "sinks: 0 tensors, expected one"),
    ({"enable_block_sparse_attention": True}, "enable_block_sparse_attention=True"),
    ({"sparse_top_k": 64}, "sparse_top_k=64: .*expected 0"),
    ({"length_aware_schedule": 1}, "length_aware_schedule=1: expected True or False"),
    ({"cp_world": 2}, "cp_world=2: .*by backend 'trtllm-gen' has no kernel"),
    ({"causal_seqlens_kv_global": tensor("int32", 4)}, "causal_seqlens_kv_global=a TensorView: .*'trtllm-gen'"),
    ({"bf16q_fp8kv_transform_mode": "x"}, "bf16q_fp8kv_transform_mode='x'"),
    ({"backend": "fa2"}, "backend='fa2': expected auto or one of xqa, trtllm-gen"),
    ({"q_len_per_req": None}, "q_len_per_req: None without cum_seq_lens_q"),
    ({"q_len_per_req": 0}, "max_q_len=0|4 tokens for 4 requests of 0"),
    ({"max_q_len": 2}, "max_q_len=2 without cum_seq_lens_q"),
    ({"cum_seq_lens_q": tensor("int32", 5), "max_q_len": 1}, "q_len_per_req=1 with cum_seq_lens_q"),
    ({"skip_softmax_threshold_scale_factor": -1.0}, "skip_softmax_threshold_scale_factor=-1.0"),
    ({"skip_softmax_threshold_scale_factor": 1e39}, r"^skip_softmax_threshold_scale_factor=1e\+39: expected a finite"),
    ({"skip_softmax_threshold_scale_factor": 1.0, "batch_invariant": True}, "batch_invariant with skip_softmax"),
]
RAGGED_DECODE: list[tuple[dict[str, Any], str]] = [
    ({"cum_seq_lens_q": tensor("int32", 5, 1), "max_q_len": 2}, "cum_seq_lens_q: shape .*one dimension of 5"),
    ({"cum_seq_lens_q": tensor("int64", 5), "max_q_len": 2}, "cum_seq_lens_q: dtype int64, expected int32"),
    ({"cum_seq_lens_q": tensor("int32", 4), "max_q_len": 2}, "cum_seq_lens_q: 4 entries, expected 5"),
    ({"cum_seq_lens_q": tensor("int32", 5, strides=(2,)), "max_q_len": 2}, "cum_seq_lens_q: stride 2"),
    ({"cum_seq_lens_q": tensor("int32", 5, device=1), "max_q_len": 2}, "cum_seq_lens_q: on device 1"),
    ({"cum_seq_lens_q": tensor("int32", 5, values=(0, 3, 2, 5, 7))}, "falls from 3 to 2 at request 1"),
    ({"cum_seq_lens_q": tensor("int32", 5, values=(1, 3, 4, 5, 7))}, r"begins with \[1\], expected 0"),
    ({"cum_seq_lens_q": tensor("int32", 5, values=(0, 3, 4, 5, 6))}, "ends with 6, expected 7"),
]
MLA: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
        r"qk_rope_head_dim=32: expected \(512, 64\) or \(256, 64\) on backend trtllm-gen$",
    ),
    ({"kv_lora_rank": 128}, r"kv_lora_rank=128, qk_rope_head_dim=64: expected \(512, 64\)"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0"),
    ({"qk_nope_head_dim": 0}, "qk_nope_head_dim=0"),
    ({"qk_nope_head_dim": None}, "qk_nope_head_dim=None: expected an integer"),
    ({"max_seq_len": 1.5}, "max_seq_len=1.5: expected an integer"),
    ({"query": tensor("bfloat16", 8, 128, 576)}, "query: shape .*expected 4 dimensions"),
    ({"query": tensor("bfloat16", 4, 2, 128, 512)}, "query: head dimension 512, expected 576"),
    ({"query": tensor("bfloat16", 3, 2, 128, 576)}, "query: batch 3, seq_lens has 4"),
    (
        {"query": tensor("bfloat16", 4, 2, 128, 576, strides=(200000, 73728, 576, 1))},
        "query: strides .*2 times the tokens' distance",
    ),
    ({"kv_cache": tensor("bfloat16", 1024, 2, 64, 576)}, "kv_cache: shape"),
    ({"kv_cache": tensor("bfloat16", 1024, 64, 512)}, "^kv_cache: head dimension 512, query has 576"),
    ({"out": tensor("bfloat16", 4, 2, 128, 576)}, "out: shape"),
    ({"sparse_mla_top_k": -4}, "sparse_mla_top_k=-4"),
    ({"sparse_mla_top_k": "64"}, "sparse_mla_top_k='64': expected an integer"),
    ({"sparse_mla_top_k": 64}, r"block_tables: shape .*expected \(4, 2, 64\)"),
    ({"sparse_mla_top_k_lens": tensor("int32", 8)}, "sparse_mla_top_k_lens without sparse_mla_top_k"),
    (
        {
            "query": tensor("bfloat16", 7, 128, 576),
            "cum_seq_lens_q": tensor("int32", 5),
            "max_q_len": 2,
            "sparse_mla_top_k": 64,
        },
        "sparse_mla_top_k with cum_seq_lens_q",
    ),
    ({"max_q_len": 2}, "max_q_len=2 without cum_seq_lens_q"),
    (
        {
            "query": tensor("bfloat16", 7, 128, 576),
            "cum_seq_lens_q": tensor("int32", 5),
            "max_q_len": 2,
            "skip_softmax_threshold_scale_factor": 1.0,
        },
        "skip_softmax_threshold_scale_factor with cum_seq_lens_q: ragged queries of MLA skip no softmax",
    ),
    (
        {"sparse_mla_top_k": 64, "skip_softmax_threshold_scale_factor": 1.0},
        "skip_softmax_threshold_scale_factor with sparse_mla_top_k",
    ),
    ({"lse": tensor("float32", 4, 2, 64)}, "lse: float32"),
    ({"cute_dsl_impl": "fast"}, "cute_dsl_impl='fast'"),
    ({"kv_scale_format": "ue8m0"}, "kv_scale_format='ue8m0'"),
    ({"enable_dcp": True}, "causal_seqlens_kv_global: None with enable_dcp"),
    ({"enable_dcp": True, "causal_seqlens_kv_global": tensor("int32", 3)}, "enable_dcp=True: .*'trtllm-gen'"),
    ({"cp_world": 2}, "cp_world=2"),
    ({"cp_rank": 1}, "cp_rank=1"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
    ({"backend": "cute-dsl"}, "backend='cute-dsl'"),
]
CONTEXT: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 4}, "batch_size=4: seq_lens has 3 requests"),
    ({"cum_seq_lens_q": tensor("int32", 3)}, "cum_seq_lens_q: 3 entries, expected 4"),
    ({"cum_seq_lens_kv": tensor("int32", 3)}, "cum_seq_lens_kv: 3 entries, expected 4"),
    ({"cum_seq_lens_kv": tensor("int64", 4)}, "cum_seq_lens_kv: dtype int64"),
    ({"max_q_len": 0}, "max_q_len=0"),
    ({"max_kv_len": 0}, "max_kv_len=0"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
    ({"uses_spcompress": True}, "uses_spcompress=True"),
    ({"window_right": 1}, "window_right=1: .*'trtllm-gen'.*expected -1"),
    ({"window_right": 0, "causal": False}, "window_right=0: .*'trtllm-gen'"),
    (
        {
            "kv_cache": lambda m: (
                m.tensor("bfloat16", 64, 4, 32, 128),
                replace(m.tensor("bfloat16", 64, 4, 32, 128), strides=(32768, 4096, 128, 1)),
            )
        },
        r"^kv_cache \(V\): strides .*one set for both",
    ),
    (
        {"kv_cache": lambda m: (m.tensor("bfloat16", 64, 4, 32, 128), m.tensor("bfloat16", 63, 4, 32, 128))},
        r"^kv_cache \(V\): shape",
    ),
]
RAGGED: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 3}, "batch_size=3: seq_lens has 2 requests"),
    ({"key": tensor("bfloat16", 400, 128, 192, strides=(2**32 + 192, 192, 1))}, "key: strides .*at most 2147483647"),
    ({"o_sf_scale": math.nan}, "^o_sf_scale=nan: expected a finite number"),
    ({"window_left": 64, "is_causal": False}, "window_left=64 without is_causal"),
    ({"window_left": None}, "window_left=None: expected an integer"),
    ({"query": tensor("bfloat16", 200, 128, 192, strides=(49152, 384, 1))}, "query: strides .*contiguous"),
    ({"key": tensor("bfloat16", 400, 128, 128)}, "key: head dimension 128, query has 192"),
    ({"value": tensor("bfloat16", 300, 128, 128)}, "value: shape .*key has"),
    ({"key": tensor("float32", 400, 128, 192)}, "key: dtype float32"),
    ({"out": tensor("bfloat16", 200, 128, 192)}, "out: shape"),
    ({"q_seq_lens_cpu": (128, 0)}, "q_seq_lens_cpu: request 1 has 0 tokens"),
    ({"kv_seq_lens_cpu": (0, 128)}, "kv_seq_lens_cpu: request 0 has 0 tokens"),
    ({"attention_sinks": tensor("float32", 16)}, "^attention_sinks: 16 entries, expected 128"),
    ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
    ({"uses_spcompress": True}, "uses_spcompress=True"),
    ({"backend": "cutlass"}, "backend='cutlass'"),
]


@pytest.mark.parametrize(("changes", "words"), DECODE)
def test_decode_refuses(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache(**{**decode_arguments(memory), **made(memory, changes)})


@pytest.mark.parametrize(("changes", "words"), RAGGED_DECODE)
def test_decode_of_ragged_queries_refuses(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    given = {**decode_arguments(memory), **made(memory, {**RAGGED_QUERIES, **changes})}
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache(**given)


@pytest.mark.parametrize(("changes", "words"), MLA)
def test_mla_refuses(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**mla_arguments(memory), **made(memory, changes)})


@pytest.mark.parametrize(("changes", "words"), CONTEXT)
def test_context_refuses(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_context_with_kv_cache(**{**context_arguments(memory), **made(memory, changes)})


@pytest.mark.parametrize(("changes", "words"), RAGGED)
def test_ragged_refuses(memory: MadeUpMemory, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_ragged_attention_deepseek(**{**ragged_arguments(memory), **made(memory, changes)})


def test_a_capture_needs_the_bound_on_query_lengths(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    runtime.driver.primary_context(0)
    memory.stream = runtime.driver.create_stream()
    runtime.driver.begin_capture(memory.stream)
    changes = {**RAGGED_QUERIES, "cum_seq_lens_q": tensor("int32", 5, values=(0, 1, 4, 5, 7))}
    with pytest.raises(UsageError, match="max_q_len: None while a stream captures"):
        flashinfer.trtllm_batch_decode_with_kv_cache(**{**decode_arguments(memory), **made(memory, changes)})
    assert memory.reads == []
