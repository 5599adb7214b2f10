"""flash-attention 3's functions by its positions: ``cubin_runtime.compat.flash_attn`` says what the parameters mean.

Import these instead of ``flash_attn_interface``. Arguments that version 3 has not (``s_aux``, ``learnable_sink``,
``block_table``, ``out``) are taken by name.
"""

from __future__ import annotations

from typing import Any

from . import flash_attn

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """As ``flash_attn.flash_attn_func``, but that it returns ``out``, or (``out``, softmax_lse)."""
    result = flash_attn.flash_attn_func(**locals())
    return result[:2] if return_attn_probs else result


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Any = None,
    page_table: Any = None,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """As ``flash_attn.flash_attn_varlen_func``, but that it returns ``out``, or (``out``, softmax_lse)."""
    result = flash_attn.flash_attn_varlen_func(**locals())
    return result[:2] if return_attn_probs else result


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Any = None,
    deterministic: bool = False,
    s_aux: Any = None,
    learnable_sink: Any = None,
    out: Any = None,
) -> Any:
    """As ``flash_attn.flash_attn_with_kvcache``."""
    return flash_attn.flash_attn_with_kvcache(**locals())
