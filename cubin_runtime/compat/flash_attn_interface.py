"""flash-attention 3's functions by its positions: ``cubin_runtime.compat.flash_attn`` says what the parameters mean.

Import these instead of ``flash_attn_interface``. Arguments that version 3 has not (``s_aux``, ``learnable_sink``,
``block_table``, ``out``) are keywords. With log-sum-exps the functions return (``out``, softmax_lse).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from . import flash_attn

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
_VERSION_2_ALONE = frozenset({"dropout_p", "alibi_slopes"})


def _by_positions(function: Callable[..., Any], order: str) -> Callable[..., Any]:
    """``function`` with its parameters in version 3's ``order``; what that leaves out is taken by name."""
    names = order.split()
    signature = inspect.signature(function)
    by_name = [name for name in signature.parameters if name not in _VERSION_2_ALONE.union(names)]
    parameters = [signature.parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    parameters += [signature.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in by_name]

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > len(names):
            raise TypeError(f"{function.__name__}: {len(arguments)} arguments by position, expected {len(names)}")
        for name in _VERSION_2_ALONE:
            if name in named:
                raise TypeError(f"{function.__name__}: {name} is no argument of version 3")
        result = function(**dict(zip(names, arguments)), **named)  # noqa: B905  # fewer by position than by name
        return result[:2] if isinstance(result, tuple) else result

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


flash_attn_func = _by_positions(
    flash_attn.flash_attn_func,
    "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
    "pack_gqa deterministic sm_margin return_attn_probs",
)
flash_attn_varlen_func = _by_positions(
    flash_attn.flash_attn_varlen_func,
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale "
    "k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
    "return_attn_probs",
)
flash_attn_with_kvcache = _by_positions(
    flash_attn.flash_attn_with_kvcache,
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
    "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
)
