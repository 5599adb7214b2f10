"""Attention on NVIDIA's trtllm-gen kernels: from an operator's arguments to one call, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ...attention.backends import AUTO
from ...attention.trtllm_gen import Call, run
from ...errors import UsageError, WorkspaceError
from ...tensor import TensorView, view_of
from ..renaming import renamed
from .arguments import BatchArguments, PagedArguments, sinks_of, tensor_or_none
from .layouts import cache_pair_by_head, flat_tokens
from .outputs import Output, lse_of, with_lse
from .scales import scale_from, scores_scale

if TYPE_CHECKING:
    from ...protocols import TrtllmGenBackend

_PAGED_NAMES = {
    "key_cache": "kv_cache (K)",
    "value_cache": "kv_cache (V)",
    "key_block_scales": "kv_cache_sf (K)",
    "value_block_scales": "kv_cache_sf (V)",
}
DECODE_NAMES = {**_PAGED_NAMES, "max_kv_len": "max_seq_len"}
MLA_NAMES = {**DECODE_NAMES, "key_cache": "kv_cache"}


def run_call(
    kind: type[Call],
    arguments: BatchArguments,
    q: TensorView,
    output: Output,
    *,
    backend: str = AUTO,
    names: Mapping[str, str] = _PAGED_NAMES,
    natural_lse: bool = False,
    **fields: Any,
) -> Any:
    """Run a call of ``kind`` with these ``fields`` and those that all calls have; (output, lse), or output.

    ``q`` is ``[tokens, heads, head_dim]``; the output may be ``[batch, q_len, heads, head_dim]``. ``names`` are the
    operator's names for arguments that have others in the call; ``natural_lse``: the LSE leaves in base e.

    Raises:
        as ``cubin_runtime.attention.trtllm_gen.run``, in the operator's names.
    """
    rt, device, out = arguments.runtime, q.device, output.view
    # A tensor that was made for the scale must live until the launch is enqueued.
    bmm1, _scale_memory = scores_scale(arguments, device)
    bmm2 = scale_from("bmm2_scale", arguments.bmm2_scale, device)
    lse = lse_of(arguments, (q.shape[0], q.shape[1]), natural=natural_lse)
    lse_view = tensor_or_none(lse, "lse", device, written=True)
    if len(out.shape) == 4:
        if lse_view is not None and lse_view.shape == out.shape[:3]:
            lse_view = flat_tokens(lse_view, "lse")
        out = flat_tokens(out, "out")
    if output.block_scales is not None:
        fields["out_scales"] = output.block_scales
    call = kind(
        query=q,
        out=out,
        bmm1=bmm1,
        bmm2=bmm2,
        sinks=sinks_of(arguments.sinks, names.get("sinks", "sinks"), device),
        lse=lse_view,
        window_left=arguments.window_left,
        skip_softmax_factor=arguments.skip_softmax_threshold_scale_factor or 0.0,
        pdl=arguments.enable_pdl is None or bool(arguments.enable_pdl),
        batch_invariant=arguments.batch_invariant,
        **fields,
    )
    counters = arguments.multi_ctas_kv_counter_buffer
    backend = cast("TrtllmGenBackend", backend)
    try:
        run(call, arguments.workspace_buffer, counters=counters, backend=backend, runtime=rt)
    except (UsageError, WorkspaceError) as error:
        raise renamed(error, {"counters": "multi_ctas_kv_counter_buffer", **names}) from error
    return with_lse(arguments, output, lse, natural=natural_lse)


def pages(call: PagedArguments, key: TensorView, value: TensorView) -> dict[str, Any]:
    """The fields of a call for paged K and V, ``[pages, kv_heads, page_size, head_dim]`` each, and their tables.

    Raises:
        UsageError: the block scales of an FP4 cache are refused by ``cache_pair_by_head``.
    """
    fields = {
        "key": key,
        "value": value,
        "block_tables": view_of(call.block_tables, "block_tables"),
        "shares_index": call.uses_shared_paged_kv_idx,
    }
    if call.kv_cache_sf is not None:
        scales = cache_pair_by_head(call.kv_cache_sf, call.kv_layout, "kv_cache_sf")
        fields |= {"key_scales": scales[0], "value_scales": scales[1]}
    return fields
