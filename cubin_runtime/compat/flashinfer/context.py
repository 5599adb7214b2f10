"""Context attention on native kernels under FlashInfer's names: its options, and errors in the caller's names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...attention.backends import AUTO, NATIVE, TRTLLM_GEN
from ...attention.operators.context_attention import context_attention
from ...attention.paged_cache import E4M3
from ...attention.torch_ops import TORCH_SCRATCH
from ...attention.trtllm_gen.checks import check_vector
from ...errors import UsageError, WorkspaceError
from ...tensor import TensorView, view_of
from .arguments import ContextArguments, RaggedArguments, tensor_or_none
from .layouts import cache_pair
from .native import check_skip_factor, launch, page_table_of
from .outputs import is_fp4, lse_of, output_of
from .scales import factor_of
from .workspace import with_own_semaphores

_NAMES = {
    "q": "query",
    "q_cu_seq_lens": "cum_seq_lens_q",
    "max_seq_len": "max_kv_len",
    "softmax_scale": "bmm1_scale",
    "output_scale": "bmm2_scale",
}
_PAGED_NAMES = {**_NAMES, "k": "kv_cache (K)", "v": "kv_cache (V)", "page_table": "block_tables"}
_RAGGED_NAMES = {**_NAMES, "k": "key", "v": "value", "kv_cu_seq_lens": "cum_seq_lens_kv", "sinks": "attention_sinks"}


def context_backend(call: ContextArguments | RaggedArguments, device: int) -> str:
    """The backend that runs a context operator on ``device``; errors as ``find_backend``.

    The peer's default is its only kernels' name and says nothing of the device, so it is ``auto`` here.
    """
    return call.backend_on(device, AUTO if call.backend == TRTLLM_GEN else call.backend)


def attend_paged(call: ContextArguments, q: TensorView, lengths: TensorView) -> Any:
    """Attention over pages; ``lengths`` repeat the cumulative KV lengths. As ``_attend``."""
    call.refuse("kv_cache_sf", "o_sf_scale", "o_sf_vec_size", backend=NATIVE)
    key, value = cache_pair(call.kv_cache, call.kv_layout)
    table = page_table_of(call)
    view = view_of(call.cum_seq_lens_kv, "cum_seq_lens_kv")
    check_vector("cum_seq_lens_kv", view, lengths.shape[0] + 1, "int32", q.device)
    return _attend(
        call,
        _PAGED_NAMES,
        (q, key, value),
        causal=call.causal,
        window_right=call.window_right,
        max_seq_len=min(call.max_kv_len, table.shape[-1] * key.shape[1 if call.kv_layout == "NHD" else 2]),
        page_table=table,
        seq_lens=lengths,
        kv_layout=call.kv_layout,
    )


def attend_ragged(call: RaggedArguments, tensors: tuple[TensorView, ...], lengths: TensorView) -> Any:
    """Attention of ``tensors`` q, k and v. As ``_attend``."""
    key = tensors[1]
    if len(key.shape) != 3:
        raise UsageError(f"shape {key.shape}, expected [kv_tokens, kv_heads, head_dim]", argument="key")
    return _attend(
        call,
        _RAGGED_NAMES,
        tensors,
        causal=call.is_causal,
        max_seq_len=min(call.max_kv_len, key.shape[0]),
        kv_cu_seq_lens=view_of(call.cum_seq_lens_kv, "cum_seq_lens_kv"),
        seq_lens=lengths,
    )


def _attend(
    call: ContextArguments | RaggedArguments, names: Mapping[str, str], tensors: tuple[TensorView, ...], **options: Any
) -> Any:
    """``context_attention`` of q, k and v with other ``options``; (output, lse), or output.

    Raises:
        UsageError: an option that no native kernel honours; and as ``context_attention``.
    """
    q = tensors[0]
    check_skip_factor(call)
    if is_fp4(call):
        raise UsageError(f"out_dtype or out is nvfp4: backend {NATIVE!r} writes the dtype of query, {q.dtype}")
    output = output_of(call, (*q.shape[:2], tensors[2].shape[-1]), q.dtype)
    if output.view.dtype != q.dtype and call.out is None:
        raise UsageError(
            f"{output.view.dtype}, expected that of query by backend {NATIVE!r}: {q.dtype}", argument="out_dtype"
        )
    lse = lse_of(call, (q.shape[0], q.shape[1]))
    attend = partial(
        launch,
        context_attention,
        call,
        names,
        tensors,
        out=output.view,
        lse=tensor_or_none(lse, "lse", q.device, written=True),
        softmax_scale=factor_of("bmm1_scale", call.bmm1_scale, q.device),
        output_scale=factor_of("bmm2_scale", call.bmm2_scale, q.device),
        q_cu_seq_lens=view_of(call.cum_seq_lens_q, "cum_seq_lens_q"),
        max_q_len=call.max_q_len,
        window_left=call.window_left,
        batch_invariant=call.batch_invariant,
        **options,
    )
    try:
        attend(workspace=with_own_semaphores(call, q.device))
    except WorkspaceError:
        if tensors[1].dtype != E4M3:
            raise
        # The 16-bit copy of a cache is larger than the workspace that FlashInfer asks for.
        attend(workspace=TORCH_SCRATCH)
    return (output.tensor, lse) if call.return_lse else output.tensor
