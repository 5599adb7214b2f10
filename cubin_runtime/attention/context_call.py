"""Context attention as a value: its tensors, its options, and the rules between them."""

from __future__ import annotations

from math import prod
from typing import Any

from ..dtypes import DTYPES
from ..errors import UsageError
from ..kernels.native.prefill.plan import ContextProblem, KvStrides
from ..kernels.native.prefill.select import HEAD_DIMS, MAX_GROUP, VALUE_DIMS
from ..tensor import TensorView
from ..values import dataclass
from .checks import check_shape, integer, listed
from .decode_call import (
    E4M3,
    KV_SCALE_TENSORS,
    KV_SCALES,
    LENGTHS,
    DecodeCall,
    DecodeOptions,
    check_kv_scales,
    scale_strides,
    token_stride,
)
from .operator import TensorArg
from .paged_cache import cache_view, check_page_size, check_table, value_table_offset
from .scales import float32_number

DTYPES_16 = ("bfloat16", "float16")
LSE_BASES = ("2", "e")
_KV_DTYPES = (*DTYPES_16, E4M3)
_SAME = {dtype: (dtype,) for dtype in _KV_DTYPES}
Q_DTYPES = {**{dtype: (dtype,) for dtype in DTYPES_16}, E4M3: DTYPES_16}
_MOST = 1 << 30  # tokens: positions and windows added to them fit an int32


@dataclass(frozen=True, slots=True)
class ContextOptions(DecodeOptions):
    """The options of a context attention; see ``context_attention``."""

    causal: bool = True
    window_right: int = -1
    logit_soft_cap: float = 0.0
    lse_base: str = "2"
    lse_sink: bool = True


def _kv_view(view: TensorView, name: str, options: Any) -> TensorView:
    """K or V with heads behind tokens: ``[tokens, kv_heads, head_dim]``, or that behind pages or requests."""
    if len(view.shape) == 4:
        return cache_view(view, name, options.kv_layout)
    if len(view.shape) != 3 or options.kv_layout != "NHD":
        words = "[tokens, kv_heads, head_dim]" if options.kv_layout == "NHD" else "4 dimensions"
        raise UsageError(f"{name}: shape {view.shape}, expected {words} in layout {options.kv_layout}")
    return view


def _kv_arg(name: str, **dtypes: Any) -> TensorArg:
    return TensorArg(
        name,
        alignment=16,
        stride_bytes=16,
        rows=True,
        canonical=lambda view, options: _kv_view(view, name, options),
        **dtypes,
    )


# Rows are moved in pieces of 16 bytes.
CONTEXT_TENSORS = (
    TensorArg("q", Q_DTYPES, dtypes_by="k", alignment=16, stride_bytes=16, rows=True),
    _kv_arg("k", dtypes=_KV_DTYPES),
    _kv_arg("v", dtypes=_SAME, dtypes_by="k"),
    TensorArg("out", Q_DTYPES, dtypes_by="k", alignment=16, stride_bytes=16, rows=True, written=True),
    TensorArg("lse", ("float32",), optional=True, written=True),
    TensorArg("page_table", ("int32",), optional=True, rows=True),
    TensorArg("seq_lens", LENGTHS, optional=True, contiguous=True),
    TensorArg("q_cu_seq_lens", LENGTHS, optional=True, contiguous=True),
    TensorArg("kv_cu_seq_lens", LENGTHS, optional=True, contiguous=True),
    TensorArg("sinks", ("float32",), optional=True, contiguous=True),
    *(
        TensorArg(name, ("float32",), optional=True, scalar=True, value=f"{name}_device")
        for name in ("softmax_scale", "output_scale")
    ),
    *KV_SCALE_TENSORS,
)


def batch_of(call: DecodeCall) -> int:
    """Requests."""
    sums = call.tensors.get("q_cu_seq_lens")
    return call.q.shape[0] if sums is None else sums.shape[0] - 1


def is_paged(call: DecodeCall) -> bool:
    """Return whether keys and values lie in pages."""
    return call.tensors.get("page_table") is not None


def capacity_of(call: DecodeCall) -> int:
    """The most keys that a request can have."""
    k, table = call.tensors["k"], call.tensors.get("page_table")
    if table is not None:
        return table.shape[-1] * k.shape[1]
    return k.shape[-3]


def check_context(call: DecodeCall) -> None:
    """Check all rules.

    Raises:
        UsageError: the message names the argument.
    """
    _check_queries(call)
    _check_keys(call)
    call.tensors.check_dtypes()
    _check_shapes(call)
    call.tensors.check_devices()
    call.tensors.check_memory()
    for name, trailing in (("q", 2), ("out", 2), ("lse", 1)):
        view = call.tensors.get(name)
        if view is not None:
            token_stride(name, view, trailing)
    _check_options(call)


def _check_queries(call: DecodeCall) -> None:
    shape, bound = call.q.shape, call.options.max_q_len
    if call.ragged:
        sums = call.tensors["q_cu_seq_lens"].shape
        if len(sums) != 1 or sums[0] < 2:
            raise UsageError(f"q_cu_seq_lens: shape {sums}, expected (batch + 1,) for 1 request or more")
        if len(shape) != 3:
            raise UsageError(f"q: shape {shape} with q_cu_seq_lens, expected [tokens, q_heads, head_dim]")
        if bound is not None and not 1 <= integer("max_q_len", bound) <= _MOST:
            raise UsageError(f"max_q_len={bound}: expected 1 to {_MOST}")
    elif len(shape) != 4:
        raise UsageError(
            f"q: shape {shape}, expected [batch, q_len, q_heads, head_dim], or [tokens, q_heads, head_dim] with "
            "q_cu_seq_lens"
        )
    elif bound is not None:
        raise UsageError(f"max_q_len={bound}: expected only with q_cu_seq_lens")
    if not 1 <= prod(shape[:-2]) <= _MOST or shape[-2] < 1:
        raise UsageError(f"q: shape {shape}, expected 1 to {_MOST} tokens of 1 head or more")
    if shape[-1] not in HEAD_DIMS:
        raise UsageError(f"q: head dimension {shape[-1]}, expected {listed(HEAD_DIMS)}")


def _check_keys(call: DecodeCall) -> None:
    k, tensors = call.tensors["k"], call.tensors
    heads, columns = call.q.shape[-2:]
    if is_paged(call):
        if len(k.shape) != 4 or k.shape[0] < 1:
            raise UsageError(f"k: shape {k.shape} with page_table, expected [pages, page_size, kv_heads, head_dim]")
        check_table(tensors["page_table"], batch_of(call), separate=True)
        check_page_size("k", k.shape[1], tensors["page_table"].shape[-1], k.shape[2])
        if tensors.get("seq_lens") is None:
            raise UsageError("seq_lens: None with page_table, expected the lengths")
        if tensors.get("kv_cu_seq_lens") is not None:
            raise UsageError("kv_cu_seq_lens: given with page_table, expected seq_lens alone")
    elif (len(k.shape) == 3) != (tensors.get("kv_cu_seq_lens") is not None):
        raise UsageError(
            f"k: shape {k.shape}, expected [tokens, kv_heads, head_dim] with kv_cu_seq_lens, or "
            "[batch, kv_len, kv_heads, head_dim] without"
        )
    elif not 1 <= prod(k.shape[:-2]) <= _MOST:
        raise UsageError(f"k: shape {k.shape}, expected 1 to {_MOST} tokens")
    kv_heads = k.shape[-2]
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise UsageError(
            f"q: {heads} heads over {kv_heads} KV heads, expected a multiple of {kv_heads}: 1 to {MAX_GROUP} "
            "query heads per KV head"
        )
    lead = k.shape[:-2] if is_paged(call) or len(k.shape) == 3 else (batch_of(call), k.shape[1])
    check_shape("k", k, (*lead, kv_heads, columns))
    check_shape("v", tensors["v"], (*k.shape[:-1], VALUE_DIMS[columns]))


def _check_shapes(call: DecodeCall) -> None:
    tensors, batch, kv_heads = call.tensors, batch_of(call), call.tensors["k"].shape[-2]
    check_shape("out", tensors["out"], (*call.q.shape[:-1], VALUE_DIMS[call.q.shape[-1]]))
    check_shape("lse", tensors.get("lse"), call.q.shape[:-1])
    check_shape("seq_lens", tensors.get("seq_lens"), (batch,))
    check_shape("kv_cu_seq_lens", tensors.get("kv_cu_seq_lens"), (batch + 1,))
    check_shape("sinks", tensors.get("sinks"), (call.q_heads,), (kv_heads, call.q_heads // kv_heads))
    if tensors["out"].dtype != call.q.dtype:
        raise UsageError(f"out: dtype {tensors['out'].dtype}, expected {call.q.dtype}, like q")
    check_kv_scales(tensors, tensors["k"].dtype, batch, kv_heads)
    for name in ("softmax_scale", "output_scale"):
        scale = tensors.get(name)
        if scale is not None and prod(scale.shape) != 1:
            raise UsageError(f"{name}: shape {scale.shape}, expected one element")


def _check_options(call: DecodeCall) -> None:
    options: Any = call.options
    bound, most = integer("max_seq_len", options.max_seq_len), min(capacity_of(call), _MOST)
    if not 0 <= bound <= most:
        raise UsageError(f"max_seq_len={bound}: expected 0 to {most}, the maximum number of keys of a request")
    for name in ("window_left", "window_right"):
        if not -1 <= integer(name, getattr(options, name)) < 1 << 31:
            raise UsageError(f"{name}={getattr(options, name)}: expected -1 (none) or more, below 2^31")
    if options.causal and options.window_right > 0:
        raise UsageError(f"window_right={options.window_right}: expected -1 or 0 with causal=True")
    if options.lse_base not in LSE_BASES:
        raise UsageError(f"lse_base={options.lse_base!r}: expected '2' or 'e'")
    if float32_number("logit_soft_cap", options.logit_soft_cap) < 0:
        raise UsageError(f"logit_soft_cap={options.logit_soft_cap}: expected 0 (none) or more")
    for name in ("softmax_scale", "output_scale", *KV_SCALES):
        float32_number(name, getattr(options, name))


def problem_of(call: DecodeCall) -> ContextProblem:
    """The native problem of a checked call."""
    tensors, options = call.tensors, call.options
    assert isinstance(options, ContextOptions)
    q, k, out, lse, table = call.q, tensors["k"], tensors["out"], tensors.get("lse"), tensors.get("page_table")
    tokens = prod(q.shape[:-2])
    return ContextProblem(
        dtype=DTYPES[q.dtype].short,
        kv_dtype=DTYPES[k.dtype].short,
        batch=batch_of(call),
        tokens=tokens,
        q_len=min(tokens, options.max_q_len or tokens) if call.ragged else q.shape[1],
        heads=call.q_heads,
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=out.shape[-1],
        max_seq_len=options.max_seq_len,
        page_size=k.shape[1] if table else 0,
        num_pages=k.shape[0] if table else 0,
        kv_tokens=0 if table else k.shape[-3],
        ragged=len(k.shape) == 3,
        window_left=options.window_left,
        window_right=0 if options.causal else options.window_right,
        soft_cap=options.logit_soft_cap,
        softmax_scale=options.softmax_scale * options.k_scale,
        output_scale=options.output_scale * options.v_scale,
        lse_natural=options.lse_base == "e",
        lse_with_sink=options.lse_sink,
        q_strides=_row_strides("q", q),
        out_strides=_row_strides("out", out),
        lse_strides=(token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        k_strides=_kv_strides(k),
        v_strides=_kv_strides(tensors["v"]),
        k_scale_strides=scale_strides(tensors.get("k_scale")),
        v_scale_strides=scale_strides(tensors.get("v_scale")),
        table_stride=table.strides[0] if table else 0,
        v_table_offset=value_table_offset(table) if table else 0,
        programmatic_serialization=bool(options.enable_pdl),
    )


def _row_strides(name: str, view: TensorView) -> tuple[int, int]:
    """Elements between tokens and between heads."""
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    head = view.strides[-2] if view.shape[-2] > 1 else view.shape[-1]
    tokens = prod(view.shape[:-2])
    return (token_stride(name, view, 2) if tokens > 1 else view.shape[-1]), head


def _kv_strides(view: TensorView) -> KvStrides:
    sizes = zip(view.shape[:-1], view.strides, strict=False)
    strides = [stride if size > 1 else view.shape[-1] for size, stride in sizes]
    page, token, head = strides if len(strides) == 3 else (view.shape[-1], *strides)
    return KvStrides(page, token, head)
