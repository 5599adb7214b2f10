"""MLA decode: a plan made once for shapes and options, run many times, and the plain function on top."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from ...kernels.native.mla.plan import MlaProblem
from ...kernels.native.mla.select import MlaShape, select_mla_decode
from ...launch.driver import DeviceFacts
from ...launch.semaphore_workspace import SemaphoreWorkspace
from ...launch.streams import stream_handle
from ...launch.workspace import Workspace
from ..backends import AUTO, resolve_backend
from ..decode_checks import DecodeOptions, check_kinds, integer
from ..decode_defaults import check_workspace, longest_of, plan_bound
from ..decode_tensors import forms_of, split_scale, token_stride
from ..runtime import Runtime, default_runtime
from ..tracing import record, recording
from ..tracing.mla import traced_mla_decode
from ..views import DTYPE_NAMES, is_torch, view_of
from .checks import check_mla_decode
from .plan import MlaDecodePlan
from .tensors import ROPE, MlaTensors, mla_tensors


def plan_mla_decode(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    seq_lens: Any,
    out: Any,
    lse: Any = None,
    *,
    max_seq_len: int,
    softmax_scale: Any,
    output_scale: Any = 1.0,
    q_cu_seq_lens: Any = None,
    max_q_len: int | None = None,
    mask: Any = None,
    sinks: Any = None,
    batch_invariant: bool = False,
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | None = None,
) -> MlaDecodePlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``mla_decode``.

    Nothing is launched or loaded and no tensor is read: only dtypes, shapes, strides and the cache's address matter.
    So ``max_q_len`` must be given with ``q_cu_seq_lens``, and ``out`` always. Whether there are a mask, sinks, a
    log-sum-exp, and scales on the device is planned: every run must have them alike. ``device_facts`` plans for a
    described device instead of the one that ``q`` is on.
    """
    softmax_number, softmax_tensor = _required_scale(softmax_scale)
    output_number, output_tensor = split_scale(output_scale, "output_scale")
    optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
    tensors = mla_tensors((q, kv_cache, kv_cache, page_table, seq_lens, out, *optional))
    options = DecodeOptions(
        max_seq_len=max_seq_len,
        softmax_scale=softmax_number,
        output_scale=1.0 if output_number is None else output_number,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
        backend=backend,
        enable_pdl=enable_pdl,
    )
    return _plan(runtime or default_runtime(), tensors, options, device_facts, is_torch(q))


def mla_decode(
    q: Any,
    kv_cache: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    max_seq_len: int,
    softmax_scale: Any,
    output_scale: Any = 1.0,
    q_cu_seq_lens: Any = None,
    max_q_len: int | None = None,
    mask: Any = None,
    sinks: Any = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Workspace | SemaphoreWorkspace | None = None,
    stream: Any = None,
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> Any:
    """Multi-head latent attention of the newest tokens of each request over its paged latent cache.

    All heads share one row of the cache a token: its first columns are the latent, which is the value and with the 64
    rope columns behind it the key. Queries come projected into the latent space. Nothing is copied or moved.

    Args:
        q: ``[batch, heads, latent + 64]`` (one token a request), ``[batch, q_len, heads, latent + 64]`` with q_len 1
            to 16, or ``[tokens, heads, latent + 64]`` with ``q_cu_seq_lens``. latent is 512 or 256, heads 1 to 128.
            bfloat16, or like the cache where a kernel takes that. All tokens lie at one stride; addresses and strides
            in multiples of 16 bytes.
        kv_cache: ``[pages, page_size, latent + 64]`` or ``[pages, 1, page_size, latent + 64]``, bfloat16 or
            float8_e4m3fn, page_size 32, 64 or 128. Strides are taken as they are, in multiples of 16 bytes.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; entries past a length are not
            read.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, its query tokens' included. 0 gives output 0 and
            log-sum-exp -inf; with fewer keys than query tokens so do the first of these.
        max_seq_len: bound on every length; at most columns x page_size. The launch depends on it, never on the
            lengths.
        softmax_scale: factor of the scores: a number, or a float32 tensor of one element on the device, read when
            the kernel runs. It has no default: it follows from the head dimension before the projection.
        output_scale: factor of the output, likewise.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, contiguous: where the query tokens of each request begin,
            from 0 to ``tokens``. A request may have none. None: all have the same number.
        max_q_len: bound on the query tokens of a request, 1 to 16, with ``q_cu_seq_lens`` only; it may be more than
            any has. None there: the sums are read back and checked, which waits for the device and cannot be captured.
        mask: which query tokens of its own request each token sees, 32 bits a token: uint16 ``[batch, q_len, 2]`` or
            ``[tokens, 2]`` (low half first), or uint32 with a last dimension of 1; contiguous. None: causal.
        sinks: float32 ``[heads]``, contiguous: a logit of each head that enters the denominator alone. None: none.
        batch_invariant: make the bits of a request's output depend on its own tokens, keys and options alone, not
            on batch, bounds or grid.
        out: shaped like ``q`` with the latent columns alone, of dtype bfloat16, float16 or float8_e4m3fn (which
            saturates), addresses and strides in multiples of 16 bytes. None makes it where ``q`` is a torch tensor,
            of dtype bfloat16.
        lse: float32, shaped like ``q`` without its last dimension, all tokens at one stride; filled with the
            log-sum-exp in base 2, the sink included, the output scale not. None: not wanted.
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
        out = _made_output(rt, q)
    if stream is None:
        stream = rt.memory.current_stream(q)
    check_kinds(batch_invariant, enable_pdl, ("backend", backend))
    if workspace is not None:
        check_workspace(workspace)
    if max_q_len is not None:
        max_q_len = integer("max_q_len", max_q_len)
    elif q_cu_seq_lens is not None:
        max_q_len = longest_of(rt, q, q_cu_seq_lens, stream)
    scale, softmax_tensor = _required_scale(softmax_scale)
    output_number, output_tensor = split_scale(output_scale, "output_scale")
    optional = (lse, q_cu_seq_lens, mask, sinks, softmax_tensor, output_tensor)
    given = (q, kv_cache, kv_cache, page_table, seq_lens, out, *optional)
    # Torch tensors are told apart by what they are; others by their views.
    tensors, form = None, forms_of(given)
    if form is None:
        tensors = mla_tensors(given)
        form = tensors.signature
    factor = 1.0 if output_number is None else output_number
    bound = plan_bound(max_seq_len)
    key = ("mla_decode", form, bound, max_q_len, batch_invariant, backend, enable_pdl)

    def planned() -> MlaDecodePlan:
        asked = DecodeOptions(
            max_seq_len=max_seq_len,
            softmax_scale=scale,
            output_scale=factor,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
            backend=backend,
            enable_pdl=enable_pdl,
        )
        return _plan(rt, tensors or mla_tensors(given), asked, None, is_torch(q), bound)

    plan: MlaDecodePlan = rt.plans.get(key, planned)
    addresses = tensors.addresses if tensors else tuple([0 if t is None else t.data_ptr() for t in given])
    handle = stream_handle(stream)
    plan.step(addresses, workspace, handle, max_seq_len, scale, factor)
    if recording():
        traced = traced_mla_decode(
            tensors or mla_tensors(given),
            max_seq_len=max_seq_len,
            softmax_scale=scale,
            output_scale=factor,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
        )
        record(traced)
    return out


def _plan(
    runtime: Runtime,
    tensors: MlaTensors,
    options: DecodeOptions,
    device_facts: DeviceFacts | None,
    of_torch: bool,
    wanted_bound: int | None = None,
) -> MlaDecodePlan:
    """The plan, checked first; ``wanted_bound`` raises the bound as far as the page table goes."""
    check_mla_decode(tensors, options)
    rows, q, out, lse = tensors.k, tensors.q, tensors.out, tensors.lse
    bound = options.max_seq_len
    if wanted_bound is not None:
        bound = min(tensors.page_table.shape[1] * rows.shape[1], wanted_bound)
    device = device_facts or runtime.driver.device(q.device)
    resolve_backend("mla_decode", options.backend, device)
    shape = MlaShape(
        dtype=DTYPE_NAMES[rows.dtype],
        q_dtype=DTYPE_NAMES[q.dtype],
        latent=tensors.latent,
        rope=ROPE,
        heads=tensors.q_heads,
        batch=tensors.batch,
        q_len=tensors.q_len or options.max_q_len or 1,
        ragged=tensors.ragged,
        max_seq_len=bound,
        batch_invariant=bool(options.batch_invariant),
    )
    selection = select_mla_decode(runtime.own_release().kernels, shape, device)
    problem = MlaProblem(
        batch=shape.batch,
        tokens=tensors.tokens,
        q_len=shape.q_len,
        heads=shape.heads,
        latent=shape.latent,
        rope=shape.rope,
        page_size=rows.shape[1],
        num_pages=rows.shape[0],
        max_seq_len=bound,
        kv_dtype=shape.dtype,
        q_dtype=shape.q_dtype,
        out_dtype=DTYPE_NAMES[out.dtype],
        softmax_scale=options.softmax_scale,
        output_scale=options.output_scale,
        q_strides=(token_stride("q", q, 2), q.strides[-2]),
        out_strides=(token_stride("out", out, 2), out.strides[-2]),
        lse_strides=(token_stride("lse", lse, 1), lse.strides[-1]) if lse else (0, 0),
        table_stride=tensors.page_table.strides[0],
        programmatic_serialization=bool(options.enable_pdl),
    )
    return MlaDecodePlan(runtime, tensors, selection, problem, of_torch)


def _required_scale(softmax_scale: Any) -> tuple[float, Any]:
    number, tensor = split_scale(softmax_scale, "softmax_scale")
    if number is None and tensor is None:
        raise UsageError("softmax_scale: None, expected a number or a float32 CUDA tensor of one element")
    return 1.0 if number is None else number, tensor


def _made_output(runtime: Runtime, q: Any) -> Any:
    shape = view_of(q, "q").shape
    if len(shape) < 3 or shape[-1] <= ROPE:
        raise UsageError(f"q: shape {shape}, expected [batch, heads, latent + {ROPE}]")
    try:
        return runtime.memory.empty(q, (*shape[:-1], shape[-1] - ROPE), "bfloat16")
    except UsageError as error:
        raise UsageError(f"out: None, expected a tensor ({error})") from error
