"""Context attention (prefill): the operator's declaration, a plan made once, and the plain function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from ..kernels.native.launches import NativeLaunch
from ..kernels.native.prefill.plan import context_launch
from ..kernels.native.prefill.select import VALUE_DIMS, ContextSelection, ContextShape, select_context_attention
from ..launch.driver import DeviceFacts
from ..launch.semaphore_workspace import AnyWorkspace
from .backends import AUTO
from .context_call import CONTEXT_TENSORS, ContextOptions, capacity_of, check_context, problem_of
from .decode_call import DecodeCall
from .decode_op import torch_op
from .decode_operator import SCALES, DecodeOperator, DecodePlan, default_scale, plan_decode, run_decode
from .fast_path import operator_function
from .runtime import NativeRelease, Runtime

if TYPE_CHECKING:
    from ..protocols import DecodeBackend, KvLayout, LseBase, Stream
    from ..tensor import OutT, QueryT, Scale, Tensor


def _launches(call: DecodeCall, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[Any]]:
    problem = problem_of(call)
    shape = ContextShape(
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
    )
    selection = select_context_attention(release.kernels, shape, device)
    return [context_launch(selection, problem, release.file_of(selection.kernel))]


CONTEXT_ATTENTION = DecodeOperator(
    name="context_attention",
    tensors=CONTEXT_TENSORS,
    options=(
        *("kv_layout", "max_q_len", "causal", "window_left", "window_right", "logit_soft_cap"),
        *("batch_invariant", "lse_base", "lse_sink", "backend", "enable_pdl"),
    ),
    check=check_context,
    capacity=capacity_of,
    launches=_launches,
    output=lambda q: ((*q.shape[:-1], VALUE_DIMS.get(q.shape[-1], q.shape[-1])), None),
    scale=default_scale,
    options_type=ContextOptions,
    max_queries=None,
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


class ContextAttentionPlan(DecodePlan):
    """A context attention; made by ``plan_context_attention``."""

    @property
    def selection(self) -> ContextSelection:
        """The kernel and the grid that were chosen for the launch, and why."""
        selection: ContextSelection = self.selections[0]
        return selection

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
    return plan_decode(
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
    (neither). The output of a token depends, bit for bit, only on its own query, its keys and the options, not on the
    chunking of a prompt, other requests, pages, bounds or the GPU's schedule.

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
        logit_soft_cap: scores become ``cap * tanh(score / cap)`` after the softmax scale; 0: no cap.
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
            a step of its own, if head_dim is 64 or 128. Without it, too, a token's bits do not depend on other requests
            or on the chunks of its prompt.
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
    result: QueryT | OutT = run_decode(
        ContextAttentionPlan, CONTEXT_ATTENTION, tensors, options, workspace=workspace, stream=stream, runtime=runtime
    )
    return result
