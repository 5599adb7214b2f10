"""Paged decode: a plan made once for shapes and options, run many times, and the plain function on top."""

from __future__ import annotations

from typing import Any

from ..kernels.native.decode.plan import DecodeProblem
from ..kernels.native.decode.select import select_decode
from ..kernels.native.decode.shape import DecodeShape
from ..launch.driver import DeviceFacts
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..launch.streams import stream_handle
from ..launch.workspace import Workspace
from .backends import AUTO, resolve_backend
from .decode_checks import (
    DecodeOptions,
    check_decode,
    check_kinds,
    integer,
)
from .decode_defaults import (
    check_workspace,
    longest_of,
    made_output,
    plan_bound,
    softmax_number_of,
)
from .decode_plan import PagedDecodePlan
from .decode_tensors import (
    DecodeTensors,
    decode_tensors,
    forms_of,
    split_scale,
    token_stride,
)
from .runtime import Runtime, default_runtime
from .tracing import record, recording
from .tracing.decode import traced_decode
from .views import DTYPE_NAMES, is_torch

__all__ = ["PagedDecodePlan", "paged_decode", "plan_paged_decode"]


def plan_paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    out: Any,
    lse: Any = None,
    *,
    max_seq_len: int,
    softmax_scale: Any = None,
    output_scale: Any = 1.0,
    kv_layout: str = "NHD",
    q_cu_seq_lens: Any = None,
    max_q_len: int | None = None,
    mask: Any = None,
    sinks: Any = None,
    window_left: int = -1,
    batch_invariant: bool = False,
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | None = None,
) -> PagedDecodePlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``paged_decode``.

    Nothing is launched or loaded and no tensor is read: only dtypes, shapes, strides and the caches' addresses
    matter. So ``max_q_len`` must be given with ``q_cu_seq_lens``, and ``out`` always. Whether there are a mask,
    sinks, a log-sum-exp, and scales on the device is planned: every run must have them alike. ``device_facts``
    plans for a described device instead of the one that ``q`` is on.
    """
    softmax_number, softmax_tensor = split_scale(softmax_scale, "softmax_scale")
    output_number, output_tensor = split_scale(output_scale, "output_scale")
    optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
    given = (q, k_cache, v_cache, page_table, seq_lens, out, *optional)
    tensors = decode_tensors(given, kv_layout)
    options = DecodeOptions(
        max_seq_len=max_seq_len,
        softmax_scale=softmax_number_of(softmax_number, softmax_tensor, tensors.q),
        output_scale=1.0 if output_number is None else output_number,
        kv_layout=kv_layout,
        max_q_len=max_q_len,
        window_left=window_left,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
    )
    return _plan(runtime or default_runtime(), tensors, options, device_facts, is_torch(q))


def paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    max_seq_len: int,
    softmax_scale: Any = None,
    output_scale: Any = 1.0,
    kv_layout: str = "NHD",
    q_cu_seq_lens: Any = None,
    max_q_len: int | None = None,
    mask: Any = None,
    sinks: Any = None,
    window_left: int = -1,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Workspace | SemaphoreWorkspace | None = None,
    stream: Any = None,
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> Any:
    """Attention of the newest tokens of each request over its paged KV cache (GQA decode).

    A request's query tokens (one, or the drafts of speculative decoding) are its last keys: the cache holds them
    already. Token i of a request sees the keys in front of the query tokens and, of those, the ones up to itself, or
    those that its mask names.

    Args:
        q: ``[batch, q_heads, head_dim]`` (one token a request), ``[batch, q_len, q_heads, head_dim]`` with q_len 1
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
    rt = runtime or default_runtime()
    if out is None:
        out = made_output(rt, q)
    if stream is None:
        stream = rt.memory.current_stream(q)
    check_kinds(batch_invariant, enable_pdl, ("kv_layout", kv_layout), ("backend", backend))
    if workspace is not None:
        check_workspace(workspace)
    if max_q_len is not None:
        max_q_len = integer("max_q_len", max_q_len)
    elif q_cu_seq_lens is not None:
        max_q_len = longest_of(rt, q, q_cu_seq_lens, stream)
    window_left = integer("window_left", window_left)
    softmax_number, softmax_tensor = split_scale(softmax_scale, "softmax_scale")
    output_number, output_tensor = split_scale(output_scale, "output_scale")
    optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
    given = (q, k_cache, v_cache, page_table, seq_lens, out, *optional)
    # Torch tensors are told apart by what they are; others by their views.
    tensors, form = None, forms_of(given)
    if form is None:
        tensors = decode_tensors(given, kv_layout)
        form = tensors.signature
    scale = softmax_number_of(softmax_number, softmax_tensor, tensors.q if tensors else q)
    factor = 1.0 if output_number is None else output_number
    bound = plan_bound(max_seq_len)
    options = (kv_layout, max_q_len, window_left, batch_invariant, backend, enable_pdl)
    key = ("paged_decode", form, bound, *options)

    def planned() -> PagedDecodePlan:
        views = tensors or decode_tensors(given, kv_layout)
        asked = DecodeOptions(
            max_seq_len=max_seq_len,
            softmax_scale=scale,
            output_scale=factor,
            kv_layout=kv_layout,
            max_q_len=max_q_len,
            window_left=window_left,
            batch_invariant=batch_invariant,
            backend=backend,
            enable_pdl=enable_pdl,
        )
        return _plan(rt, views, asked, None, is_torch(q), bound)

    plan: PagedDecodePlan = rt.plans.get(key, planned)
    addresses = tensors.addresses if tensors else tuple([0 if t is None else t.data_ptr() for t in given])
    handle = stream_handle(stream)
    plan.step(addresses, workspace, handle, max_seq_len, scale, factor)
    if recording():
        traced = traced_decode(
            tensors or decode_tensors(given, kv_layout),
            max_seq_len=max_seq_len,
            softmax_scale=scale,
            output_scale=factor,
            window_left=window_left,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
        )
        record(traced)
    return out


def _plan(
    runtime: Runtime,
    tensors: DecodeTensors,
    options: DecodeOptions,
    device_facts: DeviceFacts | None,
    of_torch: bool,
    wanted_bound: int | None = None,
) -> PagedDecodePlan:
    """The plan, checked first; ``wanted_bound`` raises the bound as far as the page table goes."""
    check_decode(tensors, options)
    k = tensors.k
    bound = options.max_seq_len
    if wanted_bound is not None:
        bound = min(tensors.page_table.shape[1] * k.shape[1], wanted_bound)
    device = device_facts or runtime.driver.device(tensors.q.device)
    resolve_backend("paged_decode", options.backend, device)
    shape = DecodeShape(
        dtype=DTYPE_NAMES[k.dtype],
        q_dtype=DTYPE_NAMES[tensors.q.dtype],
        head_dim=k.shape[3],
        group=tensors.group,
        kv_heads=k.shape[2],
        batch=tensors.batch,
        q_len=tensors.q_len or options.max_q_len or 1,
        tokens=tensors.tokens,
        ragged=tensors.ragged,
        max_seq_len=bound,
        # A wider window than the bound hides nothing more, and a position less a window fits an int32.
        window_left=min(options.window_left, bound),
        batch_invariant=bool(options.batch_invariant),
    )
    selections = select_decode(runtime.own_release().kernels, shape, device)
    q, out, lse = tensors.q, tensors.out, tensors.lse
    problem = DecodeProblem(
        batch=shape.batch,
        tokens=shape.tokens,
        q_len=shape.q_len,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        page_size=k.shape[1],
        num_pages=k.shape[0],
        max_seq_len=bound,
        window_left=shape.window_left,
        kv_dtype=shape.dtype,
        q_dtype=DTYPE_NAMES[q.dtype],
        out_dtype=DTYPE_NAMES[out.dtype],
        softmax_scale=options.softmax_scale,
        output_scale=options.output_scale,
        q_strides=(token_stride("q", q, 2), q.strides[-2]),
        out_strides=(token_stride("out", out, 2), out.strides[-2]),
        lse_strides=(token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        table_stride=tensors.page_table.strides[0],
        programmatic_serialization=bool(options.enable_pdl),
    )
    return PagedDecodePlan(runtime, tensors, options.kv_layout, selections, problem, of_torch)
