"""An example case from shapes alone: contiguous tensors at invented addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..attention.trtllm_gen.checks import check_call
from ..errors import UsageError
from ..kernels.trtllm_gen.arithmetic import ceil_div
from ..kernels.trtllm_gen.traits import TENSOR_DTYPES
from ..values import dataclass
from .recorded_cases import call_of

APIS: Mapping[str, str] = {
    "decode": "trtllm_paged_attention_decode",
    "context": "trtllm_paged_attention_context",
    "ragged": "trtllm_ragged_attention",
}
DTYPES: Mapping[str, str] = {ours: tensor for tensor, ours in TENSOR_DTYPES.items()}
FIRST_ADDRESS = 0x7F00_0000_0000
ADDRESS_STEP = 1 << 36
DEFAULT_WORKSPACE = 128 << 20


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes and options of a call; dtypes in the metadata's words, lengths in tokens.

    ``operation`` is decode, context or ragged. Decode with head dimensions 576/512 or 320/256 is MLA, whose V lies in
    K's pages. ``window`` is the number of visible tokens, 0 for all. ``tokens``, the query tokens of all requests, is
    given where query lengths differ. ``top_k_lens``: the keys of sparse MLA differ from query to query.
    ``shared_index``: one page table serves K and V. ``occupancy`` names a model of how many clusters the GPU holds:
    ``floor``, ``gpc18`` or ``const:N``.
    """

    operation: str = "decode"
    sm: int = 100
    multiprocessors: int = 148
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1024
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype_q: str = "bf16"
    dtype_kv: str = "bf16"
    dtype_out: str = "bf16"
    page: int = 32
    window: int = 0
    tokens: int | None = None
    batch_invariant: bool = False
    top_k: int = 0
    top_k_lens: bool = False
    shared_index: bool = True
    causal: bool = True
    lse: bool = False
    pdl: bool = False
    skip_softmax: float = 0.0
    workspace: int = DEFAULT_WORKSPACE
    occupancy: str = "floor"


def case_of(shapes: Shapes) -> dict[str, Any]:
    """The case of a record for these shapes.

    Raises:
        UsageError: an unknown operation or dtype, a size below 1, or a call that the operators refuse.
    """
    if shapes.operation not in APIS:
        raise UsageError(f"operation={shapes.operation!r}: expected one of {', '.join(APIS)}")
    for name in ("batch", "q_len", "kv_len", "heads_q", "heads_kv", "head_dim", "page", "multiprocessors"):
        if getattr(shapes, name) < 1:
            raise UsageError(f"{name}={getattr(shapes, name)}: expected 1 or more")
    if shapes.tokens is not None and not 1 <= shapes.tokens <= shapes.batch * shapes.q_len:
        raise UsageError(f"tokens={shapes.tokens}: expected 1 to batch x q_len, {shapes.batch * shapes.q_len}")
    tensors = _Tensors()
    _add_tensors(shapes, tensors)
    case = {
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
    check_call(call_of(case))
    return case


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
    dtypes = [_tensor_dtype(word) for word in (shapes.dtype_q, shapes.dtype_kv, shapes.dtype_out)]
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


def _tensor_dtype(word: str) -> str:
    if word not in DTYPES:
        raise UsageError(f"dtype {word!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[word]
