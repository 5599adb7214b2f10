"""What FlashInfer's operators share behind their arguments: the call of the published kernels, its run, its answer."""

from __future__ import annotations

from typing import Any

from ..attention.backends import AUTO
from ..attention.checks import integer
from ..attention.runtime import Runtime
from ..attention.trtllm_gen import run
from ..attention.trtllm_gen.calls import Call
from ..errors import UsageError
from ..kernels.trtllm_gen.arguments import NO_OUT_SCALES
from ..tensor import TensorView
from .arguments import (
    flat_tokens,
    longest_query,
    pdl_of,
    sinks_of,
    split_cache,
    tensor_or_none,
)
from .outputs import Output, lse_of
from .scales import scales_of


def run_published(
    kind: type[Call],
    query: Any,
    output: Output,
    workspace_buffer: Any,
    *,
    query_view: TensorView,
    runtime: Runtime,
    bmm1_scale: Any,
    bmm2_scale: Any,
    lse: Any,
    return_lse: bool,
    sinks: Any,
    enable_pdl: bool | None,
    skip_softmax: float | None,
    bmm1_scale_log2: Any = None,
    sinks_name: str = "sinks",
    counters: Any = None,
    backend: str = AUTO,
    **fields: Any,
) -> Any:
    """Run a call of ``kind`` on the published kernels; the output, or (output, lse).

    ``query`` is the caller's tensor, ``query_view`` the same as ``[tokens, heads, head_dim]``; ``fields`` are those of
    the call that need no work here.

    Raises:
        as ``cubin_runtime.attention.trtllm_gen.run``.
    """
    q, shape = query_view, output.view.shape
    scales = scales_of(bmm1_scale, bmm2_scale, bmm1_scale_log2, q.device, runtime)
    kept_lse = lse_of(lse, return_lse, query, (q.shape[0], q.shape[1]), runtime)
    lse_view = tensor_or_none(kept_lse, "lse", q.device)
    nested = len(shape) == 4  # [batch, q_len, heads, head_dim]; the kernels know tokens alone
    if nested and lse_view is not None and lse_view.shape == shape[:3]:
        lse_view = flat_tokens(lse_view, "lse")
    if output.scales != NO_OUT_SCALES:
        fields["out_scales"] = output.scales
    call = kind(
        query=q,
        out=flat_tokens(output.view, "out") if nested else output.view,
        bmm1=scales.bmm1,
        bmm2=scales.bmm2,
        sinks=sinks_of(sinks, sinks_name, q.device),
        lse=lse_view,
        skip_softmax_factor=skip_softmax or 0.0,
        pdl=pdl_of(enable_pdl),
        **fields,
    )
    run(call, workspace_buffer, counters=counters, backend=backend, runtime=runtime)
    return (output.tensor, kept_lse) if return_lse else output.tensor


def block_scales(kv_cache_sf: Any, kv_layout: str) -> dict[str, Any]:
    """The fields of a call for the block scales of an FP4 cache; both None without them."""
    key, value = (None, None) if kv_cache_sf is None else split_cache(kv_cache_sf, kv_layout, "kv_cache_sf")
    return {"key_scales": key, "value_scales": value}


def query_lengths(
    q_len: int | None, max_q_len: int | None, cum_seq_lens_q: Any, batch: int, tokens: int, runtime: Runtime
) -> tuple[int, TensorView | None]:
    """The bound on query lengths, and their running sum where they differ.

    Raises:
        UsageError: both a length for all and a running sum are given, or neither.
    """
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise UsageError(f"max_q_len={max_q_len} without cum_seq_lens_q: nothing says which tokens are whose")
        if q_len is None:
            raise UsageError("q_len_per_req: None without cum_seq_lens_q; expected the query tokens of a request")
        return integer("q_len_per_req", q_len), None
    if q_len is not None:
        raise UsageError(f"q_len_per_req={q_len} with cum_seq_lens_q: expected None where lengths differ")
    return longest_query(max_q_len, cum_seq_lens_q, batch, tokens, runtime)
