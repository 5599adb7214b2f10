"""Attention on native kernels: our operators, their errors in the caller's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...attention.backends import NATIVE
from ...attention.checks import ScaleProduct
from ...attention.fast_path.operator_function import full_path
from ...errors import UsageError, WorkspaceError
from ...tensor import TensorView, view_of
from ..renaming import renamed
from .arguments import (
    Arguments,
    BatchArguments,
    DecodeArguments,
    MlaArguments,
    PagedArguments,
    sinks_of,
    tensor_or_none,
)
from .layouts import like_query
from .outputs import Output, lse_of, with_lse
from .scales import factor_of, scores_factor
from .workspace import SEMAPHORE_BYTES, split_workspace

_DEPENDENT_LAUNCH_FROM = (9, 0)  # compute capability
# Arguments of our operators -> those of the batch operators, where the names differ.
_BATCH_NAMES = {
    "q": "query",
    "k_cache": "kv_cache (K)",
    "v_cache": "kv_cache (V)",
    "page_table": "block_tables",
    "softmax_scale": "bmm1_scale",
    "output_scale": "bmm2_scale",
}


def check_skip_factor(call: BatchArguments) -> None:
    """Check the factor with which a kernel may skip keys of little weight; native kernels skip none.

    Raises:
        UsageError: it is below 0, or NaN.
    """
    factor = call.skip_softmax_threshold_scale_factor
    if factor is not None and not factor >= 0:
        raise UsageError("expected None, 0 or more", argument="skip_softmax_threshold_scale_factor", value=repr(factor))


def page_table_of(call: PagedArguments) -> TensorView:
    """``block_tables``; raises ``UsageError`` unless its shape is what ``uses_shared_paged_kv_idx`` says."""
    table = view_of(call.block_tables, "block_tables")
    shares = call.uses_shared_paged_kv_idx
    if len(table.shape) != (2 if shares else 3) or (not shares and table.shape[1] != 2):
        shape = "[batch, columns]" if shares else "[batch, 2, columns]"
        raise UsageError(
            f"shape {table.shape}, expected {shape} with uses_shared_paged_kv_idx={bool(shares)}",
            argument="block_tables",
        )
    return table


def decode_batch(
    decode: Callable[..., Any],
    call: DecodeArguments | MlaArguments,
    names: Mapping[str, str],
    q: TensorView,
    caches: tuple[TensorView, ...],
    pages: TensorView,
    lengths: TensorView,
    output: Output,
    *,
    page_size: int,
    output_scale: ScaleProduct | None = None,
    natural_lse: bool = False,
    **options: Any,
) -> Any:
    """Decode with a workspace whose first part is its semaphores; (output, lse), or output.

    Args:
        decode, call, names, options: as for ``launch_batch``.
        q, caches, pages, lengths: tensors of ``decode``; ``pages`` from ``page_table_of``.
        output: shaped like ``q``, or ``[tokens, heads, head_dim]``.
        page_size: tokens of a page.
        output_scale: None: ``bmm2_scale``.
        natural_lse: whether the LSE leaves in base e.

    Raises:
        as ``decode``.
    """
    device, tokens = q.device, q.shape[0] if len(q.shape) == 3 else q.shape[0] * q.shape[1]
    lse = lse_of(call, (tokens, q.shape[-2]), natural=natural_lse)
    lse_view = tensor_or_none(lse, "lse", device, written=True)
    launch_batch(
        decode,
        call,
        names,
        (q, *caches, pages, lengths),
        out=like_query(q, output.view, "out", 1),
        lse=None if lse_view is None else like_query(q, lse_view, "lse", 0),
        output_scale=output_scale or factor_of("bmm2_scale", call.bmm2_scale, device),
        max_seq_len=min(call.max_seq_len, pages.shape[-1] * page_size),
        **options,
    )
    return with_lse(call, output, lse, natural=natural_lse)


def launch_batch(
    decode: Callable[..., Any],
    call: BatchArguments,
    names: Mapping[str, str],
    tensors: tuple[Any, ...],
    **options: Any,
) -> None:
    """As ``launch``, with the workspace, the scale of the scores and the options that the batch operators share.

    ``names`` is needed where other names differ than all batch operators have in common.
    """
    device = tensors[0].device
    workspace = split_workspace(call.workspace_buffer, device)
    try:
        launch(
            decode,
            call,
            {**_BATCH_NAMES, **names},
            tensors,
            softmax_scale=scores_factor(call, device),
            workspace=workspace,
            batch_invariant=call.batch_invariant,
            **options,
        )
    except WorkspaceError as error:
        raise WorkspaceError(f"workspace_buffer, behind its {SEMAPHORE_BYTES} bytes of semaphores: {error}") from error


def launch(
    decode: Callable[..., Any],
    call: Arguments,
    names: Mapping[str, str],
    tensors: tuple[Any, ...],
    **options: Any,
) -> None:
    """Call ``decode``, one of our attention operators, with its positional ``tensors`` and other ``options``.

    ``names`` maps arguments of ``decode`` to those of the caller's operator where the names differ: errors use them.
    """
    rt, device = call.runtime, tensors[0].device
    has_pdl = rt.driver.device(device).capability >= _DEPENDENT_LAUNCH_FROM
    try:
        full_path(decode)(
            *tensors,
            sinks=sinks_of(call.sinks, "sinks", device),
            stream=rt.memory.current_stream(call.query),
            backend=NATIVE,
            enable_pdl=has_pdl if call.enable_pdl is None else bool(call.enable_pdl),
            runtime=rt,
            **options,
        )
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, names) from error
