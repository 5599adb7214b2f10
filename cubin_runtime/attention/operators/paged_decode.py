"""Paged decode (GQA): the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from ...dtypes import DTYPES
from ...errors import UsageError
from ...kernels.native.launches import NativeLaunch
from ...kernels.native.problem import CacheStrides
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...values import dataclass, replaced
from ..attention_operator import SCALES, AttentionCall, AttentionOperator, default_scale
from ..backends import AUTO
from ..call_sizes import MOST, CallSizes, Explained
from ..checks import check_window
from ..decode_rules import (
    GLOBAL_LENS,
    DecodeOptions,
    check_options,
    check_queries,
    check_shapes,
    decode_tensors,
    fits_like,
    problem_values,
)
from ..fast_path.operator_function import operator_function
from ..operator import Given, OutputForm, Resizer, TensorArg, dtype_of, shape_of
from ..paged_cache import (
    E4M3,
    KV_SCALE_TENSORS,
    KV_SCALES,
    MAX_GROUP,
    MAX_QUERIES,
    PAGE_SIZES,
    Q_DTYPES,
    cache_arg,
    check_caches,
    check_kv_scales,
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
    from ...artifacts.tables.native_kernels import NativeKernel
    from ...kernels.native.decode.grids import DecodeShape
    from ...kernels.native.decode.plan import DecodeProblem
    from ...kernels.native.decode.select import DecodeSelection
    from ...protocols import DecodeBackend, DraftPosition, KvLayout, Stream
    from ...tensor import OutT, QueryT, Scale, Tensor


_DRAFT_POSITIONS = ("depth", "index")


@dataclass(frozen=True, slots=True)
class PagedDecodeOptions(DecodeOptions):
    """The options of a paged decode; see ``paged_decode``."""

    k_scale: float = 1.0
    v_scale: float = 1.0
    kv_layout: str = "NHD"
    window_left: int = -1
    draft_position: str = "depth"

    @property
    def factors(self) -> tuple[float, float]:
        """As ``AttentionOptions``; those of keys and values are parts of them."""
        return self.softmax_scale * self.k_scale, self.output_scale * self.v_scale

    @property
    def drafts_by_index(self) -> bool:
        """Return whether the window of a query token with a mask counts from its index, not from its depth."""
        return self.draft_position == "index"

    def bounded(self, max_seq_len: int) -> PagedDecodeOptions:
        """As ``AttentionOptions``; a window wider than all keys hides nothing more."""
        # Then a position less a window fits an int32.
        window = min(self.window_left, self.keys_of_all_ranks(max_seq_len))
        if (max_seq_len, window) == (self.max_seq_len, self.window_left):
            return self
        return replace(self, max_seq_len=max_seq_len, window_left=window)


def _check(call: AttentionCall) -> None:
    tensors, k, v = call.tensors, call.tensors["k_cache"], call.tensors["v_cache"]
    check_queries(call, MAX_QUERIES)
    check_table(tensors["page_table"], call.batch, separate=True)
    check_caches(call.q, k, v, tensors["page_table"].shape[-1])
    page_size, kv_heads = k.shape[1:3]
    tensors.check_dtypes()
    check_shapes(call, call.q.shape, kv_heads)
    check_kv_scales(tensors, k.dtype, call.batch, kv_heads)
    tensors.check_memory()
    check_options(call, page_size=page_size, kv_heads=kv_heads)
    check_window("window_left", call.options.window_left)
    if call.options.draft_position not in _DRAFT_POSITIONS:
        raise UsageError(
            f"expected {' or '.join(map(repr, _DRAFT_POSITIONS))}",
            argument="draft_position",
            value=repr(call.options.draft_position),
        )


def _problem(call: AttentionCall) -> DecodeProblem:
    # An import of the package is faster without what chooses kernels.
    from ...kernels.native.decode.plan import DecodeProblem

    k, v, options = call.tensors["k_cache"], call.tensors["v_cache"], call.options
    kv_heads, head_dim = k.shape[2:]
    return DecodeProblem(
        **problem_values(call),
        kv_dtype=DTYPES[k.dtype].short,
        page_size=k.shape[1],
        num_pages=k.shape[0],
        max_seq_len=options.max_seq_len,
        kv_heads=kv_heads,
        group=call.q_heads // kv_heads,
        head_dim=head_dim,
        window_left=options.window_left,
        positions_by_index=options.drafts_by_index,
        k_strides=CacheStrides(*strides_of(k)),
        v_strides=CacheStrides(*strides_of(v)),
        k_scale_strides=scale_strides(call.tensors.get("k_scale")),
        v_scale_strides=scale_strides(call.tensors.get("v_scale")),
        v_table_offset=value_table_offset(call.tensors["page_table"]),
    )


def _launches(
    call: AttentionCall, device: DeviceFacts, release: NativeRelease
) -> Sequence[NativeLaunch[DecodeSelection]]:
    from ...kernels.native.decode.plan import decode_launches
    from ...kernels.native.decode.select import select_decode

    problem = _problem(call)
    shape = problem.shape(ragged=call.ragged, batch_invariant=call.options.batch_invariant)
    return decode_launches(select_decode(release.kernels, shape, device), problem, release.file_of)


def _resizer(call: AttentionCall, device: DeviceFacts, release: NativeRelease) -> Resizer | None:
    """As ``Operator``."""
    from ...kernels.native.decode.plan import decode_launches, resized_decode
    from ...kernels.native.decode.select import select_decode

    like = with_two_requests(call, _check)
    if like is None:
        return None
    problem = _problem(like)
    shape = problem.shape(ragged=like.ragged, batch_invariant=like.options.batch_invariant)

    def select(sizes: Sizes) -> tuple[Sequence[DecodeSelection], DecodeProblem]:
        return select_decode(release.kernels, replaced(shape, **sizes), device), replaced(problem, **sizes)

    def plan(selections: Sequence[DecodeSelection], other: DecodeProblem) -> Sequence[NativeLaunch[DecodeSelection]]:
        return decode_launches(selections, other, release.file_of)

    fits = fits_like(like, most=MAX_QUERIES, kv_heads=problem.kv_heads)
    return resizer_of(like, fits, select, plan, resized_decode)


def _output(arguments: Given) -> OutputForm:
    q = arguments["q"]
    return OutputForm(q, shape_of(q, "q"), "bfloat16" if dtype_of(q, "q") == E4M3 else None)


PAGED_DECODE = AttentionOperator(
    name="paged_decode",
    tensors=decode_tensors(
        TensorArg("q", Q_DTYPES, dtypes_by="k_cache", stride_bytes=4, rows=True),
        (
            cache_arg("k_cache", dtypes=tuple(Q_DTYPES)),
            cache_arg("v_cache", dtypes={dtype: (dtype,) for dtype in Q_DTYPES}, dtypes_by="k_cache"),
        ),
        TensorArg("out", tuple(Q_DTYPES), alignment=8, stride_bytes=8, rows=True, written=True),
        GLOBAL_LENS,
        *KV_SCALE_TENSORS,
    ),
    options=PagedDecodeOptions,
    scales=(*SCALES, *KV_SCALES),
    check=_check,
    launches=_launches,
    resizer=_resizer,
    output=_output,
    capacity=lambda call: call.tensors["page_table"].shape[-1] * call.tensors["k_cache"].shape[1],
    scale=default_scale,
    max_queries=MAX_QUERIES,
)


def _shape_of(sizes: CallSizes) -> DecodeShape:
    from ...kernels.native.decode.grids import DecodeShape

    heads_q, heads_kv, head_dim = sizes.heads_q, 8 if sizes.heads_kv is None else sizes.heads_kv, sizes.head_dim
    if sizes.head_dim_v not in (None, head_dim):
        raise UsageError(f"expected {head_dim}, like `head_dim`", argument="head_dim_v", value=sizes.head_dim_v)
    if not 1 <= heads_kv <= MOST:
        raise UsageError(f"expected 1 to {MOST}", argument="heads_kv", value=heads_kv)
    sizes.check(MAX_QUERIES, MOST, PAGE_SIZES)
    if heads_q % heads_kv:
        raise UsageError(f"expected a multiple of heads_kv={heads_kv}", argument="heads_q", value=heads_q)
    if heads_q > MAX_GROUP * heads_kv:
        raise UsageError(f"expected at most {MAX_GROUP} for each of `heads_kv`", argument="heads_q", value=heads_q)
    if sizes.window < 0:
        raise UsageError("expected at least 0", argument="window", value=sizes.window)
    return DecodeShape(
        dtype=sizes.dtype_kv,
        q_dtype=sizes.query_dtype(Q_DTYPES),
        head_dim=head_dim,
        group=heads_q // heads_kv,
        kv_heads=heads_kv,
        batch=sizes.batch,
        q_len=sizes.q_len,
        tokens=sizes.batch * sizes.q_len if sizes.tokens is None else sizes.tokens,
        ragged=sizes.tokens is not None,
        max_seq_len=sizes.kv_len,
        window_left=sizes.window - 1,
        batch_invariant=sizes.batch_invariant,
    )


def _select(kernels: Sequence[NativeKernel], shape: DecodeShape, device: DeviceFacts) -> Sequence[DecodeSelection]:
    from ...kernels.native.decode.select import select_decode

    return select_decode(kernels, shape, device)


EXPLAINED = Explained(PAGED_DECODE.name, "decode", lambda _: True, _shape_of, _select)


class PagedDecodeTensors(TypedDict):
    """The tensors of a paged decode by name, as ``PAGED_DECODE`` declares them; its scales may be numbers."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    out: Tensor | None
    lse: Tensor | None
    q_cu_seq_lens: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    softmax_scale: Scale | None
    output_scale: Scale | None
    global_seq_lens: Tensor | None
    k_scale: Scale | None
    v_scale: Scale | None


class PagedDecodePlan(StepPlan):
    """A plan made by ``plan_paged_decode``. It has one launch, or two for some ragged ``batch_invariant`` decodes."""

    @operator_function(scales=SCALES)
    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        q_cu_seq_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        global_seq_lens: Tensor | None = None,
        softmax_scale: Scale | None = None,
        output_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``paged_decode``.

        Pass exactly the optional tensors that the plan was made with. The plan fixes all other options (window, layout,
        bound on the query tokens, ``batch_invariant``).

        Args:
            softmax_scale: a number for this step, or None for the plan's. A plan made with a tensor takes a tensor. The
                same holds for ``output_scale``, ``k_scale`` and ``v_scale``.
            workspace: from ``prepare(stream)``, or the caller's own with ``workspace_bytes``. None: that of
                ``prepare(stream)``. A workspace that several plans share must be reset in between, unless it is a
                ``SemaphoreWorkspace``.
            stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current
                stream of the tensors' device for a plan made with torch tensors, else the legacy default stream.
            max_seq_len: upper bound on the lengths of this step, at most the plan's. None: the plan's.

        Raises:
            UsageError: a tensor differs from the planned one, or a number is invalid.
            WorkspaceError: the workspace is too small or belongs to another stream.
            DeviceError: the kernel cannot be loaded or launched.
        """
        self.run_step(
            PagedDecodeTensors(
                q=q,
                k_cache=k_cache,
                v_cache=v_cache,
                page_table=page_table,
                seq_lens=seq_lens,
                out=out,
                lse=lse,
                q_cu_seq_lens=q_cu_seq_lens,
                mask=mask,
                sinks=sinks,
                softmax_scale=softmax_scale,
                output_scale=output_scale,
                global_seq_lens=global_seq_lens,
                k_scale=k_scale,
                v_scale=v_scale,
            ),
            workspace,
            stream,
            max_seq_len=max_seq_len,
        )


def plan_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_seq_len: int,
    softmax_scale: Scale | None = None,
    output_scale: Scale = 1.0,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    global_seq_lens: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    window_left: int = -1,
    draft_position: DraftPosition = "depth",
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> PagedDecodePlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``paged_decode``.

    Planning launches and loads nothing and reads no tensor: only dtypes, shapes and strides matter. Therefore ``out``
    is required, and ``max_q_len`` is required with ``q_cu_seq_lens``. The plan fixes whether there are a mask, sinks, a
    log-sum-exp and scales on the device; every run must pass the same ones. ``device_facts`` plans for a described
    device instead of that of ``q``.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = PagedDecodeTensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
        q_cu_seq_lens=q_cu_seq_lens,
        mask=mask,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        global_seq_lens=global_seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = PagedDecodeOptions(
        max_seq_len=max_seq_len,
        kv_layout=kv_layout,
        max_q_len=max_q_len,
        window_left=window_left,
        draft_position=draft_position,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )
    return plan_call(PagedDecodePlan, PAGED_DECODE, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(scales=SCALES, any_size=True, op=lambda _: torch_op(PAGED_DECODE))
def paged_decode(
    q: QueryT,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    softmax_scale: Scale | None = None,
    output_scale: Scale = 1.0,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    kv_layout: KvLayout = "NHD",
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    global_seq_lens: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    window_left: int = -1,
    draft_position: DraftPosition = "depth",
    batch_invariant: bool = False,
    out: OutT | None = None,
    lse: Tensor | None = None,
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> QueryT | OutT:
    """Attention of the newest tokens of each request over its paged KV cache (GQA decode).

    The query tokens of a request (one, or the draft tokens of speculative decoding) are its last tokens, and the cache
    already contains their keys and values. A query token sees all keys before the query tokens and, among the query
    tokens, itself and the earlier ones, or those that its mask selects.

    Args:
        q: ``[batch, q_heads, head_dim]`` (one token per request), ``[batch, q_len, q_heads, head_dim]`` with q_len 1 to
            64, or ``[tokens, q_heads, head_dim]`` with ``q_cu_seq_lens``. head_dim is 32, 64, 128, 256 or 512; q_heads
            is 1 to 32 times kv_heads. Like the caches, bfloat16 or float16; with float8_e4m3fn caches bfloat16, float16
            or float8_e4m3fn. One stride between all tokens; 4-byte aligned, strides in multiples of 4 bytes.
        k_cache: bfloat16, float16 or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages,
            kv_heads, page_size, head_dim]`` (HND), page_size a power of two from 16 to 1024, or any if ``page_table``
            has one column: a page then holds a request. Any strides in multiples of 16 bytes, so K and V may be two
            views of one tensor.
        v_cache: like ``k_cache``.
        page_table: int32 ``[batch, columns]``, the page ids of each request in order, or ``[batch, 2, columns]``, those
            of its keys and those of its values. Entries past a request's length are not read.
        seq_lens: int32 or uint32 ``[batch]``, number of keys of each request, those of its query tokens included. With
            length 0, the output is 0 and the log-sum-exp -inf. If a request has fewer keys than query tokens, the same
            holds for its first query tokens.
        max_seq_len: upper bound on all lengths, at most columns x page_size. The launch depends on this bound, not on
            the lengths.
        softmax_scale: factor of the scores: a number, or a one-element float32 tensor on the device, which the kernel
            reads. None: 1 / sqrt(head_dim).
        output_scale: factor of the output, like ``softmax_scale``.
        k_scale, v_scale: factors of keys and of values: numbers; or, with float8_e4m3fn caches, float32 tensors on the
            device of one element, ``[kv_heads]`` or ``[batch, kv_heads]`` with any strides (0 too), which the kernel
            reads when it runs. None: 1.
        kv_layout: "NHD" or "HND".
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: prefix sums of the numbers of query tokens, from 0
            to ``tokens``. A request may have no query token. None: all requests have the same number.
        max_q_len: upper bound on the query tokens of a request, 1 to 64; only with ``q_cu_seq_lens``. None:
            ``q_cu_seq_lens`` is read back, which waits for the device and cannot be captured in a graph.
        mask: which query tokens of its request each query token sees, one bit each: uint32 ``[batch, q_len, words]``
            or ``[tokens, words]``, where words is the bound on the query tokens / 32, rounded up, or uint16 with a last
            dimension of 2 x words (low half first); contiguous, 4-byte aligned. Bit j of a row stands for query token
            j. Any pattern, such as a tree. None: causal.
        sinks: float32 ``[q_heads]`` or ``[kv_heads, group]``, contiguous: one logit per head that is added to the
            softmax denominator only. None: no sinks.
        global_seq_lens, cp_world, cp_rank, cp_interleave: int32 or uint32 ``[batch]``, contiguous: keys of each request
            on ``cp_world`` ranks, dealt to them ``cp_interleave`` at a time; all else counts those of rank ``cp_rank``.
            Without mask and sinks, which a merge of the ranks counts once. None: this rank has all keys.
        window_left: how many keys before its own position a token sees; -1: all.
        draft_position: where a query token with a mask is, for its window, behind the keys before the query tokens: at
            its "depth", which is how many query tokens it sees, less 1; or at its "index" among them, as FlashInfer
            counts.
        batch_invariant: make the output of a request depend, bit for bit, only on its own tokens, keys and options, not
            on batch, bounds or grid. The workspace then grows with the batch: for each request, KV head and query row
            it has up to 128 / kv_heads partials of head_dim floats, or one per 256 keys up to four, then one per 1024,
            if that is fewer. A ragged batch that may contain requests both with at most 16 rows (query tokens x group)
            and with more takes two launches, each with its own scratch.
        out: like ``q``, of dtype bfloat16, float16 or float8_e4m3fn (which saturates), 8-byte aligned, strides in
            multiples of 8 bytes. None allocates it if ``q`` is a torch tensor: with q's dtype, or bfloat16 if that is
            float8_e4m3fn.
        lse: float32, shaped like ``q`` without head_dim, with one stride between all tokens. It receives the
            log-sum-exp in base 2, which includes the sink but not the output scale. None: not computed.
        workspace: scratch memory that belongs to ``stream``. None: the one that the cached plan keeps for this stream.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream if
            ``q`` is a torch tensor, otherwise the legacy default stream.
        backend: "auto" (a backend that was measured on this compute capability) or the name of a backend.
        enable_pdl: launch with programmatic dependent launch (stream serialization).
        runtime: the runtime to use. None: the process's default runtime.

    Returns:
        ``out``.

    Raises:
        UsageError: an argument is invalid.
        BackendError: no backend supports the call on this device.
        WorkspaceError: the workspace is too small, or the stream is capturing and has no workspace yet.
        MissingError, SourceError, CorruptError: the kernel is not available.
        DeviceError: the driver or the ABI gate rejects the launch.
    """
    tensors = PagedDecodeTensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        out=out,
        lse=lse,
        q_cu_seq_lens=q_cu_seq_lens,
        mask=mask,
        sinks=sinks,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        global_seq_lens=global_seq_lens,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    options = PagedDecodeOptions(
        max_seq_len=max_seq_len,
        kv_layout=kv_layout,
        max_q_len=max_q_len,
        window_left=window_left,
        draft_position=draft_position,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )
    result: QueryT | OutT = run_call(
        PagedDecodePlan, PAGED_DECODE, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
