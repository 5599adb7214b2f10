"""An example call of trtllm-gen kernels from shapes alone: contiguous tensors at invented addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from ..attention.trtllm_gen.checks import check_call
from ..errors import UsageError
from ..kernels.trtllm_gen.arguments import Device, OutScales, Scale
from ..kernels.trtllm_gen.arithmetic import ceil_div
from ..kernels.trtllm_gen.call import Call
from ..kernels.trtllm_gen.calls import ContextCall, DecodeCall, RaggedCall
from ..kernels.trtllm_gen.decision import Decision, decide
from ..kernels.trtllm_gen.kernel_finder import KernelFinder
from ..kernels.trtllm_gen.select import Occupancy
from ..kernels.trtllm_gen.traits import TENSOR_DTYPES, Policy
from ..protocols import DTypeName
from ..tensor import TensorView
from ..values import dataclass

DTYPES: Mapping[str, str] = {word: tensor for tensor, word in TENSOR_DTYPES.items()}
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


def example_call(shapes: Shapes) -> Call:
    """The call of these shapes.

    Raises:
        UsageError: an unknown operation or dtype, a size below 1, or a call that the operators refuse.
    """
    return _call(shapes, _example_tensors(shapes))


def example_decision(shapes: Shapes, kernels: KernelFinder, policy: Policy) -> Decision:
    """The decision for the call of these shapes; errors as ``example_call`` and ``decide``."""
    tensors = _example_tensors(shapes)
    workspace = tensors["workspace_buffer"].pointer, shapes.workspace
    problem = _call(shapes, tensors).problem(Device(shapes.sm, shapes.multiprocessors), workspace)
    occupancy = occupancy_of("occupancy", shapes.occupancy, shapes.multiprocessors)
    return decide(problem, kernels, occupancy, policy, batch_invariant=shapes.batch_invariant)


_MOST_DIGITS = 9  # of a number of clusters


def occupancy_of(name: str, model: object, multiprocessors: int) -> Occupancy:
    """The occupancy model of an argument ``name`` that stands for the driver's: ``floor``, ``gpc18`` or ``const:N``.

    Raises:
        UsageError: another word.
    """
    if model == "floor":
        return lambda meta, cluster, grid: multiprocessors // cluster
    if model == "gpc18":
        return lambda meta, cluster, grid: 8 * (18 // cluster)
    word, _, number = str(model).partition(":")
    if word != "const" or not number.isdecimal() or len(number) > _MOST_DIGITS:
        raise UsageError(f"{name}={model!r:.60}: expected floor, gpc18 or const:N, N of up to {_MOST_DIGITS} digits")
    return lambda meta, cluster, grid: int(number)


def _call(shapes: Shapes, tensors: Mapping[str, TensorView]) -> Call:
    common: dict[str, Any] = {
        "query": tensors["query"],
        "out": tensors["out"],
        "seq_lens": tensors["seq_lens"],
        "max_q": shapes.q_len,
        "max_kv": shapes.kv_len,
        "bmm1": Scale(shapes.head_dim**-0.5),
        "cum_seq_lens_q": tensors.get("cum_seq_lens_q"),
        "lse": tensors.get("lse"),
        "window_left": shapes.window - 1,
        "skip_softmax_factor": shapes.skip_softmax,
        "pdl": shapes.pdl,
        "batch_invariant": shapes.batch_invariant,
    }
    call = _KINDS[shapes.operation](shapes, tensors, common)
    check_call(call)
    return call


def _decode(shapes: Shapes, tensors: Mapping[str, TensorView], common: dict[str, Any]) -> Call:
    top_k_lens = tensors.get("sparse_mla_top_k_lens")
    return DecodeCall(**common, **_paged(shapes, tensors), top_k=shapes.top_k, top_k_lens=top_k_lens)


def _context(shapes: Shapes, tensors: Mapping[str, TensorView], common: dict[str, Any]) -> Call:
    sums = tensors["cum_seq_lens_kv"]
    return ContextCall(**common, **_paged(shapes, tensors), cum_seq_lens_kv=sums, causal=shapes.causal)


def _ragged(shapes: Shapes, tensors: Mapping[str, TensorView], common: dict[str, Any]) -> Call:
    sums = tensors["cum_seq_lens_kv"]
    key, value = tensors["key"], tensors["value"]
    return RaggedCall(**common, key=key, value=value, cum_seq_lens_kv=sums, causal=shapes.causal)


_KINDS: Mapping[str, Callable[[Shapes, Mapping[str, TensorView], dict[str, Any]], Call]] = {
    "decode": _decode,
    "context": _context,
    "ragged": _ragged,
}


def _paged(shapes: Shapes, tensors: Mapping[str, TensorView]) -> dict[str, Any]:
    """The fields of calls over pages."""
    return {
        "key": tensors["key_cache"],
        "value": tensors["value_cache"],
        "block_tables": tensors["block_tables"],
        "key_scales": tensors.get("key_block_scales"),
        "value_scales": tensors.get("value_block_scales"),
        "shares_index": shapes.shared_index,
        "out_scales": OutScales(tensors.get("out_scale_factor"), block=16 if shapes.dtype_out == "e2m1" else -1),
    }


def _check(shapes: Shapes) -> None:
    if shapes.operation not in _KINDS:
        raise UsageError(f"operation={shapes.operation!r}: expected one of {', '.join(_KINDS)}")
    for name in ("batch", "q_len", "kv_len", "heads_q", "heads_kv", "head_dim", "page", "multiprocessors"):
        if getattr(shapes, name) < 1:
            raise UsageError(f"{name}={getattr(shapes, name)}: expected 1 or more")
    if shapes.tokens is not None and not 1 <= shapes.tokens <= shapes.batch * shapes.q_len:
        raise UsageError(f"tokens={shapes.tokens}: expected 1 to batch x q_len, {shapes.batch * shapes.q_len}")


class _Tensors(dict[str, TensorView]):
    """Contiguous tensors, each at an address of its own."""

    def add(self, name: str, dtype: str, *shape: int) -> None:
        packed = 2 if dtype == "uint8" and name != "workspace_buffer" else 1
        address = FIRST_ADDRESS + len(self) * ADDRESS_STEP
        sizes = (*shape[:-1], shape[-1] // packed)
        self[name] = TensorView.contiguous(address, cast("DTypeName", dtype), sizes)


def _example_tensors(shapes: Shapes) -> Mapping[str, TensorView]:
    _check(shapes)
    tensors = _Tensors()
    tokens = shapes.batch * shapes.q_len if shapes.tokens is None else shapes.tokens
    dim_v = shapes.head_dim_v or shapes.head_dim
    dtype_q, dtype_kv, dtype_out = map(_tensor_dtype, (shapes.dtype_q, shapes.dtype_kv, shapes.dtype_out))
    tensors.add("query", dtype_q, tokens, shapes.heads_q, shapes.head_dim)
    tensors.add("out", dtype_out, tokens, shapes.heads_q, dim_v)
    if shapes.operation == "ragged":
        kv_tokens = shapes.batch * shapes.kv_len
        tensors.add("key", dtype_kv, kv_tokens, shapes.heads_kv, shapes.head_dim)
        tensors.add("value", dtype_kv, kv_tokens, shapes.heads_kv, dim_v)
    else:
        _add_pages(shapes, tensors, dtype_kv, tokens, dim_v)
    if shapes.dtype_out == "e2m1":
        tensors.add("out_scale_factor", "float8_e4m3fn", tokens, shapes.heads_q * dim_v // 16)
    tensors.add("seq_lens", "int32", shapes.batch)
    if shapes.operation != "decode" or shapes.tokens is not None:
        tensors.add("cum_seq_lens_q", "int32", shapes.batch + 1)
    if shapes.top_k_lens:
        tensors.add("sparse_mla_top_k_lens", "int32", tokens)
    if shapes.operation != "decode":
        tensors.add("cum_seq_lens_kv", "int32", shapes.batch + 1)
    if shapes.lse:
        tensors.add("lse", "float32", tokens, shapes.heads_q)
    tensors.add("workspace_buffer", "uint8", shapes.workspace)
    return tensors


def _add_pages(shapes: Shapes, tensors: _Tensors, dtype: str, tokens: int, dim_v: int) -> None:
    width = ceil_div(shapes.kv_len, shapes.page)
    pool = (shapes.batch * width, shapes.heads_kv, shapes.page)
    tensors.add("key_cache", dtype, *pool, shapes.head_dim)
    if dim_v == shapes.head_dim:
        tensors.add("value_cache", dtype, *pool, dim_v)
    else:
        tensors["value_cache"] = tensors["key_cache"]
    if shapes.dtype_kv == "e2m1":
        tensors.add("key_block_scales", "float8_e4m3fn", *pool, shapes.head_dim // 16)
        tensors.add("value_block_scales", "float8_e4m3fn", *pool, dim_v // 16)
    table = (shapes.batch, width) if shapes.shared_index else (shapes.batch, 2, width)
    if shapes.top_k:
        table = (tokens, shapes.top_k) if shapes.tokens is not None else (shapes.batch, shapes.q_len, shapes.top_k)
    tensors.add("block_tables", "int32", *table)


def _tensor_dtype(word: str) -> str:
    if word not in DTYPES:
        raise UsageError(f"dtype {word!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[word]
