"""Paged decode (GQA): the operator's declaration, a plan made once for shapes and options, and the plain function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..dtypes import DTYPES
from ..kernels.native.launches import NativeLaunch
from ..launch.driver import DeviceFacts
from .backends import AUTO
from .decode_call import (
    DecodeCall,
    check_options,
    check_queries,
    check_shapes,
    check_token_strides,
    decode_tensors,
    problem_values,
)
from .decode_op import torch_op
from .decode_operator import SCALES, DecodeOperator, DecodePlan, default_scale, plan_decode, run_decode
from .fast_path import operator_function
from .operator import TensorArg
from .operator_plan import AnyWorkspace
from .paged_cache import Q_DTYPES, cache_arg, check_caches, strides_of
from .runtime import NativeRelease, Runtime

if TYPE_CHECKING:
    from ..kernels.native.decode.select import DecodeSelection
    from ..protocols import DecodeBackend, KvLayout, Stream
    from ..tensor import OutT, QueryT, Scale, Tensor
    from .tracing.schema import TracedCall


def _check(call: DecodeCall) -> None:
    tensors, k, v = call.tensors, call.tensors["k_cache"], call.tensors["v_cache"]
    check_queries(call)
    check_caches(call.q, k, v)
    page_size, kv_heads = k.shape[1:3]
    tensors.check_dtypes()
    check_shapes(call, call.q.shape, kv_heads)
    tensors.check_devices()
    tensors.check_memory()
    check_token_strides(call)
    check_options(call, page_size=page_size, kv_heads=kv_heads)


def _launches(call: DecodeCall, device: DeviceFacts, release: NativeRelease) -> Sequence[NativeLaunch[DecodeSelection]]:
    # An import of the package is faster without what chooses kernels.
    from ..kernels.native.decode.plan import CacheStrides, DecodeProblem, decode_launches
    from ..kernels.native.decode.select import select_decode
    from ..kernels.native.decode.shape import DecodeShape

    k, v, options = call.tensors["k_cache"], call.tensors["v_cache"], call.options
    kv_heads, head_dim = k.shape[2:]
    problem = DecodeProblem(
        **problem_values(call),
        kv_dtype=DTYPES[k.dtype].short,
        page_size=k.shape[1],
        num_pages=k.shape[0],
        max_seq_len=options.max_seq_len,
        kv_heads=kv_heads,
        group=call.q_heads // kv_heads,
        head_dim=head_dim,
        window_left=options.window_left,
        k_strides=CacheStrides(*strides_of(k)),
        v_strides=CacheStrides(*strides_of(v)),
    )
    shape = DecodeShape(
        dtype=problem.kv_dtype,
        q_dtype=problem.q_dtype,
        head_dim=head_dim,
        group=problem.group,
        kv_heads=kv_heads,
        batch=problem.batch,
        q_len=problem.q_len,
        tokens=problem.tokens,
        ragged=call.ragged,
        max_seq_len=options.max_seq_len,
        window_left=options.window_left,
        batch_invariant=options.batch_invariant,
    )
    return decode_launches(select_decode(release.kernels, shape, device), problem, release.file_of)


def _traced(call: DecodeCall) -> TracedCall:
    from .tracing.decode import traced_decode

    return traced_decode(call)


PAGED_DECODE = DecodeOperator(
    name="paged_decode",
    tensors=decode_tensors(
        TensorArg("q", Q_DTYPES, dtypes_by="k_cache", stride_bytes=4, rows=True),
        (
            cache_arg("k_cache", dtypes=tuple(Q_DTYPES)),
            cache_arg("v_cache", dtypes={dtype: (dtype,) for dtype in Q_DTYPES}, dtypes_by="k_cache"),
        ),
        TensorArg("out", tuple(Q_DTYPES), alignment=8, stride_bytes=8, rows=True, written=True),
    ),
    options=("kv_layout", "max_q_len", "window_left", "batch_invariant", "backend", "enable_pdl"),
    check=_check,
    capacity=lambda call: call.tensors["page_table"].shape[1] * call.tensors["k_cache"].shape[1],
    launches=_launches,
    output=lambda q: (q.shape, "bfloat16" if q.dtype == "float8_e4m3fn" else None),
    scale=default_scale,
    traced=_traced,
)


class PagedDecodePlan(DecodePlan):
    """A paged decode; made by ``plan_paged_decode``. One launch, but for some ragged ``batch_invariant`` decodes."""

    @operator_function(owner="self", scales=SCALES)
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
        softmax_scale: Scale | None = None,
        output_scale: Scale | None = None,
        workspace: AnyWorkspace | None = None,
        stream: Stream | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Run on tensors of the shapes, strides and dtypes that the plan was made for; see ``paged_decode``.

        A tensor that the plan was made without must be left out, and the reverse. Options that are no tensors
        (window, layout, bound of the query tokens, ``batch_invariant``) are the plan's.

        Args:
            softmax_scale: of this step: a number, or None for the plan's number; a plan made with a tensor takes a
                tensor. ``output_scale`` likewise.
            workspace: from ``prepare(stream)``, or the caller's own of ``workspace_bytes``; None: that of
                ``prepare(stream)``. One that other plans use as well must be reset in between, unless it is a
                ``SemaphoreWorkspace``.
            stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current
                stream of the tensors' device for a plan made with torch tensors, else the legacy default stream.
            max_seq_len: bound on the lengths of this step; None: the plan's. It never exceeds the plan's.

        Raises:
            UsageError: a tensor differs from what was planned, or a number is outside its domain.
            WorkspaceError: the workspace is too small or belongs to another stream.
            DeviceError: the kernel cannot be loaded or launched.
        """
        self.run_step(locals())


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
    kv_layout: KvLayout = "NHD",
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    window_left: int = -1,
    batch_invariant: bool = False,
    backend: DecodeBackend = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | None = None,
) -> PagedDecodePlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``paged_decode``.

    Nothing is launched or loaded and no tensor is read: only dtypes, shapes and strides matter. So ``max_q_len`` must
    be given with ``q_cu_seq_lens``, and ``out`` always. Whether there are a mask, sinks, a log-sum-exp, and scales on
    the device is planned: every run must have them alike. ``device_facts`` plans for a described device instead of the
    one that ``q`` is on.
    """
    return plan_decode(PagedDecodePlan, PAGED_DECODE, locals())


@operator_function(
    owner="runtime or default.runtime or default_runtime()", scales=SCALES, op=lambda _: torch_op(PAGED_DECODE)
)
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
    kv_layout: KvLayout = "NHD",
    q_cu_seq_lens: Tensor | None = None,
    max_q_len: int | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    window_left: int = -1,
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

    A request's query tokens (one, or the drafts of speculative decoding) are its last keys: the cache holds them
    already. Token i of a request sees the keys in front of the query tokens and, of those, the ones up to itself, or
    those that its mask names.

    Args:
        q: ``[batch, q_heads, head_dim]`` (one token per request), ``[batch, q_len, q_heads, head_dim]`` with q_len 1
            to 16, or ``[tokens, q_heads, head_dim]`` with ``q_cu_seq_lens``. head_dim is 32, 64, 128, 256 or 512;
            q_heads is 1 to 32 times kv_heads. Like the caches, bfloat16 or float16; with float8_e4m3fn caches
            bfloat16, float16 or float8_e4m3fn. All tokens lie at one stride; 4-byte aligned, strides in multiples
            of 4 bytes.
        k_cache: bfloat16, float16 or float8_e4m3fn ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages,
            kv_heads, page_size, head_dim]`` (HND), page_size 16, 32, 64, 128 or 256. Strides are taken as they are,
            in multiples of 16 bytes, so one tensor that holds K and V serves through its two views.
        v_cache: like ``k_cache``.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; entries past a length are not
            read.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, its query tokens' included. 0 gives output 0 and
            log-sum-exp -inf; with fewer keys than query tokens so do the first of these.
        max_seq_len: bound on every length; at most columns x page_size. The launch depends on it, never on the
            lengths.
        softmax_scale: factor of the scores: a number, or a float32 tensor of one element on the device, read when
            the kernel runs; None: 1 / sqrt(head_dim).
        output_scale: factor of the output, likewise.
        kv_layout: "NHD" or "HND".
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: where the query tokens of each request begin,
            from 0 to ``tokens``. A request may have none. None: all have the same number.
        max_q_len: bound on the query tokens of a request, 1 to 16, with ``q_cu_seq_lens`` only. None there: it is
            read back, which waits for the device and cannot be captured.
        mask: which query tokens of its own request each token sees, 32 bits a token: uint16 ``[batch, q_len, 2]`` or
            ``[tokens, 2]`` (low half first), or uint32 with a last dimension of 1; contiguous, 4-byte aligned. Any
            pattern, trees included. A token's position, which a window counts from, is that of its last key if the
            keys it sees stood in a row. None: causal.
        sinks: float32 ``[q_heads]`` or ``[kv_heads, group]``, contiguous: a logit of each head that enters the
            denominator alone. None: none.
        window_left: keys before its own that a token sees; -1: all.
        batch_invariant: make the bits of a request's output depend on its own tokens, keys and options alone, not
            on batch, bounds or grid. The workspace then grows with the batch: for each request, KV head, and query row
            at the bound, up to 128 / kv_heads partials of head_dim floats, fewer where ``max_seq_len`` or the window
            is short: one for every 256 keys up to four, beyond one for every 1024. Ragged requests of which some may
            have 16 rows (query tokens x group) or fewer and some more take two launches, each with such scratch.
        out: like ``q``, of dtype bfloat16, float16 or float8_e4m3fn (which saturates), 8-byte aligned, strides in
            multiples of 8 bytes. None makes it where ``q`` is a torch tensor, of q's dtype, or bfloat16 where that
            is float8_e4m3fn.
        lse: float32, shaped like ``q`` without head_dim, all tokens at one stride, else any strides; filled with
            the log-sum-exp in base 2, the sink included, the output scale not. None: not wanted.
        workspace: scratch that belongs to ``stream``; None: one that the cached plan keeps for it.
        stream: an int handle, an object with ``__cuda_stream__``, a torch stream, or None: torch's current stream
            where ``q`` is a torch tensor, else the legacy default stream.
        backend: "auto" (a backend measured on this compute capability) or a backend's name.
        enable_pdl: launch with programmatic stream serialization.
        runtime: None: the process's default.

    Returns:
        ``out``.

    Raises:
        UsageError: an argument is outside its domain.
        BackendError: nothing runs this on the device.
        WorkspaceError: the workspace does not fit, or the stream captures and has none yet.
        MissingError, SourceError, CorruptError: the kernel cannot be had.
        DeviceError: the driver or the ABI gate refuses.
    """
    result: QueryT | OutT = run_decode(PagedDecodePlan, PAGED_DECODE, locals())
    return result
