"""MLA decoding on our own kernels, as FlashInfer's operators ask for it: forms of its tensors, the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..attention.backends import HOPPER
from ..attention.checks import integer
from ..attention.latent_cache import latent_view
from ..attention.mla_decode import mla_decode
from ..attention.runtime import Runtime
from ..attention.scales import ScaleProduct
from ..errors import UsageError, WorkspaceError
from ..launch.semaphore_workspace import SemaphoreWorkspace
from ..tensor import TensorView, view_of
from .arguments import (
    pdl_of,
    sinks_of,
    tensor_or_none,
    without,
)
from .outputs import Output, lse_of
from .pages import SEMAPHORE_BYTES, raise_renamed, split_workspace
from .scales import factor_of

_BATCH_NAMES = {
    "q": "query",
    "page_table": "block_tables",
    "softmax_scale": "bmm1_scale",
    "output_scale": "bmm2_scale",
    "q_cu_seq_lens": "cum_seq_lens_q",
}


def decode_latent(
    query: Any,
    q: TensorView,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: TensorView,
    max_seq_len: int,
    output: Output,
    *,
    runtime: Runtime,
    max_q_len: int | None,
    q_cu_seq_lens: TensorView | None,
    bmm1_scale: Any,
    bmm2_scale: Any,
    lse: Any = None,
    return_lse: bool = False,
    sinks: Any = None,
    enable_pdl: bool | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Decode ``q``, the view of ``query`` as ``mla_decode`` takes it. (output, lse), or output.

    Raises:
        as ``cubin_runtime.attention.mla_decode``.
    """
    tokens = q.shape[0] if len(q.shape) == 3 else q.shape[0] * q.shape[1]
    kept_lse = lse_of(lse, return_lse, query, (tokens, q.shape[-2]), runtime)
    lse_view = tensor_or_none(kept_lse, "lse", q.device)
    table = view_of(block_tables, "block_tables")
    capacity = table.shape[-1] * latent_view(view_of(kv_cache, "kv_cache")).shape[1] if table.shape else 0
    workspace = split_workspace(workspace_buffer, q.device)
    try:
        launch_latent(
            query,
            q,
            kv_cache,
            workspace,
            table,
            seq_lens,
            like(q, output.view, "out", 1),
            None if lse_view is None else like(q, lse_view, "lse", 0),
            runtime=runtime,
            max_seq_len=min(integer("max_seq_len", max_seq_len), capacity),
            max_q_len=max_q_len,
            q_cu_seq_lens=q_cu_seq_lens,
            softmax_scale=factor_of("bmm1_scale", bmm1_scale, q.device),
            output_scale=factor_of("bmm2_scale", bmm2_scale, q.device),
            names=_BATCH_NAMES,
            sinks=sinks_of(sinks, "sinks", q.device),
            enable_pdl=enable_pdl,
            batch_invariant=batch_invariant,
        )
    except WorkspaceError as error:
        raise WorkspaceError(f"workspace_buffer, behind its {SEMAPHORE_BYTES} bytes of semaphores: {error}") from error
    return (output.tensor, kept_lse) if return_lse else output.tensor


def launch_latent(
    query: Any,
    q: TensorView,
    kv_cache: Any,
    workspace: SemaphoreWorkspace,
    page_table: Any,
    seq_lens: TensorView,
    out: TensorView,
    lse: TensorView | None = None,
    *,
    runtime: Runtime,
    softmax_scale: ScaleProduct,
    output_scale: ScaleProduct,
    enable_pdl: bool | None,
    names: Mapping[str, str],
    **options: Any,
) -> None:
    """``mla_decode``, which takes the other ``options``, on the stream of ``query``, the tensor behind ``q``.

    ``names`` are what the operator calls the arguments of ``mla_decode``, where it calls them otherwise.
    """
    try:
        mla_decode(
            q,
            kv_cache,
            page_table,
            seq_lens,
            softmax_scale=softmax_scale,
            output_scale=output_scale,
            out=out,
            lse=lse,
            workspace=workspace,
            stream=runtime.memory.current_stream(query),
            backend=HOPPER,
            enable_pdl=pdl_of(enable_pdl),
            runtime=runtime,
            **options,
        )
    except (UsageError, WorkspaceError) as error:
        raise_renamed(error, names)


def like(q: TensorView, view: TensorView, name: str, trailing: int) -> TensorView:
    """``view``, one row a token and head, with the leading dimensions of ``q``: the same memory.

    ``[batch, q_len, heads, ...]``, ``[batch * q_len, heads, ...]`` and, for one token, either stand for one another;
    ``trailing`` dimensions follow the heads.

    Raises:
        UsageError: it is neither.
    """
    wanted = q.shape[:-1]
    end = len(view.shape) - trailing
    shape, strides = view.shape[:end], view.strides[:end]
    last, last_strides = view.shape[end:], view.strides[end:]
    if shape == wanted:
        return view
    if len(wanted) == 3 and shape == (wanted[0] * wanted[1], wanted[2]):
        lead = (wanted[1] * strides[0], *strides)
        return TensorView(view.pointer, view.dtype, (*wanted, *last), (*lead, *last_strides), view.device)
    if len(shape) == 3 and shape[1] == 1 and (shape[0], shape[2]) == wanted:
        return without(view, 1)
    raise UsageError(f"{name}: shape {view.shape}, expected {(*wanted, *last)}")
