"""Masks with an entry for each query and key, in steps of a few tokens: all earlier keys, and bits among the new."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import UsageError

MOST_ROWS = 64  # query tokens of a request that a packed mask covers
_MASKED = -1e4  # scores with less than this added have no weight in any dtype
_BITS = 32


class Drafts(NamedTuple):
    """Keys of each request, int32 ``[batch]``, and which of its new tokens each of them sees: uint32 ``[batch, q_len,
    words]``.
    """

    lengths: Any
    bits: Any


def is_dense(attention_mask: Any, q_len: int, kv_len: int) -> bool:
    """Return whether it is a mask of booleans or addends, ``[batch, heads, q_len, kv_len]``, for few tokens."""
    import torch

    if type(attention_mask) is not torch.Tensor or attention_mask.ndim != 4:
        return False
    kind = attention_mask.dtype == torch.bool or attention_mask.is_floating_point()
    return kind and tuple(attention_mask.shape[2:]) == (q_len, kv_len) and 0 < q_len <= MOST_ROWS


def drafts_of(attention_mask: Any, batch: int) -> Drafts:
    """The mask as the decode kernels take it; the host waits for its values.

    Raises:
        UsageError: it adds anything but 0 and -inf, differs between heads, or hides one of the keys before the new
            tokens; or the step is being captured.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UsageError("attention_mask: a dense mask is read on the host, which a captured graph cannot do")
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if attention_mask.dtype != torch.bool and bool(((attention_mask > _MASKED) & ~seen).any()):
        raise UsageError("attention_mask: a dense mask with other values than 0 and -inf, which no kernel adds")
    if bool((seen != seen[:, :1]).any()):
        raise UsageError("attention_mask: a dense mask that differs between heads; expected one for all heads")
    seen = seen[:, 0].expand(batch, -1, -1)
    q_len, kv_len = seen.shape[1:]
    keys = torch.arange(kv_len, device=seen.device)
    lengths = torch.where(seen.any(1), keys + 1, 0).amax(1)
    earlier = keys < (lengths - q_len)[:, None]
    if bool((lengths < q_len).any()) or bool((earlier[:, None] & ~seen).any()):
        raise UsageError(
            f"attention_mask: a dense mask that hides keys before the last {q_len}; kernels have masks among the new "
            "tokens of a step, and all keys before them"
        )
    columns = (lengths - q_len)[:, None] + torch.arange(q_len, device=seen.device)
    among = seen.gather(2, columns[:, None].expand(-1, q_len, -1))
    words = -(-q_len // _BITS)
    among = torch.nn.functional.pad(among, (0, words * _BITS - q_len)).view(batch, q_len, words, _BITS)
    bits = (among.long() << torch.arange(_BITS, device=seen.device)).sum(-1)
    return Drafts(lengths.to(torch.int32), bits.to(torch.int32).view(torch.uint32))
