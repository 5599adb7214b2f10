"""Context attention (prefill): the operator's declaration, a plan made once, and the plain function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..kernels.native.launches import NativeLaunch
from ..kernels.native.prefill.plan import context_launch
from ..kernels.native.prefill.select import VALUE_DIMS, ContextSelection, ContextShape, select_context_attention
from ..launch.driver import DeviceFacts
from .backends import AUTO
from .context_call import CONTEXT_TENSORS, ContextOptions, capacity_of, check_context, problem_of
from .decode_call import DecodeCall
from .decode_op import torch_op
from .decode_operator import SCALES, DecodeOperator, DecodePlan, default_scale, plan_decode, run_decode
from .fast_path import operator_function
from .operator_plan import AnyWorkspace
from .runtime import NativeRelease, Runtime

if TYPE_CHECKING:
    from ..protocols import DecodeBackend, Stream
    from ..tensor import OutT, QueryT, Scale, Tensor


def _launches(call: DecodeCall, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[Any]]:
    problem = problem_of(call)
    shape = ContextShape(
        dtype=problem.dtype,
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
    traced=None,
    options_type=ContextOptions,
    max_queries=None,
)


class ContextAttentionPlan(DecodePlan):
    """A context attention; made by ``plan_context_attention``."""

    @property
    def selection(self) -> ContextSelection:
        """What was chosen for the launch, and why."""
        selection: ContextSelection = self.selections[0]
        return selection

    @operator_function(owner="self", scales=SCALES)
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
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors of the shapes, strides and dtypes that the plan was made for; see ``context_attention``.

        Arguments and errors otherwise as ``PagedDecodePlan.run``.
        """
        self.run_step(locals())


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
    kv_layout: str = "NHD",
    lse_base: str = "2",
    lse_sink: bool = True,
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | None = None,
) -> ContextAttentionPlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``context_attention``.

    Nothing is launched or loaded and no tensor is read: only dtypes, shapes and strides matter. So ``out`` must be
    given. Whether there are a page table, lengths, sinks, a log-sum-exp, and scales on the device is planned: every run
    must have them alike. ``device_facts`` plans for a described device instead of the one that ``q`` is on.
    """
    return plan_decode(ContextAttentionPlan, CONTEXT_ATTENTION, locals())


@operator_function(
    owner="runtime or default.runtime or default_runtime()", scales=SCALES, op=lambda _: torch_op(CONTEXT_ATTENTION)
)
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
    kv_layout: str = "NHD",
    lse_base: str = "2",
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
    """Attention of many query tokens of each request over its keys: prefill, chunks of one, cross attention.

    The last query token of a request stands at its last key: token i is at position ``kv_len - q_len + i``. Keys and
    values are paged (``page_table``), ragged (``kv_cu_seq_lens``), or of one size for all requests (neither).
    The bits of a token's output depend on its own query, its keys and the options alone: not on how a prompt is cut
    into chunks, on other requests, pages, bounds or the GPU's schedule.

    Args:
        q: ``[tokens, q_heads, head_dim]`` with ``q_cu_seq_lens``, or ``[batch, q_len, q_heads, head_dim]``. bfloat16 or
            float16, head_dim 64, 128, 192 or 256, q_heads 1 to 64 times kv_heads. Here as for k, v and out, addresses
            and strides are multiples of 16 bytes, and tokens lie at one stride.
        k: of q's dtype. With ``page_table`` ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages, kv_heads,
            page_size, head_dim]`` (HND), page_size 16, 32, 64, 128 or 256; with ``kv_cu_seq_lens`` ``[tokens,
            kv_heads, head_dim]``; else ``[batch, kv_len, kv_heads, head_dim]`` (NHD) or with heads in front of tokens
            (HND).
        v: like ``k``, with 128 columns where head_dim is 192 (MLA's prefill). One tensor that holds K and V serves
            through its two views. Values that a request's rows see must be finite; what lies past its end may be
            anything.
        max_seq_len: bound on the keys of every request. The launch depends on it, never on the lengths.
        page_table: int32 ``[batch, columns]``, the pages of each request in order. Entries past a length, and those
            in front of what a window shows, are not read.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, contiguous. Needed with ``page_table``; else a
            request may have fewer keys than lie there. 0 gives output 0.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: where the query tokens of each request begin, from
            0 to ``tokens``. A request may have none. None: all have the same number.
        kv_cu_seq_lens: likewise for ragged keys and values.
        max_q_len: bound on the query tokens of a request, with ``q_cu_seq_lens`` only; None: ``tokens``.
        causal: a token sees no key behind its own position.
        window_left: keys before its own position that a token sees; -1: all.
        window_right: keys behind its own position that a token sees, without ``causal``; -1: all.
        logit_soft_cap: scores become ``cap * tanh(score / cap)`` after the softmax scale; 0: they do not.
        sinks: float32 ``[q_heads]`` or ``[kv_heads, group]``, contiguous: a logit of each head that enters the
            denominator alone. None: none.
        softmax_scale: factor of the scores: a number, or a float32 tensor of one element on the device, read when
            the kernel runs; None: 1 / sqrt(head_dim).
        output_scale: factor of the output, likewise.
        kv_layout: "NHD" or "HND".
        lse_base: "2" or "e", the base of the log-sum-exp.
        lse_sink: whether the log-sum-exp includes the sink.
        batch_invariant: also give a token the bits that ``paged_decode`` with ``batch_invariant`` gives it, as a draft
            or in a step of its own; head_dim 64 or 128.
        out: like ``q``, with the columns of ``v``. None makes it where ``q`` is a torch tensor.
        lse: float32, shaped like ``q`` without head_dim, all tokens at one stride; filled with the log-sum-exp of the
            scores, the output scale not included. None: not wanted.
        workspace: scratch that belongs to ``stream``; None: one that the cached plan keeps for it.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream
            where ``q`` is a torch tensor, else the legacy default stream.
        backend: "auto" (a backend measured on this compute capability) or a backend's name.
        enable_pdl: launch with programmatic stream serialization.
        runtime: None: the process's default.

    Returns:
        ``out``. A token that sees no key has output 0 and log-sum-exp -inf, or its sink's where that is included.

    Raises:
        UsageError: an argument is outside its domain.
        BackendError: nothing runs this on the device.
        WorkspaceError: the workspace does not fit, or the stream captures and has none yet.
        MissingError, SourceError, CorruptError: the kernel cannot be had.
        DeviceError: the driver or the ABI gate refuses.
    """
    result: QueryT | OutT = run_decode(ContextAttentionPlan, CONTEXT_ATTENTION, locals())
    return result
