"""FlashAttention-3 of vLLM's wheel under the names that transformers imports: a peer without a build.

``FLASH_ATTENTION_3`` names ``vllm_flash_attn/_vllm_fa3_C.abi3.so`` of a vLLM wheel for the installed torch.
Parameters and defaults are those of flash-attn-3's ``flash_attn_interface``. That build leaves two things out: it takes
requests only with their lengths, which are made once for each size here, and appends nothing to a cache, which our
``append_kv`` does first.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

from cubin_runtime.attention import append_kv

VARIABLE = "FLASH_ATTENTION_3"
Window = tuple[int, int]


def install() -> str | None:
    """Make ``flash_attn_interface`` importable, and known to transformers as flash-attn-3; None without the variable.

    Returns:
        The library's file name.
    """
    library = os.environ.get(VARIABLE)
    if library is None:
        return None
    import torch
    from transformers.utils import import_utils

    torch.ops.load_library(library)
    module = ModuleType("flash_attn_interface")
    module.__dict__.update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        __spec__=importlib.machinery.ModuleSpec("flash_attn_interface", None),
        __version__="3.0.0",
    )
    sys.modules["flash_attn_interface"] = module
    import_utils.PACKAGE_DISTRIBUTION_MAPPING["flash_attn_interface"] = ["flash-attn-3"]
    for cached in (import_utils._is_package_available, import_utils.is_flash_attn_3_available):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    return os.path.basename(library)


def _forward(q: Any, k: Any, v: Any, scale: Any, causal: bool, window: Window, softcap: float, **given: Any) -> Any:
    import torch

    def last(tensor: Any) -> Any:
        return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()

    return torch.ops._vllm_fa3_C.fwd(
        last(q),
        last(k),
        last(v),
        *(None, None),  # new keys and values
        None,  # q_v
        None,  # out
        given.get("q_sums"),
        given.get("k_sums"),
        None,  # running sums of new keys
        None,  # queries in use
        given.get("k_used"),
        given.get("q_bound"),
        given.get("k_bound"),
        given.get("table"),
        given.get("batch_index"),
        None,  # padding on the left
        *(None, None, None),  # rotary embeddings
        *(None, None, None),  # scales of fp8
        q.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        *window,
        softcap,
        True,  # interleaved rotary embeddings
        None,  # scheduler metadata
        given["splits"],
        None,  # pack_gqa
        0,  # sm_margin
        given.get("sinks"),
        *(1, 0, None),  # context parallelism
    )[0]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    s_aux: Any = None,
) -> Any:
    """Attention of requests of one size."""
    lengths = _same_lengths(*k.shape[:2], q.device)
    return _forward(
        q, k, v, softmax_scale, causal, window_size, softcap, splits=num_splits, sinks=s_aux, k_used=lengths
    )


@cache
def _same_lengths(batch: int, length: int, device: Any) -> Any:
    import torch

    return torch.full((batch,), length, dtype=torch.int32, device=device)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
    s_aux: Any = None,
) -> Any:
    """Attention of ragged requests."""
    bounds = {"q_bound": int(max_seqlen_q), "k_bound": int(max_seqlen_k), "k_used": seqused_k}
    sums = {"q_sums": cu_seqlens_q, "k_sums": cu_seqlens_k}
    return _forward(
        q, k, v, softmax_scale, causal, window_size, softcap, splits=num_splits, sinks=s_aux, **sums, **bounds
    )


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    s_aux: Any = None,
) -> Any:
    """Attention over a cache, in pages with a table, to which keys and values are added first."""
    if k is not None:
        append_kv(k, v, k_cache, v_cache, page_table, cache_seqlens, lengths_include_new=False)
        cache_seqlens = cache_seqlens + k.shape[1]
    given = {"k_used": cache_seqlens, "batch_index": cache_batch_idx, "table": page_table}
    given |= {"q_sums": cu_seqlens_q, "q_bound": max_seqlen_q}
    return _forward(
        q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, splits=num_splits, sinks=s_aux, **given
    )
