"""Sparse MLA decode: the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, TypedDict

from ...dtypes import DTYPES, ITEM_BYTES
from ...errors import UsageError
from ...kernels.native.launches import NativeLaunch
from ...kernels.native.mla.select import MAX_HEADS
from ...kernels.native.sparse_mla.plan import SparseMlaProblem, sparse_mla_launch
from ...kernels.native.sparse_mla.select import (
    MAX_WIDTH,
    ROW_FORMS,
    SparseMlaSelection,
    SparseMlaShape,
    select_sparse_mla,
)
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...tensor import TensorView
from ...values import dataclass
from ..attention_operator import SCALE_TENSORS, SCALES
from ..backends import AUTO
from ..call_sizes import CallSizes, Explained
from ..checks import check_lse_base
from ..fast_path.operator_function import operator_function
from ..latent_cache import OUT_DTYPES
from ..operator import Call, Given, Operator, OutputForm, TensorArg, shape_of
from ..pipeline import plan_call, run_call, torch_op
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, LseBase, Stream
    from ...tensor import OutT, QueryT, Scale, Tensor

LATENT = 512
_MOST_ROWS = 1 << 31
_BYTE_DTYPES = ("uint8", "float8_e4m3fn")


class SparseMlaTensors(TypedDict):
    """The tensors of a sparse MLA decode by name, as ``SPARSE_MLA_DECODE`` declares them; its scales may be numbers."""

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    topk_lens: Tensor | None
    out: Tensor | None
    lse: Tensor | None
    sinks: Tensor | None
    softmax_scale: Scale | None
    output_scale: Scale | None


@dataclass(frozen=True, slots=True)
class SparseMlaOptions:
    """The options of a sparse MLA decode; see ``sparse_mla_decode``. None: no number."""

    softmax_scale: float | None = None
    output_scale: float | None = None
    lse_base: str = "2"
    lse_sink: bool = True
    batch_invariant: bool = False
    backend: str = AUTO
    enable_pdl: bool = False


def _cache_view(cache: TensorView, _: SparseMlaOptions) -> TensorView:
    """The cache in any of its forms as ``[pages, page_size, width]``: the same memory.

    Raises:
        UsageError: it has another rank, or more heads than one.
    """
    shape, strides = cache.shape, cache.strides
    if len(shape) == 2:
        shape, strides = (1, *shape), (shape[0] * strides[0], *strides)
    if len(shape) == 4 and 1 in shape[1:3]:
        rows = 1 if shape[2] == 1 else 2
        shape, strides = (shape[0], shape[rows], shape[3]), (strides[0], strides[rows], strides[3])
    if len(shape) != 3:
        raise UsageError(
            f"shape {cache.shape}, expected [pages, page_size, width], with a dimension of 1 before or after "
            "page_size, or [rows, width]",
            argument="kv_cache",
        )
    return TensorView(cache.pointer, cache.dtype, shape, strides, cache.device)


def _row_form(cache: TensorView) -> str:
    """The form in which rows of the cache lie in memory, one of ``ROW_FORMS``.

    Raises:
        UsageError: there is no such form.
    """
    width = cache.shape[2]
    if cache.dtype in _BYTE_DTYPES:
        if width == ROW_FORMS["scaled_e4m3"][1]:
            return "scaled_e4m3"
        raise UsageError(
            f"rows of {width} bytes, expected {ROW_FORMS['scaled_e4m3'][1]}: 512 float8_e4m3fn, 4 float32 "
            "scales, 64 bfloat16; other rows of 8-bit numbers, among them the 584 bytes of DeepSeek V4, have no kernel",
            argument="kv_cache",
        )
    for form in ("bf16", "bf16_nope"):
        if width == ROW_FORMS[form][0]:
            return form
    raise UsageError(f"rows of {width} bfloat16, expected 576 or 512", argument="kv_cache")


def _place(cache: TensorView) -> tuple[tuple[int, int], int]:
    """The bytes between pages and between rows, and the log2 of the rows of a page; a dense pool has one-row pages.

    Raises:
        UsageError: pages have gaps, and a size that is no power of two.
    """
    pages, page_size, _ = cache.shape
    page, row = (stride * ITEM_BYTES[cache.dtype] for stride in cache.strides[:2])
    if page_size == 1:
        return (page, page), 0
    if pages == 1 or page == page_size * row:
        return (row, row), 0
    if page_size.bit_count() != 1:
        raise UsageError(
            f"page size {page_size} with gaps between pages, expected a power of two or pages without gaps",
            argument="kv_cache",
        )
    return (page, row), page_size.bit_length() - 1


def _check_sizes(q: TensorView, cache: TensorView, lists: TensorView) -> None:
    if len(q.shape) != 3 or q.shape[0] < 1:
        raise UsageError(f"shape {q.shape}, expected [tokens, heads, columns] of 1 token or more", argument="q")
    tokens, heads, columns = q.shape
    if not 1 <= heads <= MAX_HEADS:
        raise UsageError(f"{heads} heads, expected 1 to {MAX_HEADS}", argument="q")
    expected, rows = ROW_FORMS[_row_form(cache)][0], prod(cache.shape[:2])
    if columns != expected:
        raise UsageError(f"{columns} columns per head, expected {expected} for these rows of kv_cache", argument="q")
    if not 1 <= rows < _MOST_ROWS:
        raise UsageError(f"{rows} rows, expected 1 to {_MOST_ROWS - 1}", argument="kv_cache")
    _place(cache)
    if len(lists.shape) != 2 or lists.shape[0] != tokens or not 1 <= lists.shape[1] <= MAX_WIDTH:
        raise UsageError(
            f"shape {lists.shape}, expected [{tokens}, width] with a width of 1 to {MAX_WIDTH}", argument="indices"
        )


def _check(call: Call) -> None:
    tensors, options = call.tensors, call.options
    tensors.check_dtypes()
    _check_sizes(tensors["q"], tensors["kv_cache"], tensors["indices"])
    tokens, heads, _ = tensors["q"].shape
    tensors.check_shapes(
        topk_lens=[(tokens,)],
        out=[(tokens, heads, LATENT)],
        lse=[(tokens, heads)],
        sinks=[(heads,)],
    )
    if options.softmax_scale is None and tensors.get("softmax_scale") is None:
        raise UsageError("None, expected a number or a float32 CUDA tensor of one element", argument="softmax_scale")
    check_lse_base(options.lse_base)
    tensors.check_memory()


def _launches(call: Call, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[SparseMlaSelection]]:
    tensors, options = call.tensors, call.options
    q, cache, lists, out = (tensors[name] for name in ("q", "kv_cache", "indices", "out"))
    lse = tensors.get("lse")
    shape = SparseMlaShape(
        cache_rows=_row_form(cache),
        heads=q.shape[1],
        batch=q.shape[0],
        width=lists.shape[1],
        batch_invariant=options.batch_invariant,
    )
    cache_bytes, page_size_log2 = _place(cache)
    problem = SparseMlaProblem(
        shape=shape,
        latent=LATENT,
        out_dtype=DTYPES[out.dtype].short,
        q_strides=(q.strides[0], q.strides[1]),
        out_strides=(out.strides[0], out.strides[1]),
        lse_strides=(lse.strides[0], lse.strides[1]) if lse else (0, 0),
        indices_stride=lists.strides[0],
        cache_bytes=cache_bytes,
        cache_rows=prod(cache.shape[:2]),
        page_size_log2=page_size_log2,
        lse_sink=options.lse_sink,
        lse_base_e=options.lse_base == "e",
        softmax_scale=1.0 if options.softmax_scale is None else options.softmax_scale,
        output_scale=1.0 if options.output_scale is None else options.output_scale,
        programmatic_serialization=options.enable_pdl,
    )
    selection = select_sparse_mla(release.kernels, shape, device)
    return [sparse_mla_launch(selection, problem, release.file_of(selection.kernel))]


def _output(arguments: Given) -> OutputForm:
    q = arguments["q"]
    shape = shape_of(q, "q")
    if len(shape) != 3:
        raise UsageError(f"shape {shape}, expected [tokens, heads, columns]", argument="q")
    return OutputForm(q, (*shape[:-1], LATENT))


SPARSE_MLA_DECODE = Operator(
    name="sparse_mla_decode",
    tensors=(
        TensorArg("q", ("bfloat16",), alignment=16, stride_bytes=16, rows=True),
        TensorArg(
            "kv_cache",
            ("bfloat16", *_BYTE_DTYPES),
            alignment=16,
            stride_bytes=16,
            rows=True,
            resident=True,
            canonical=_cache_view,
        ),
        TensorArg("indices", ("int32",), rows=True),
        TensorArg("topk_lens", ("int32",), optional=True, contiguous=True),
        TensorArg("out", OUT_DTYPES, alignment=16, stride_bytes=16, rows=True, written=True),
        TensorArg("lse", ("float32",), optional=True, written=True),
        TensorArg("sinks", ("float32",), optional=True, contiguous=True),
        *SCALE_TENSORS,
    ),
    options=SparseMlaOptions,
    scales=SCALES,
    check=_check,
    launches=_launches,
    output=_output,
)


# Types of a cache that lists name rows of, by (type, columns) -> the form of its rows.
_ROWS = {("e4m3", 576): "scaled_e4m3", ("bf16", 576): "bf16", ("bf16", 512): "bf16_nope"}


def _shape_of(sizes: CallSizes) -> SparseMlaShape:
    form = _ROWS.get((sizes.dtype_kv, sizes.head_dim))
    if form is None:
        forms = ", ".join(f"{dtype} with {columns}" for dtype, columns in _ROWS)
        raise UsageError(
            f"with dtype_kv={sizes.dtype_kv}, expected one of {forms}", argument="head_dim", value=sizes.head_dim
        )
    if sizes.dtype_q not in (None, "bf16"):
        raise UsageError("expected bf16", argument="dtype_q", value=repr(sizes.dtype_q))
    sizes.check_output_dtype("bf16")
    sizes.check_only("of sparse MLA", head_dim_v=LATENT, heads_kv=1)
    for name, most in (("heads_q", MAX_HEADS), ("kv_len", MAX_WIDTH)):
        if not 1 <= getattr(sizes, name) <= most:
            raise UsageError(f"expected 1 to {most}", argument=name, value=getattr(sizes, name))
    return SparseMlaShape(
        cache_rows=form,
        heads=sizes.heads_q,
        batch=sizes.all_tokens(),
        width=sizes.kv_len,
        batch_invariant=sizes.batch_invariant,
    )


EXPLAINED = Explained(
    SPARSE_MLA_DECODE.name, "sparse_mla", lambda _: True, _shape_of, lambda *values: (select_sparse_mla(*values),)
)


class SparseMlaDecodePlan(StepPlan):
    """A plan made by ``plan_sparse_mla_decode``."""

    @operator_function()
    def run(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        topk_lens: Tensor | None = None,
        sinks: Tensor | None = None,
        softmax_scale: Scale | None = None,
        output_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``sparse_mla_decode``, whose errors it has.

        Pass exactly the optional tensors that the plan was made with; a scale that is left out is the plan's.
        """
        self.run_step(
            SparseMlaTensors(
                q=q,
                kv_cache=kv_cache,
                indices=indices,
                topk_lens=topk_lens,
                out=out,
                lse=lse,
                sinks=sinks,
                softmax_scale=softmax_scale,
                output_scale=output_scale,
            ),
            workspace,
            stream,
        )


def plan_sparse_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    softmax_scale: Scale,
    output_scale: Scale = 1.0,
    topk_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: LseBase = "2",
    lse_sink: bool = True,
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> SparseMlaDecodePlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``sparse_mla_decode``.

    Planning launches and loads nothing and reads no tensor. ``device_facts`` plans for a described device instead of
    the one that ``q`` is on.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = SparseMlaTensors(
        q=q,
        kv_cache=kv_cache,
        indices=indices,
        topk_lens=topk_lens,
        out=out,
        lse=lse,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
    )
    options = SparseMlaOptions(
        lse_base=lse_base, lse_sink=lse_sink, batch_invariant=batch_invariant, backend=backend, enable_pdl=enable_pdl
    )
    return plan_call(
        SparseMlaDecodePlan, SPARSE_MLA_DECODE, tensors, options, runtime=runtime, device_facts=device_facts
    )


@operator_function(op=lambda _: torch_op(SPARSE_MLA_DECODE))
def sparse_mla_decode(
    q: QueryT,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    softmax_scale: Scale,
    output_scale: Scale = 1.0,
    topk_lens: Tensor | None = None,
    sinks: Tensor | None = None,
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
    """Multi-head latent attention of query tokens, each over the rows of a latent cache that its own list names.

    All heads share one cache row per token. A row's first 512 columns are the latent, which is the value; they and the
    rope columns behind them are the key. There is no causal rule: a list decides what its query token sees, so draft
    tokens and requests with different numbers of query tokens are just more tokens. Lists and lengths are read on the
    device: a captured graph replays with what they hold then.

    Args:
        q: bfloat16 ``[tokens, heads, 576]``, or ``[tokens, heads, 512]`` for a cache without rope columns; 1 to 128
            heads. Addresses and strides in multiples of 16 bytes.
        kv_cache: rows of bfloat16, 576 or 512 columns, or of 656 bytes as uint8 or float8_e4m3fn: 512 float8_e4m3fn,
            four float32 scales, each a factor of 128 of them, and 64 bfloat16 rope columns. ``[pages, page_size,
            width]``, ``[pages, page_size, 1, width]``, ``[pages, 1, page_size, width]`` or ``[rows, width]``, strides
            in multiples of 16 bytes. page_size is any if pages follow each other without gaps, else a power of two.
            1 to 2^31 - 1 rows.
        indices: int32 ``[tokens, width]``, width 1 to 32,768: the slots ``page * page_size + offset`` of the rows that
            each query token attends to. Negative entries, anywhere, are holes. A slot outside the cache is a hole too,
            and ``plan.check`` reports it. A slot that occurs twice counts twice.
        softmax_scale: factor of the scores other than 0: a number, or a one-element float32 tensor on the device.
        output_scale: factor of the output, like ``softmax_scale``.
        topk_lens: int32 ``[tokens]``, contiguous: how many entries of each list count, 0 to width. Others are clamped,
            and ``plan.check`` reports them. None: all.
        sinks: float32 ``[heads]``, contiguous: one logit per head (natural exponent) that is added to the softmax
            denominator only. None: no sinks.
        lse_base: base of the log-sum-exp, "2" or "e".
        lse_sink: whether the log-sum-exp includes the sink. Results that ``merge_states`` is to merge must not.
        batch_invariant: make the output of a query token depend, bit for bit, only on its own query, list and
            options, not on the other tokens or the grid.
        out: ``[tokens, heads, 512]``, bfloat16, float16 or float8_e4m3fn (which saturates), addresses and strides in
            multiples of 16 bytes. None allocates a bfloat16 tensor if ``q`` is a torch tensor. A query token without a
            row gets 0.
        lse: float32 ``[tokens, heads]``, any strides, receives the log-sum-exp; -inf for a query token without a row
            and without a sink that it includes. None: not computed.
        workspace, stream, backend, enable_pdl, runtime: as for ``mla_decode``.

    Returns:
        ``out``.

    Raises:
        as ``mla_decode``.
    """
    tensors = SparseMlaTensors(
        q=q,
        kv_cache=kv_cache,
        indices=indices,
        topk_lens=topk_lens,
        out=out,
        lse=lse,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
    )
    options = SparseMlaOptions(
        lse_base=lse_base, lse_sink=lse_sink, batch_invariant=batch_invariant, backend=backend, enable_pdl=enable_pdl
    )
    result: QueryT | OutT = run_call(
        SparseMlaDecodePlan, SPARSE_MLA_DECODE, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
