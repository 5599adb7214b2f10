"""The functions that attention goes through, with flash-attention's signatures where it has one of the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...attention.gqa import paged_decode
from ...compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from ...compat.flash_attn.tensors import in_float32, numbers
from ...errors import UsageError


def decode_masked(
    q: Any,
    k: Any,
    v: Any,
    *,
    lengths: Any,
    mask: Any,
    softmax_scale: Any = None,
    softcap: float = 0.0,
    s_aux: Any = None,
) -> Any:
    """Attention of new tokens ``[batch, q_len, heads, head_dim]`` over a cache ``[batch, tokens, ...]``, with a mask
    among them.

    Raises:
        UsageError: a soft cap, or as ``paged_decode``.
    """
    if softcap:
        raise UsageError(f"softcap={softcap}: with a dense mask; the kernels with masks have no soft cap")
    return paged_decode(
        q,
        k,
        v,
        numbers(q, q.shape[0]),
        lengths,
        max_seq_len=k.shape[1],
        softmax_scale=softmax_scale,
        mask=mask,
        sinks=None if s_aux is None else in_float32(s_aux),
    )


class Operators(NamedTuple):
    """Functions as those of ``cubin_runtime.compat.flash_attn``, which they are by default.

    ``even`` is called as ``flash_attn_func``, ``ragged`` as ``flash_attn_varlen_func``, ``cached`` as
    ``flash_attn_with_kvcache``, ``masked`` as ``decode_masked``. A test without a GPU gives functions of its own.
    """

    even: Callable[..., Any] = flash_attn_func
    ragged: Callable[..., Any] = flash_attn_varlen_func
    cached: Callable[..., Any] = flash_attn_with_kvcache
    masked: Callable[..., Any] = decode_masked
