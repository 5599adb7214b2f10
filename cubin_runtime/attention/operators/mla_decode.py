"""MLA decode: the operator's declaration, its rules and launches, its plan and its function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from ...dtypes import DTYPES
from ...errors import UsageError
from ...kernels.native.launches import NativeLaunch
from ...kernels.native.mla.plan import MlaProblem, mla_launch, resized_mla
from ...kernels.native.mla.select import MAX_HEADS, MAX_QUERIES, MlaSelection, MlaShape, select_mla_decode
from ...launch.driver import DeviceFacts
from ...launch.workspace import AnyWorkspace
from ...tensor import TensorView
from ...values import replaced
from ..attention_operator import SCALES, AttentionCall, AttentionOperator
from ..backends import AUTO
from ..call_sizes import CallSizes, Explained
from ..checks import check_shape, listed, token_stride
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
from ..latent_cache import KV_CACHE, LATENTS, OUT_DTYPES, Q_DTYPES, Q_ROPE, V_CACHE, check_cache
from ..operator import Given, OutputForm, Resizer, TensorArg, shape_of
from ..paged_cache import PAGE_SIZES, check_table
from ..pipeline import plan_call, run_call, torch_op
from ..resizing import Sizes, resizer_of, with_two_requests
from ..runtime import NativeRelease, Runtime
from ..step_plan import StepPlan

if TYPE_CHECKING:
    from ...protocols import DecodeBackend, Stream
    from ...tensor import OutT, QueryT, Scale, Tensor


def _check(call: AttentionCall) -> None:
    tensors = call.tensors
    check_queries(call, MAX_QUERIES)
    check_cache(call.q, tensors["kv_cache"], tensors.get(Q_ROPE.name))
    page_size, _, width = tensors["kv_cache"].shape[1:]
    tensors.check_dtypes()
    check_shape(V_CACHE.name, tensors.get(V_CACHE.name), (*tensors["kv_cache"].shape[:-1], LATENTS[width]))
    check_shapes(call, (*call.q.shape[:-1], LATENTS[width]), kv_heads=1)
    check_table(tensors["page_table"], call.batch)
    tensors.check_memory()
    check_options(call, page_size=page_size, kv_heads=1)


def _strides(cache: TensorView) -> tuple[int, int]:
    """Elements between pages and between tokens of a page."""
    pages, page_size = cache.shape[:2]
    # A dimension of size 1 may carry any stride; the descriptor wants a valid one.
    return cache.strides[0] if pages > 1 else page_size * cache.strides[1], cache.strides[1]


def _problem(call: AttentionCall) -> MlaProblem:
    cache, options = call.tensors["kv_cache"], call.options
    values, rope = call.tensors.get(V_CACHE.name), call.tensors.get(Q_ROPE.name)
    pages, page_size, _, width = cache.shape
    latent = LATENTS[width]
    return MlaProblem(
        **problem_values(call),
        kv_dtype=DTYPES[cache.dtype].short,
        page_size=page_size,
        num_pages=pages,
        max_seq_len=options.max_seq_len,
        heads=call.q_heads,
        latent=latent,
        rope=width - latent,
        cache_strides=_strides(cache),
        value_strides=None if values is None else _strides(values),
        q_rope_strides=None if rope is None else (token_stride(Q_ROPE.name, rope, 2), rope.strides[-2]),
    )


def _launches(call: AttentionCall, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[MlaSelection]]:
    problem = _problem(call)
    shape = problem.shape(ragged=call.ragged, batch_invariant=call.options.batch_invariant)
    selection = select_mla_decode(release.kernels, shape, device)
    return [mla_launch(selection, problem, release.file_of(selection.kernel))]


def _resizer(call: AttentionCall, device: DeviceFacts, release: NativeRelease) -> Resizer | None:
    """As ``Operator``."""
    like = with_two_requests(call, _check)
    if like is None:
        return None
    problem = _problem(like)
    shape = problem.shape(ragged=like.ragged, batch_invariant=like.options.batch_invariant)

    def select(sizes: Sizes) -> tuple[Sequence[MlaSelection], MlaProblem]:
        of_shape = replaced(shape, batch=sizes["batch"], q_len=sizes["q_len"])
        return (select_mla_decode(release.kernels, of_shape, device),), replaced(problem, **sizes)

    def plan(selections: Sequence[MlaSelection], other: MlaProblem) -> Sequence[NativeLaunch[MlaSelection]]:
        return [mla_launch(selection, other, release.file_of(selection.kernel)) for selection in selections]

    return resizer_of(like, fits_like(like, most=MAX_QUERIES, kv_heads=1), select, plan, resized_mla)


def _output(arguments: Given) -> OutputForm:
    q = arguments["q"]
    shape = shape_of(q, "q")
    latents = LATENTS if arguments[Q_ROPE.name] is None else {latent: latent for latent in LATENTS.values()}
    if len(shape) < 3 or shape[-1] not in latents:
        widths = " or ".join(map(str, latents))
        raise UsageError(f"shape {shape}, expected [batch, heads, columns] with {widths} columns", argument="q")
    return OutputForm(q, (*shape[:-1], latents[shape[-1]]), "bfloat16")


def _no_default(_: tuple[int, ...]) -> float:
    raise UsageError("None, expected a number or a float32 CUDA tensor of one element", argument="softmax_scale")


MLA_DECODE = AttentionOperator(
    name="mla_decode",
    # Rows of queries and outputs are moved in pieces of 16 bytes.
    tensors=decode_tensors(
        TensorArg("q", Q_DTYPES, dtypes_by="kv_cache", alignment=16, stride_bytes=16, rows=True),
        (KV_CACHE,),
        TensorArg("out", OUT_DTYPES, alignment=16, stride_bytes=16, rows=True, written=True),
        GLOBAL_LENS,
        V_CACHE,
        Q_ROPE,
    ),
    options=DecodeOptions,
    check=_check,
    launches=_launches,
    resizer=_resizer,
    output=_output,
    capacity=lambda call: call.tensors["page_table"].shape[1] * call.tensors["kv_cache"].shape[1],
    scale=_no_default,
    max_queries=MAX_QUERIES,
)


def _shape_of(sizes: CallSizes) -> MlaShape:
    latent = LATENTS.get(sizes.head_dim)
    if latent is None:
        raise UsageError(f"expected one of {listed(tuple(LATENTS))}", argument="head_dim", value=sizes.head_dim)
    sizes.check(MAX_QUERIES, MAX_HEADS, PAGE_SIZES)
    sizes.check_only(f"with head_dim={sizes.head_dim}, which is MLA", head_dim_v=latent, heads_kv=1)
    if sizes.window:
        raise UsageError("MLA decode sees all keys, expected 0", argument="window", value=sizes.window)
    return MlaShape(
        dtype=sizes.dtype_kv,
        q_dtype=sizes.query_dtype(Q_DTYPES),
        latent=latent,
        rope=sizes.head_dim - latent,
        heads=sizes.heads_q,
        batch=sizes.batch,
        q_len=sizes.q_len,
        ragged=sizes.tokens is not None,
        max_seq_len=sizes.kv_len,
        batch_invariant=sizes.batch_invariant,
    )


EXPLAINED = Explained(
    MLA_DECODE.name,
    "mla",
    lambda _: True,
    _shape_of,
    lambda *values: (select_mla_decode(*values),),
)


class MlaTensors(TypedDict):
    """The tensors of an MLA decode by name, as ``MLA_DECODE`` declares them; its scales may be numbers."""

    q: Tensor
    kv_cache: Tensor
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
    v_cache: Tensor | None
    q_rope: Tensor | None


class MlaDecodePlan(StepPlan):
    """A plan made by ``plan_mla_decode``."""

    @operator_function(scales=SCALES)
    def run(
        self,
        q: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        q_cu_seq_lens: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        global_seq_lens: Tensor | None = None,
        v_cache: Tensor | None = None,
        q_rope: Tensor | None = None,
        softmax_scale: Scale | None = None,
        output_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors with the planned shapes, strides and dtypes; see ``mla_decode``.

        The other arguments and the errors are those of ``PagedDecodePlan.run``.
        """
        self.run_step(
            MlaTensors(
                q=q,
                kv_cache=kv_cache,
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
                v_cache=v_cache,
                q_rope=q_rope,
            ),
            workspace,
            stream,
            max_seq_len=max_seq_len,
        )


def plan_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_seq_len: int,
    softmax_scale: Scale,
    output_scale: Scale = 1.0,
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    global_seq_lens: Tensor | None = None,
    v_cache: Tensor | None = None,
    q_rope: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | str | None = None,
) -> MlaDecodePlan:
    """Choose the kernel and the grid for tensors like these. Arguments and errors are those of ``mla_decode``.

    Planning launches and loads nothing and reads no tensor: only dtypes, shapes and strides matter. Therefore ``out``
    is required, and ``max_q_len`` is required with ``q_cu_seq_lens``. The plan fixes whether there are a mask, sinks, a
    log-sum-exp and scales on the device; every run must pass the same ones. ``device_facts`` plans for a described
    device instead of that of ``q``.
    It is a ``DeviceFacts`` or a name such as ``"H200"``; with it, torch's meta and fake tensors are taken, too.
    """
    tensors = MlaTensors(
        q=q,
        kv_cache=kv_cache,
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
        v_cache=v_cache,
        q_rope=q_rope,
    )
    options = DecodeOptions(
        max_seq_len=max_seq_len,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )
    return plan_call(MlaDecodePlan, MLA_DECODE, tensors, options, runtime=runtime, device_facts=device_facts)


@operator_function(scales=SCALES, any_size=True, op=lambda _: torch_op(MLA_DECODE))
def mla_decode(
    q: QueryT,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    softmax_scale: Scale,
    output_scale: Scale = 1.0,
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    global_seq_lens: Tensor | None = None,
    v_cache: Tensor | None = None,
    q_rope: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    batch_invariant: bool = False,
    out: OutT | None = None,
    lse: Tensor | None = None,
    workspace: AnyWorkspace | None = None,
    stream: Stream | None = None,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> QueryT | OutT:
    """Multi-head latent attention of the newest tokens of each request over its paged latent cache.

    All heads share one cache row per token. Its first columns are the latent, which is the value; the latent and the
    rope columns after it are the key. Queries must already be projected into the latent space.

    Args:
        q: ``[batch, heads, columns]`` (one token per request), ``[batch, q_len, heads, columns]`` with q_len 1 to 16,
            or ``[tokens, heads, columns]`` with ``q_cu_seq_lens``. The columns are 576 (512 latent and 64 rope ones),
            320 (256 + 64), 512 (no rope ones), 288 (256 + 32) or 160 (128 + 32); heads 1 to 128. bfloat16, or the
            dtype of the cache if a kernel supports that; on SM120 and SM121 float8_e4m3fn, as the cache. One stride
            between all tokens; addresses and strides in multiples of 16 bytes.
        kv_cache: ``[pages, page_size, columns]`` or ``[pages, 1, page_size, columns]``, bfloat16 or float8_e4m3fn,
            page_size a power of two from 16 to 1024. Any strides in multiples of 16 bytes.
        page_table: int32 ``[batch, columns]``, the page ids of each request in order; entries past a request's length
            are not read.
        seq_lens: int32 or uint32 ``[batch]``, number of keys of each request, those of its query tokens included. With
            length 0, the output is 0 and the log-sum-exp -inf. If a request has fewer keys than query tokens, the same
            holds for its first query tokens.
        max_seq_len: upper bound on all lengths, at most columns x page_size. The launch depends on this bound, not on
            the lengths.
        softmax_scale: factor of the scores: a number, or a one-element float32 tensor on the device, which the kernel
            reads. There is no default, because it depends on the head dimension before the projection.
        output_scale: factor of the output, like ``softmax_scale``.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: prefix sums of the numbers of query tokens, from 0
            to ``tokens``. A request may have no query token. None: all requests have the same number.
        max_q_len: upper bound on the query tokens of a request, 1 to 16; only with ``q_cu_seq_lens``. None:
            ``q_cu_seq_lens`` is read back and checked, which waits for the device and cannot be captured in a graph.
        mask: which query tokens of its request each query token sees, as 32 bits per token: uint16 ``[batch, q_len,
            2]`` or ``[tokens, 2]`` (low half first), or uint32 with a last dimension of 1; contiguous. None: causal.
        sinks: float32 ``[heads]``, contiguous: one logit per head that is added to the softmax denominator only. None:
            no sinks.
        global_seq_lens, cp_world, cp_rank, cp_interleave: keys divided over ranks, as for ``paged_decode``.
        v_cache: values in memory of their own, ``[pages, page_size, latent]`` or ``[pages, 1, page_size, latent]``,
            float8_e4m3fn, in the pages of their keys; only with 576 columns, queries and cache of float8_e4m3fn, on
            compute capability 9.0. None: the latent columns of ``kv_cache``, which are then read once for both.
        q_rope: the rope columns of the queries in memory of their own, shaped like ``q`` with these columns alone, of
            its dtype, with one stride between all tokens, addresses and strides in multiples of 16 bytes; ``q`` then
            has the latent columns alone. None: they follow the latent ones in ``q``.
        batch_invariant: make the output of a request depend, bit for bit, only on its own tokens, keys and options, not
            on batch, bounds or grid.
        out: shaped like ``q`` with the latent columns alone, of dtype bfloat16, float16 or float8_e4m3fn (which
            saturates), addresses and strides in multiples of 16 bytes. None allocates a bfloat16 tensor if ``q`` is a
            torch tensor.
        lse: float32, shaped like ``q`` without its last dimension, with one stride between all tokens. It receives the
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
    tensors = MlaTensors(
        q=q,
        kv_cache=kv_cache,
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
        v_cache=v_cache,
        q_rope=q_rope,
    )
    options = DecodeOptions(
        max_seq_len=max_seq_len,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )
    result: QueryT | OutT = run_call(
        MlaDecodePlan, MLA_DECODE, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
