"""Paged decode: a plan made once for shapes and options, run many times, and the plain function on top."""

from __future__ import annotations

import math
from typing import Any

from ..errors import UsageError
from ..launch.driver import DeviceFacts
from ..launch.hopper.decode import DecodeProblem
from ..launch.hopper.select import DecodeShape, select_decode
from ..launch.streams import stream_handle
from ..launch.workspace import Workspace
from .backends import AUTO, resolve_backend
from .decode_checks import DecodeTensors, check_decode, decode_tensors
from .decode_plan import PagedDecodePlan
from .runtime import Runtime, default_runtime
from .views import DTYPE_NAMES, TensorView

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
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
    device_facts: DeviceFacts | None = None,
) -> PagedDecodePlan:
    """Choose the kernel and grid for tensors like these; arguments and errors as ``paged_decode``.

    Nothing is launched or loaded and no tensor is read: only dtypes, shapes, strides and the caches' addresses
    matter. ``device_facts`` plans for a described device instead of the one that ``q`` is on.
    """
    tensors = decode_tensors(q, k_cache, v_cache, page_table, seq_lens, out, lse, kv_layout)
    scale = _scale_of(softmax_scale, tensors.q)
    check_decode(tensors, max_seq_len, scale)
    return _plan(
        runtime or default_runtime(), tensors, kv_layout, max_seq_len, scale, backend, enable_pdl, device_facts
    )


def paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    max_seq_len: int,
    softmax_scale: float | None = None,
    kv_layout: str = "NHD",
    out: Any = None,
    lse: Any = None,
    workspace: Workspace | None = None,
    stream: Any = None,
    backend: str = AUTO,
    enable_pdl: bool = False,
    runtime: Runtime | None = None,
) -> Any:
    """Attention of one query token a request over its paged KV cache (GQA decode).

    Args:
        q: bfloat16 ``[batch, q_heads, head_dim]``, head_dim 128; q_heads is 1 to 16 times kv_heads.
        k_cache: bfloat16 ``[pages, page_size, kv_heads, head_dim]`` (NHD) or ``[pages, kv_heads, page_size,
            head_dim]`` (HND), page_size 16, 32, 64, 128 or 256. Strides are taken as they are, in multiples of 8
            elements, so one tensor that holds K and V serves through its two views.
        v_cache: like ``k_cache``.
        page_table: int32 ``[batch, columns]``, the pages of each request in order; entries past a length are not
            read.
        seq_lens: int32 ``[batch]``, keys of each request; 0 gives output 0 and log-sum-exp -inf.
        max_seq_len: bound on every length; at most columns x page_size. The launch depends on it, never on the
            lengths.
        softmax_scale: factor of the scores; None: 1 / sqrt(head_dim).
        kv_layout: "NHD" or "HND".
        out: bfloat16 like ``q``, 8-byte aligned, strides in multiples of 4 elements; None allocates it where ``q``
            is a torch tensor.
        lse: float32 ``[batch, q_heads]``, any strides, filled with the log-sum-exp in base 2; None: not wanted.
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
    if out is None:
        out = _empty_like(q)
    if stream is None:
        stream = _current_stream(q)
    rt = runtime or default_runtime()
    tensors = decode_tensors(q, k_cache, v_cache, page_table, seq_lens, out, lse, kv_layout)
    scale = _scale_of(softmax_scale, tensors.q)
    plan = _cached_plan(rt, tensors, kv_layout, max_seq_len, scale, backend, enable_pdl)
    handle = stream_handle(stream)
    plan.run_views(tensors, workspace or plan.prepare(handle), handle, max_seq_len, scale)
    return out


def _cached_plan(
    runtime: Runtime,
    tensors: DecodeTensors,
    kv_layout: str,
    max_seq_len: int,
    scale: float,
    backend: str,
    enable_pdl: bool,
) -> PagedDecodePlan:
    check_decode(tensors, max_seq_len, scale)
    capacity = tensors.page_table.shape[1] * tensors.k.shape[1]
    # Lengths grow step by step; powers of two keep one plan for long.
    bound = min(capacity, 1 << max(6, (max_seq_len - 1).bit_length()))
    key = ("paged_decode", kv_layout, tensors.signature, bound, backend, enable_pdl)

    plan: PagedDecodePlan = runtime.plans.get(
        key, lambda: _plan(runtime, tensors, kv_layout, bound, scale, backend, enable_pdl, None)
    )
    return plan


def _plan(
    runtime: Runtime,
    tensors: DecodeTensors,
    kv_layout: str,
    max_seq_len: int,
    scale: float,
    backend: str,
    enable_pdl: bool,
    device_facts: DeviceFacts | None,
) -> PagedDecodePlan:
    device = device_facts or runtime.driver.device(tensors.q.device)
    resolve_backend("paged_decode", backend, device)
    shape = DecodeShape(
        dtype=DTYPE_NAMES[tensors.q.dtype],
        head_dim=tensors.q.shape[2],
        group=tensors.group,
        kv_heads=tensors.k.shape[2],
        batch=tensors.q.shape[0],
        max_seq_len=max_seq_len,
    )
    problem = DecodeProblem(
        batch=shape.batch,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        page_size=tensors.k.shape[1],
        num_pages=tensors.k.shape[0],
        max_seq_len=max_seq_len,
        softmax_scale=scale,
        q_strides=(tensors.q.strides[0], tensors.q.strides[1]),
        out_strides=(tensors.out.strides[0], tensors.out.strides[1]),
        lse_strides=(tensors.lse.strides[0], tensors.lse.strides[1]) if tensors.lse else (0, 0),
        table_stride=tensors.page_table.strides[0],
        programmatic_serialization=enable_pdl,
    )
    selection = select_decode(runtime.own_release().kernels, shape, device)
    return PagedDecodePlan(runtime, tensors, kv_layout, selection, problem)


def _scale_of(softmax_scale: float | None, q: TensorView) -> float:
    if softmax_scale is not None:
        return float(softmax_scale)
    return 1 / math.sqrt(q.shape[-1]) if q.shape and q.shape[-1] else 1.0


def _empty_like(q: Any) -> Any:
    if not hasattr(q, "new_empty"):
        raise UsageError(f"out: None, expected a tensor where q is a {type(q).__name__} and no torch tensor")
    return q.new_empty(q.shape)


def _current_stream(q: Any) -> int:
    if not hasattr(q, "data_ptr"):
        return 0
    import torch

    # The raw query costs 0.06 us where torch.cuda.current_stream() costs 2.9.
    return int(torch._C._cuda_getCurrentRawStream(q.device.index))
