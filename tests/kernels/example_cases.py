"""Cases of records from shapes alone, as the file of cases has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from cubin_runtime.cli.example_call import ADDRESS_STEP, DTYPES, FIRST_ADDRESS, Shapes, example_call
from cubin_runtime.kernels.trtllm_gen.arithmetic import ceil_div

APIS: Mapping[str, str] = {
    "decode": "trtllm_paged_attention_decode",
    "context": "trtllm_paged_attention_context",
    "ragged": "trtllm_ragged_attention",
}


def case_of(shapes: Shapes) -> dict[str, Any]:
    """The case of a record for these shapes, which is that of ``example_call``; errors as there."""
    example_call(shapes)
    tensors = _Tensors()
    _add_tensors(shapes, tensors)
    return {
        "api": APIS[shapes.operation],
        "sm": shapes.sm,
        "stream": "0x0",
        "batch_invariant": shapes.batch_invariant,
        "max_active_clusters_model": shapes.occupancy,
        "scalars": {
            "max_q_len": shapes.q_len,
            "max_kv_len": shapes.kv_len,
            "batch_size": shapes.batch,
            "window_left": shapes.window - 1,
            "is_causal": shapes.causal,
            "uses_shared_paged_kv_idx": shapes.shared_index,
            "sparse_mla_top_k": shapes.top_k,
            "o_sf_vec_size": 16 if shapes.dtype_out == "e2m1" else -1,
            "lse_stride_tokens": shapes.heads_q if shapes.lse else 0,
            "lse_stride_heads": int(shapes.lse),
            "skip_softmax_threshold_scale_factor": shapes.skip_softmax,
            "workspace_size": shapes.workspace,
            "sm_count": shapes.multiprocessors,
            "enable_pdl": shapes.pdl,
            "bmm1_scale": shapes.head_dim**-0.5,
            "bmm2_scale": 1.0,
        },
        "tensors": tensors.stated,
    }


class _Tensors:
    """Contiguous tensors, each at an address of its own."""

    def __init__(self) -> None:
        self.stated: dict[str, dict[str, Any]] = {}

    def add(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        packed = 2 if dtype == "uint8" and name != "workspace_buffer" else 1
        shape = (*shape[:-1], shape[-1] // packed)
        self.stated[name] = {
            "ptr": hex(FIRST_ADDRESS + len(self.stated) * ADDRESS_STEP),
            "dtype": dtype,
            "shape": list(shape),
            "strides": [prod(shape[axis + 1 :]) for axis in range(len(shape))],
        }


def _add_tensors(shapes: Shapes, tensors: _Tensors) -> None:
    tokens = shapes.batch * shapes.q_len if shapes.tokens is None else shapes.tokens
    dim_v = shapes.head_dim_v or shapes.head_dim
    dtypes = [DTYPES[word] for word in (shapes.dtype_q, shapes.dtype_kv, shapes.dtype_out)]
    tensors.add("query", dtypes[0], (tokens, shapes.heads_q, shapes.head_dim))
    tensors.add("out", dtypes[2], (tokens, shapes.heads_q, dim_v))
    if shapes.operation == "ragged":
        kv_tokens = shapes.batch * shapes.kv_len
        tensors.add("key", dtypes[1], (kv_tokens, shapes.heads_kv, shapes.head_dim))
        tensors.add("value", dtypes[1], (kv_tokens, shapes.heads_kv, dim_v))
    else:
        width = ceil_div(shapes.kv_len, shapes.page)
        pool = (shapes.batch * width, shapes.heads_kv, shapes.page)
        tensors.add("key_cache", dtypes[1], (*pool, shapes.head_dim))
        if dim_v == shapes.head_dim:
            tensors.add("value_cache", dtypes[1], (*pool, dim_v))
        else:
            tensors.stated["value_cache"] = tensors.stated["key_cache"]
        if shapes.dtype_kv == "e2m1":
            tensors.add("key_block_scales", "float8_e4m3fn", (*pool, shapes.head_dim // 16))
            tensors.add("value_block_scales", "float8_e4m3fn", (*pool, dim_v // 16))
        table = (shapes.batch, width) if shapes.shared_index else (shapes.batch, 2, width)
        if shapes.top_k:
            table = (tokens, shapes.top_k) if shapes.tokens is not None else (shapes.batch, shapes.q_len, shapes.top_k)
        tensors.add("block_tables", "int32", table)
    if shapes.dtype_out == "e2m1":
        tensors.add("out_scale_factor", "float8_e4m3fn", (tokens, shapes.heads_q * dim_v // 16))
    tensors.add("seq_lens", "int32", (shapes.batch,))
    if shapes.operation != "decode" or shapes.tokens is not None:
        tensors.add("cum_seq_lens_q", "int32", (shapes.batch + 1,))
    if shapes.top_k_lens:
        tensors.add("sparse_mla_top_k_lens", "int32", (tokens,))
    if shapes.operation != "decode":
        tensors.add("cum_seq_lens_kv", "int32", (shapes.batch + 1,))
    if shapes.lse:
        tensors.add("lse", "float32", (tokens, shapes.heads_q))
    tensors.add("workspace_buffer", "uint8", (shapes.workspace,))
