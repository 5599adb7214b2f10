"""Context attention (prefill): the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

from ...dtypes import DTYPES
from ...errors import UsageError
from ...kernels.native.launches import NativeLaunch
from ...kernels.native.prefill.plan import ContextProblem, context_launches, copy_of_cache, resized_launches
from ...kernels.native.prefill.select import (
    HEAD_DIMS,
    MAX_GROUP,
    VALUE_DIMS,
    ContextSelections,
    ContextShape,
    select_context_launches,
)
from ...kernels.native.problem import CacheStrides
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...tensor import TensorView
from ...values import dataclass, replaced
from ..attention_operator import (
    SCALE_TENSORS,
    SCALES,
    AttentionCall,
    AttentionOperator,
    AttentionOptions,
    check_query_sums,
    default_scale,
)
from ..backends import AUTO
from ..call_sizes import MOST, CallSizes, Explained
from ..checks import check_lse_base, check_shape, check_window, float32_number, listed, token_stride
from ..fast_path.operator_function import operator_function
from ..operator import LENGTHS, Given, OutputForm, Resizer, TensorArg, shape_of
from ..paged_cache import (
    E4M3,
    KV_SCALE_TENSORS,
    KV_SCALES,
    PAGE_SIZES,
    cache_view,
    check_kv_scales,
    check_page_size,
    check_table,
    scale_strides,
    strides_of,
    value_table_offset,
)
from ..pipeline import plan_call, run_call, torch_op
from ..resizing import Sizes, resizer_of, with_two_requests
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, KvLayout, LseBase, Stream
    from ...tensor import OutT, QueryT, Scale, Tensor

DTYPES_16 = ("bfloat16", "float16")
_KV_DTYPES = (*DTYPES_16, E4M3)
_SAME = {dtype: (dtype,) for dtype in _KV_DTYPES}
Q_DTYPES = {**{dtype: (dtype,) for dtype in DTYPES_16}, E4M3: DTYPES_16}
_MOST = 1 << 30  # tokens: positions and windows added to them fit an int32
_MOST_CAP = 2.0**15  # scores are then off by 0.004: the error of tanh in float32, times the cap
_LEAST_RESIZED = 2  # tokens: the stride between those of one does not count


@dataclass(frozen=True, slots=True)
class ContextOptions(AttentionOptions):
    """The options of a context attention; see ``context_attention``."""

    k_scale: float = 1.0
    v_scale: float = 1.0
    kv_layout: str = "NHD"
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    logit_soft_cap: float = 0.0
    lse_base: str = "2"
    lse_sink: bool = True

    @property
    def factors(self) -> tuple[float, float]:
        """As ``AttentionOptions``; those of keys and values are parts of them."""
        return self.softmax_scale * self.k_scale, self.output_scale * self.v_scale

    def bounded(self, max_seq_len: int) -> ContextOptions:
        """As ``AttentionOptions``; a window wider than all keys hides nothing more."""
        window = min(self.window_left, max_seq_len)
        if (max_seq_len, window) == (self.max_seq_len, self.window_left):
            return self
        return replaced(self, max_seq_len=max_seq_len, window_left=window)


def _kv_view(view: TensorView, name: str, options: Any) -> TensorView:
    """K or V with heads behind tokens: ``[tokens, kv_heads, head_dim]``, or that behind pages or requests."""
    if len(view.shape) == 4:
        return cache_view(view, name, options.kv_layout)
    if len(view.shape) != 3 or options.kv_layout != "NHD":
        words = "[tokens, kv_heads, head_dim]" if options.kv_layout == "NHD" else "4 dimensions"
        raise UsageError(f"shape {view.shape}, expected {words} in layout {options.kv_layout}", argument=name)
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
_TENSORS = (
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
    *SCALE_TENSORS,
    *KV_SCALE_TENSORS,
)


def is_paged(call: AttentionCall) -> bool:
    """Return whether keys and values lie in pages."""
    return call.tensors.get("page_table") is not None


def _capacity(call: AttentionCall) -> int:
    """The most keys that a request can have."""
    k, table = call.tensors["k"], call.tensors.get("page_table")
    if table is not None:
        return table.shape[-1] * k.shape[1]
    return k.shape[-3]


def _check(call: AttentionCall) -> None:
    _check_queries(call)
    _check_keys(call)
    call.tensors.check_dtypes()
    _check_shapes(call)
    call.tensors.check_memory()
    for name, trailing in (("q", 2), ("out", 2), ("lse", 1)):
        view = call.tensors.get(name)
        if view is not None:
            token_stride(name, view, trailing)
    _check_options(call)


def _check_queries(call: AttentionCall) -> None:
    shape, bound = call.q.shape, call.options.max_q_len
    if call.ragged:
        check_query_sums(call.tensors["q_cu_seq_lens"])
        if len(shape) != 3:
            raise UsageError(f"shape {shape} with q_cu_seq_lens, expected [tokens, q_heads, head_dim]", argument="q")
        if bound is not None and not 1 <= bound <= _MOST:
            raise UsageError(f"expected 1 to {_MOST}", argument="max_q_len", value=bound)
    elif len(shape) != 4:
        raise UsageError(
            f"shape {shape}, expected [batch, q_len, q_heads, head_dim], or [tokens, q_heads, head_dim] with "
            "q_cu_seq_lens",
            argument="q",
        )
    elif bound is not None:
        raise UsageError("expected only with q_cu_seq_lens", argument="max_q_len", value=bound)
    if not 1 <= prod(shape[:-2]) <= _MOST or shape[-2] < 1:
        raise UsageError(f"shape {shape}, expected 1 to {_MOST} tokens of 1 head or more", argument="q")
    if shape[-1] not in HEAD_DIMS:
        raise UsageError(f"head dimension {shape[-1]}, expected {listed(HEAD_DIMS)}", argument="q")


def _check_keys(call: AttentionCall) -> None:
    k, tensors = call.tensors["k"], call.tensors
    heads, columns = call.q.shape[-2:]
    if is_paged(call):
        if len(k.shape) != 4 or k.shape[0] < 1:
            raise UsageError(
                f"shape {k.shape} with page_table, expected [pages, page_size, kv_heads, head_dim]", argument="k"
            )
        check_table(tensors["page_table"], call.batch, separate=True)
        check_page_size("k", k.shape[1], tensors["page_table"].shape[-1], k.shape[2])
        if tensors.get("seq_lens") is None:
            raise UsageError("None with page_table, expected the lengths", argument="seq_lens")
        if tensors.get("kv_cu_seq_lens") is not None:
            raise UsageError("given with page_table, expected seq_lens alone", argument="kv_cu_seq_lens")
    elif (len(k.shape) == 3) != (tensors.get("kv_cu_seq_lens") is not None):
        raise UsageError(
            f"shape {k.shape}, expected [tokens, kv_heads, head_dim] with kv_cu_seq_lens, or "
            "[batch, kv_len, kv_heads, head_dim] without",
            argument="k",
        )
    elif not 1 <= prod(k.shape[:-2]) <= _MOST:
        raise UsageError(f"shape {k.shape}, expected 1 to {_MOST} tokens", argument="k")
    kv_heads = k.shape[-2]
    if kv_heads < 1 or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise UsageError(
            f"{heads} heads over {kv_heads} KV heads, expected a multiple of {kv_heads}: 1 to {MAX_GROUP} "
            "query heads per KV head",
            argument="q",
        )
    lead = k.shape[:-2] if is_paged(call) or len(k.shape) == 3 else (call.batch, k.shape[1])
    check_shape("k", k, (*lead, kv_heads, columns))
    check_shape("v", tensors["v"], (*k.shape[:-1], VALUE_DIMS[columns]))


def _check_shapes(call: AttentionCall) -> None:
    tensors, batch, kv_heads = call.tensors, call.batch, call.tensors["k"].shape[-2]
    tensors.check_shapes(
        out=[(*call.q.shape[:-1], VALUE_DIMS[call.q.shape[-1]])],
        lse=[call.q.shape[:-1]],
        seq_lens=[(batch,)],
        kv_cu_seq_lens=[(batch + 1,)],
        sinks=[(call.q_heads,), (kv_heads, call.q_heads // kv_heads)],
    )
    if tensors["out"].dtype != call.q.dtype:
        raise UsageError(f"dtype {tensors['out'].dtype}, expected {call.q.dtype}, like q", argument="out")
    check_kv_scales(tensors, tensors["k"].dtype, batch, kv_heads)


def _check_options(call: AttentionCall) -> None:
    options = call.options
    bound, most = options.max_seq_len, min(_capacity(call), _MOST)
    if not 0 <= bound <= most:
        raise UsageError(
            f"expected 0 to {most}, the maximum number of keys of a request", argument="max_seq_len", value=bound
        )
    for name in ("window_left", "window_right"):
        check_window(name, getattr(options, name))
    if options.causal and options.window_right > 0:
        raise UsageError("expected -1 or 0 with causal=True", argument="window_right", value=options.window_right)
    check_lse_base(options.lse_base)
    cap = float32_number("logit_soft_cap", options.logit_soft_cap)
    if cap != 0 and not 1 / _MOST_CAP <= cap <= _MOST_CAP:
        raise UsageError(
            f"expected 0 (none) or {1 / _MOST_CAP:.2g} to {_MOST_CAP:g}: beyond, tanh in float32 leaves scores inexact",
            argument="logit_soft_cap",
            value=cap,
        )


def _problem(call: AttentionCall) -> ContextProblem:
    """The native problem of a checked call."""
    tensors, options = call.tensors, call.options
    softmax_scale, output_scale = options.factors
    q, k, out, lse, table = call.q, tensors["k"], tensors["out"], tensors.get("lse"), tensors.get("page_table")
    tokens = prod(q.shape[:-2])
    return ContextProblem(
        dtype=DTYPES[q.dtype].short,
        kv_dtype=DTYPES[k.dtype].short,
        batch=call.batch,
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
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        lse_natural=options.lse_base == "e",
        lse_with_sink=options.lse_sink,
        q_strides=_row_strides("q", q),
        out_strides=_row_strides("out", out),
        lse_strides=(token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        k_strides=_kv_strides(k),
        v_strides=_kv_strides(tensors["v"]),
        k_scale_strides=scale_strides(tensors.get("k_scale")),
        v_scale_strides=scale_strides(tensors.get("v_scale")),
        scale_tensors=frozenset(name for name in KV_SCALES if tensors.get(name) is not None),
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


def _kv_strides(view: TensorView) -> CacheStrides:
    strides = strides_of(view)
    return CacheStrides(*(strides if len(strides) == 3 else (view.shape[-1], *strides)))


def _launches(call: AttentionCall, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[Any]]:
    problem = _problem(call)
    shape = _shape(call, problem)
    selections = select_context_launches(release.kernels, shape, device)
    return context_launches(selections, shape, problem, release.file_of)


def _resizer(call: AttentionCall, device: DeviceFacts, release: NativeRelease) -> Resizer | None:
    """As ``Operator``, for ragged queries over pages."""
    like = with_two_requests(call, _check) if call.ragged and is_paged(call) else None
    if like is None:
        return None
    problem = _problem(like)
    shape = _shape(like, problem)

    def fits(sizes: Sizes) -> bool:
        return _LEAST_RESIZED <= sizes["tokens"] <= _MOST and 1 <= sizes["q_len"] <= _MOST

    def select(sizes: Sizes) -> tuple[ContextSelections, ContextProblem]:
        changes: dict[str, Any] = {**sizes, "q_len": min(sizes["tokens"], sizes["q_len"])}
        other = replaced(problem, **changes)
        other_shape = replaced(shape, copied=copy_of_cache(other), **changes)
        return select_context_launches(release.kernels, other_shape, device), other

    def plan(selections: ContextSelections, other: ContextProblem) -> Sequence[NativeLaunch[Any]]:
        return context_launches(selections, _shape(like, other), other, release.file_of)

    return resizer_of(like, fits, select, plan, resized_launches)


def _shape(call: AttentionCall, problem: ContextProblem) -> ContextShape:
    return ContextShape(
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        head_dim=problem.head_dim,
        group=problem.heads // problem.kv_heads,
        kv_heads=problem.kv_heads,
        batch=problem.batch,
        tokens=problem.tokens,
        max_seq_len=problem.max_seq_len,
        soft_cap=problem.soft_cap > 0,
        batch_invariant=call.options.batch_invariant,
        convertible=_is_convertible(call, problem),
        copied=copy_of_cache(problem),
        splittable=_is_splittable(call),
        q_len=problem.q_len,
    )


def _is_convertible(call: AttentionCall, problem: ContextProblem) -> bool:
    """Return whether attention over a 16-bit copy of the cache is the same, and reads all of it: no window hides keys
    from all rows, and scales of keys and of values are numbers, or one tensor each in place of the other scales."""
    strides = (*problem.k_scale_strides, *problem.v_scale_strides)
    pairs = (("k_scale", "softmax_scale"), ("v_scale", "output_scale"))
    twice = any(call.tensors.get(one) is not None and call.tensors.get(other) is not None for one, other in pairs)
    return problem.window_left < 0 and not any(strides) and not twice


def _is_splittable(call: AttentionCall) -> bool:
    """Return whether keys may be split: no window leaves few of them, and the merge can tell the log-sum-exp."""
    options, tensors = call.options, call.tensors
    without_sink = tensors.get("lse") is not None and tensors.get("sinks") is not None and not options.lse_sink
    return options.window_left < 0 and not without_sink


def _output(arguments: Given) -> OutputForm:
    q = arguments["q"]
    shape = shape_of(q, "q")
    return OutputForm(q, (*shape[:-1], *[VALUE_DIMS.get(columns, columns) for columns in shape[-1:]]))


CONTEXT_ATTENTION = AttentionOperator(
    name="context_attention",
    tensors=_TENSORS,
    options=ContextOptions,
    scales=(*SCALES, *KV_SCALES),
    check=_check,
    launches=_launches,
    resizer=_resizer,
    output=_output,
    capacity=_capacity,
    scale=default_scale,
)


def _shape_of(sizes: CallSizes) -> ContextShape:
    heads_kv = 8 if sizes.heads_kv is None else sizes.heads_kv
    sizes.check(MOST, MOST, PAGE_SIZES)
    if sizes.head_dim not in HEAD_DIMS:
        raise UsageError(f"expected one of {', '.join(map(str, HEAD_DIMS))}", argument="head_dim", value=sizes.head_dim)
    value_dim = VALUE_DIMS[sizes.head_dim]
    if sizes.head_dim_v not in (None, value_dim):
        raise UsageError(
            f"expected {value_dim} with head_dim={sizes.head_dim}", argument="head_dim_v", value=sizes.head_dim_v
        )
    if not 1 <= heads_kv <= MOST or sizes.heads_q % heads_kv or sizes.heads_q > MAX_GROUP * heads_kv:
        raise UsageError(
            f"expected 1 to {MAX_GROUP} for each of heads_kv={heads_kv}", argument="heads_q", value=sizes.heads_q
        )
    dtype = sizes.query_dtype(Q_DTYPES)
    if sizes.dtype_out not in (None, dtype):
        raise UsageError(f"expected {dtype}, like the queries", argument="dtype_out", value=repr(sizes.dtype_out))
    return ContextShape(
        dtype=dtype,
        kv_dtype=sizes.dtype_kv,
        head_dim=sizes.head_dim,
        group=sizes.heads_q // heads_kv,
        kv_heads=heads_kv,
        batch=sizes.batch,
        tokens=sizes.batch * sizes.q_len if sizes.tokens is None else max(1, sizes.tokens),
        max_seq_len=sizes.kv_len,
        soft_cap=sizes.soft_cap,
        batch_invariant=sizes.batch_invariant,
        splittable=not sizes.window,
        q_len=sizes.q_len,
    )


EXPLAINED = Explained(
    CONTEXT_ATTENTION.name,
    "context",
    lambda _: True,
    _shape_of,
    select_context_launches,
)


class ContextTensors(TypedDict):
    """The tensors of a context attention by name, as they are declared; its scales may be numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor | None
    page_table: Tensor | None
    seq_lens: Tensor | None
    q_cu_seq_lens: Tensor | None
    kv_cu_seq_lens: Tensor | None
    sinks: Tensor | None
    softmax_scale: Scale | None
    output_scale: Scale | None
    k_scale: Scale | None
    v_scale: Scale | None


class ContextAttentionPlan(StepPlan):
    """A context attention; made by ``plan_context_attention``."""

    @operator_function(scales=SCALES)
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        page_table: Tensor | None = None,
        seq_lens: Tensor | None = None,
        q_cu_seq_lens: Tensor | None = None,
        kv_cu_seq_lens: Tensor | None = None,
        sinks: Tensor | None = None,
        softmax_scale: Scale | None = None,
        output_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``context_attention``.

        The other arguments and the errors are those of ``PagedDecodePlan.run``.
        """
        self.run_step(
            ContextTensors(
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse,
                page_table=page_table,
                seq_lens=seq_lens,
                q_cu_seq_lens=q_cu_seq_lens,
                kv_cu_seq_lens=kv_cu_seq_lens,
                sinks=sinks,
                softmax_scale=softmax_scale,
                output_scale=output_scale,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
            workspace,
            stream,
            max_seq_len=max_seq_len,
        )


def plan_context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_seq_len: int,
    page_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    q_cu_seq_lens: Tensor | None = None,
    kv_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    softmax_scale: Scale | None = None,
    output_scale: Scale = 1.0,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    lse_base: LseBase = "2",
    lse_sink: bool = True,
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> ContextAttentionPlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``context_attention``.

    Planning launches and loads nothing and reads no tensor: only dtypes, shapes and strides matter. Therefore ``out``
    is required. The plan fixes whether there are a page table, lengths, sinks, a log-sum-exp and scales on the device;
    every run must pass the same ones. ``device_facts`` plans for a described device instead of that of ``q``.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = ContextTensors(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        page_table=page_table,
        seq_lens=seq_lens,
        q_cu_seq_lens=q_cu_seq_lens,
        kv_cu_seq_lens=kv_cu_seq_lens,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = ContextOptions(
        max_seq_len=max_seq_len,
        kv_layout=kv_layout,
        max_q_len=max_q_len,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logit_soft_cap=logit_soft_cap,
        batch_invariant=batch_invariant,
        lse_base=lse_base,
        lse_sink=lse_sink,
        backend=backend,
        enable_pdl=enable_pdl,
    )
    return plan_call(
        ContextAttentionPlan, CONTEXT_ATTENTION, tensors, options, runtime=runtime, device_facts=device_facts
    )


@operator_function(scales=SCALES, any_size=True, op=lambda _: torch_op(CONTEXT_ATTENTION))
def context_attention(
    q: QueryT,
    k: Tensor,
    v: Tensor,
    *,
    max_seq_len: int,
    page_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    q_cu_seq_lens: Tensor | None = None,
    kv_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logit_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    softmax_scale: Scale | None = None,
    output_scale: Scale = 1.0,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    lse_base: LseBase = "2",
    lse_sink: bool = True,
    batch_invariant: bool = False,
    out: OutT | None = None,
    lse: Tensor | None = None,
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> QueryT | OutT:
    """Attention of many query tokens per request: prefill, chunked prefill, cross attention.

    The last query token of a request is at the position of its last key: query token i is at position ``kv_len - q_len
    + i``. Keys and values are paged (``page_table``), ragged (``kv_cu_seq_lens``), or of one size for all requests
    (neither). With ``batch_invariant`` the output of a token depends, bit for bit, only on its own query, its keys and
    the options, not on the chunking of a prompt, other requests, pages, bounds or the GPU's schedule. Without it the
    keys of few query tokens are split, by bounds and sizes, into parts that are attended to at once, and merged.

    Args:
        q: ``[tokens, q_heads, head_dim]`` with ``q_cu_seq_lens``, or ``[batch, q_len, q_heads, head_dim]``. bfloat16 or
            float16, head_dim 64, 128, 192 or 256, q_heads 1 to 64 times kv_heads. For q, k, v and out, addresses and
            strides are multiples of 16 bytes, with one stride between all tokens.
        k: of q's dtype, or float8_e4m3fn. With ``page_table`` ``[pages, page_size, kv_heads, head_dim]`` (NHD) or
            ``[pages, kv_heads, page_size, head_dim]`` (HND), page_size a power of two from 16 to 1024, or any if
            ``page_table`` has one column: a page then holds a request; with ``kv_cu_seq_lens`` ``[tokens, kv_heads,
            head_dim]``; else ``[batch, kv_len, kv_heads, head_dim]`` (NHD) or with heads in front of tokens (HND).
        v: like ``k``, of its dtype, with 128 columns if head_dim is 192 (MLA prefill). K and V may be two views of one
            tensor. Values that a query token sees must be finite; memory past a request's length may hold anything.
            e4m3 keys and values are converted to q's dtype exactly: the output has the bits that a 16-bit cache of the
            same numbers would give, with ``k_scale`` as a factor of ``softmax_scale`` and ``v_scale`` of
            ``output_scale``. A NaN code is NaN with float16 queries, and 480 with its sign with bfloat16 queries.
        max_seq_len: upper bound on the number of keys of a request. The launch depends on this bound, not on the
            lengths.
        page_table: int32 ``[batch, columns]``, the page ids of each request in order, or ``[batch, 2, columns]``, those
            of its keys and those of its values. Entries past a request's length or before its window are not read.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, contiguous. Required with ``page_table``; otherwise
            optional, for requests that use only their first keys. With length 0, the output is 0.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: prefix sums of the numbers of query tokens, from 0
            to ``tokens``. A request may have no query token. None: all requests have the same number.
        kv_cu_seq_lens: the same for ragged keys and values.
        max_q_len: upper bound on the query tokens of a request; only with ``q_cu_seq_lens``. None: ``tokens``.
        causal: a token sees no key after its own position.
        window_left: how many keys before its own position a token sees; -1: all.
        window_right: how many keys after its own position a token sees, without ``causal``; -1: all.
        logit_soft_cap: scores become ``cap * tanh(score / cap)`` after the softmax scale, a cap from
            2^-15 to 2^15; 0: no cap.
        sinks: float32 ``[q_heads]`` or ``[kv_heads, group]``, contiguous: one logit per head that is added to the
            softmax denominator only. None: no sinks.
        softmax_scale: factor of the scores: a number, or a one-element float32 tensor on the device, which the kernel
            reads. None: 1 / sqrt(head_dim).
        output_scale: factor of the output, like ``softmax_scale``.
        k_scale, v_scale: factors of keys and of values: numbers; or, with e4m3 keys and values, float32 tensors on the
            device of one element, ``[kv_heads]`` or ``[batch, kv_heads]`` with any strides (0 too), which the kernel
            reads when it runs. None: 1.
        kv_layout: "NHD" or "HND".
        lse_base: "2" or "e", the base of the log-sum-exp.
        lse_sink: whether the log-sum-exp includes the sink.
        batch_invariant: give a token the bits that ``paged_decode`` with ``batch_invariant`` gives it, as a draft or in
            a step of its own, if head_dim is 64 or 128. At every head_dim its output then depends neither on other
            requests nor on the chunks of its prompt.
        out: like ``q``, with the columns of ``v``. None allocates it if ``q`` is a torch tensor.
        lse: float32, shaped like ``q`` without head_dim, with one stride between all tokens. It receives the
            log-sum-exp of the scores, without the output scale. None: not computed.
        workspace: scratch memory that belongs to ``stream``. None: the one that the cached plan keeps for this stream.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream if
            ``q`` is a torch tensor, otherwise the legacy default stream.
        backend: "auto" (a backend that was measured on this compute capability) or the name of a backend.
        enable_pdl: launch with programmatic dependent launch (stream serialization).
        runtime: the runtime to use. None: the process's default runtime.

    Returns:
        ``out``. A token that sees no key has output 0 and log-sum-exp -inf (or that of the sink, if ``lse_sink``).

    Raises:
        UsageError: an argument is invalid.
        BackendError: no backend supports the call on this device.
        WorkspaceError: the workspace is too small, or the stream is capturing and has no workspace yet.
        MissingError, SourceError, CorruptError: the kernel is not available.
        DeviceError: the driver or the ABI gate rejects the launch.
    """
    tensors = ContextTensors(
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        page_table=page_table,
        seq_lens=seq_lens,
        q_cu_seq_lens=q_cu_seq_lens,
        kv_cu_seq_lens=kv_cu_seq_lens,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = ContextOptions(
        max_seq_len=max_seq_len,
        kv_layout=kv_layout,
        max_q_len=max_q_len,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logit_soft_cap=logit_soft_cap,
        batch_invariant=batch_invariant,
        lse_base=lse_base,
        lse_sink=lse_sink,
        backend=backend,
        enable_pdl=enable_pdl,
    )
    result: QueryT | OutT = run_call(
        ContextAttentionPlan, CONTEXT_ATTENTION, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
