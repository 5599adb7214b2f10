"""Decoding over pages on our own kernels, as FlashInfer's XQA operators ask for it: forms, workspace, the launch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

from ..attention.backends import HOPPER
from ..attention.checks import integer
from ..attention.paged_decode import paged_decode
from ..attention.runtime import Runtime
from ..attention.scales import ScaleProduct
from ..attention.trtllm_gen.checks import check_device, is_contiguous
from ..dtypes import ITEM_BYTES
from ..errors import UsageError, WorkspaceError
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..tensor import TensorView, view_of
from .arguments import (
    cache_pair,
    nested_tokens,
    pdl_of,
    query_of,
    sinks_of,
    tensor_or_none,
    without,
)
from .outputs import (
    E4M3,
    is_fp4,
    lse_of,
    output_of,
)
from .scales import factor_of, times

SEMAPHORE_BYTES = 8 << 20
_DEPENDENT_LAUNCH_FROM = (9, 0)  # compute capability
_NAMED = re.compile(r"(\w*)(.*)", re.DOTALL)
_BATCH_NAMES = {
    "q": "query",
    "k_cache": "kv_cache (K)",
    "v_cache": "kv_cache (V)",
    "page_table": "block_tables",
    "softmax_scale": "bmm1_scale",
    "output_scale": "bmm2_scale",
}


def decode_batch(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    *,
    runtime: Runtime,
    q_len: int,
    q_cu_seq_lens: Any,
    bmm1_scale: Any,
    bmm2_scale: Any,
    o_scale: float | None,
    out: Any,
    out_dtype: Any = None,
    kv_layout: str,
    lse: Any = None,
    return_lse: bool = False,
    names: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """Decode ``query`` ``[tokens, q_heads, head_dim]``; (output, lse) or output.

    ``options`` and ``names`` are those of ``launch``; the latter are the operator's own beside what all of them share.

    Raises:
        as ``cubin_runtime.attention.paged_decode``.
    """
    if is_fp4(out, out_dtype):
        raise UsageError("out_dtype or out is nvfp4: backend xqa writes bfloat16, float16 and float8_e4m3fn")
    q, lengths = query_of(query, 3), lengths_of(seq_lens)
    ragged = q_cu_seq_lens is not None
    if not ragged and (q_len < 1 or q.shape[0] != lengths.shape[0] * q_len):
        raise UsageError(f"query: {q.shape[0]} tokens for {lengths.shape[0]} requests of {q_len}")
    key, value = cache_pair(kv_cache, kv_layout)
    output = output_of(out, out_dtype, query, q.shape, q.dtype, None, None, runtime)
    kept_lse = lse_of(lse, return_lse, query, (q.shape[0], q.shape[1]), runtime)
    # The peer: kv_scale = bmm2 * o_scale, q_scale = bmm1 / kv_scale * sqrt(D), rcp_out_scale = 1 / o_scale. By the
    # algebra of xqa: scores x bmm1; output x bmm2 where it is e4m3, else x bmm2 * o_scale.
    output_scale = factor_of("bmm2_scale", bmm2_scale, q.device)
    if output.view.dtype != E4M3 and o_scale is not None:
        output_scale = times(output_scale, factor_of("o_scale", o_scale, q.device), runtime)
    lse_view = tensor_or_none(kept_lse, "lse", q.device)
    if lse_view is not None and lse_view.shape != q.shape[:2]:
        raise UsageError(f"lse: shape {lse_view.shape}, expected {q.shape[:2]}")
    nested = q_len if q_len > 1 and not ragged else None
    table = view_of(block_tables, "block_tables")
    page_size = key.shape[1 if kv_layout == "NHD" else 2]
    capacity = table.shape[-1] * page_size if table.shape else 0
    workspace = split_workspace(workspace_buffer, q.device)
    try:
        launch(
            query,
            _by_request(q, nested),
            key,
            value,
            workspace,
            table,
            lengths,
            _by_request(output.view, nested),
            None if lse_view is None else _by_request(lse_view, nested),
            runtime=runtime,
            q_len=q_len,
            q_cu_seq_lens=q_cu_seq_lens,
            softmax_scale=factor_of("bmm1_scale", bmm1_scale, q.device),
            output_scale=output_scale,
            kv_layout=kv_layout,
            names={**_BATCH_NAMES, **(names or {})},
            max_seq_len=min(integer("max_seq_len", max_seq_len), capacity),
            **options,
        )
    except WorkspaceError as error:
        raise WorkspaceError(f"workspace_buffer, behind its {SEMAPHORE_BYTES} bytes of semaphores: {error}") from error
    return (output.tensor, kept_lse) if return_lse else output.tensor


def launch(
    query: Any,
    q: TensorView,
    k_cache: Any,
    v_cache: Any,
    workspace: SemaphoreWorkspace,
    page_table: Any,
    seq_lens: TensorView,
    out: TensorView,
    lse: TensorView | None = None,
    *,
    runtime: Runtime,
    max_seq_len: int,
    q_len: int,
    q_cu_seq_lens: Any,
    softmax_scale: ScaleProduct,
    output_scale: ScaleProduct,
    kv_layout: str,
    sinks: Any,
    enable_pdl: bool | None,
    names: Mapping[str, str],
    **options: Any,
) -> None:
    """``paged_decode``, which takes the other ``options``, on the stream of ``query``, the tensor behind ``q``.

    ``names`` are what the operator calls the arguments of ``paged_decode``, where it calls them otherwise.
    """
    has_pdl = runtime.driver.device(q.device).capability >= _DEPENDENT_LAUNCH_FROM
    try:
        paged_decode(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            max_seq_len=max_seq_len,
            softmax_scale=softmax_scale,
            output_scale=output_scale,
            kv_layout=kv_layout,
            q_cu_seq_lens=q_cu_seq_lens,
            max_q_len=None if q_cu_seq_lens is None else q_len,
            sinks=sinks_of(sinks, "sinks", q.device),
            out=out,
            lse=lse,
            workspace=workspace,
            stream=runtime.memory.current_stream(query),
            backend=HOPPER,
            enable_pdl=pdl_of(enable_pdl, default=has_pdl),
            runtime=runtime,
            **options,
        )
    except (UsageError, WorkspaceError) as error:
        raise_renamed(error, names)


def raise_renamed(error: UsageError | WorkspaceError, names: Mapping[str, str]) -> NoReturn:
    """Raise the error again, the name that it begins with as ``names`` has it."""
    name, rest = _NAMED.fullmatch(str(error)).groups()  # type: ignore[union-attr]  # it matches any text
    if name not in names:
        raise error
    kind = UsageError if isinstance(error, UsageError) else WorkspaceError
    raise kind(f"{names[name]}{rest}") from error


def _by_request(view: TensorView, q_len: int | None) -> TensorView:
    return view if q_len is None else nested_tokens(view, q_len)


def split_workspace(workspace_buffer: Any, device: int) -> SemaphoreWorkspace:
    """Semaphores in the first 8 MiB of the buffer, scratch in the rest.

    Raises:
        WorkspaceError: nothing is left for scratch.
        UsageError: the buffer has gaps, is misaligned, or is on another device.
    """
    address, nbytes = scratch_of(workspace_buffer, device)
    if nbytes <= SEMAPHORE_BYTES:
        raise WorkspaceError(
            f"workspace_buffer: {nbytes} bytes, expected more than {SEMAPHORE_BYTES}: those are for semaphores"
        )
    scratch = (address + SEMAPHORE_BYTES, nbytes - SEMAPHORE_BYTES)
    return SemaphoreWorkspace(semaphores=(address, SEMAPHORE_BYTES), scratch=scratch)


def scratch_of(workspace_buffer: Any, device: int) -> tuple[int, int]:
    """As ``memory_of``; raises ``UsageError`` for an address that kernels cannot use too."""
    address, nbytes = memory_of(workspace_buffer, "workspace_buffer", device)
    if address % 16:
        raise UsageError(f"workspace_buffer: address {address:#x}, expected a multiple of 16")
    return address, nbytes


def memory_of(buffer: Any, name: str, device: int) -> tuple[int, int]:
    """Address and bytes of a contiguous tensor; raises ``UsageError`` for another or one elsewhere."""
    view = view_of(buffer, name)
    check_device(name, view, device)
    if not is_contiguous(view):
        raise UsageError(f"{name}: strides {view.strides}, expected a contiguous tensor")
    return view.pointer, prod(view.shape) * ITEM_BYTES[view.dtype]


def lengths_of(seq_lens: Any) -> TensorView:
    """Lengths ``[batch]``, also given as ``[batch, 1]``; raises ``UsageError`` for another shape."""
    view = view_of(seq_lens, "seq_lens")
    if len(view.shape) == 2 and view.shape[1] == 1:
        return without(view, 1)
    if len(view.shape) != 1:
        raise UsageError(f"seq_lens: shape {view.shape}, expected [batch] or [batch, 1]")
    return view
