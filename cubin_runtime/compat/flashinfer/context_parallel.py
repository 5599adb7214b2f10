"""FlashInfer's context parallelism of GQA decoding: the keys of a request divided over ranks, one by one in turn."""

from __future__ import annotations

from typing import Any

from ...attention.trtllm_gen.checks import check_vector
from ...errors import UsageError
from ...tensor import view_of
from .arguments import DecodeArguments

_NAME = "causal_seqlens_kv_global"


def options_of_rank(call: DecodeArguments, device: int, batch: int, q_len: int) -> dict[str, Any]:
    """The options of ``paged_decode`` that give query tokens FlashInfer's bounds; none where ``seq_lens`` gives them.

    FlashInfer counts a request's keys on all ranks without those of its query tokens, ``paged_decode`` with them: the
    query lengths are added on the device. ``seq_lens`` is enough for one rank, which has all keys, and for one query
    token without a window, which sees all keys of its rank. ``q_len`` bounds the query tokens of a request.

    Raises:
        UsageError: the ranks or the tensor are invalid, there are a mask or sinks with several ranks, or the query
            tokens would be added to a tensor that is not torch's.
    """
    counts, world, rank = call.causal_seqlens_kv_global, call.cp_world, call.cp_rank
    if counts is None:
        if (world, rank) != (1, 0):
            raise UsageError(f"cp_world={world}, cp_rank={rank}: expected 1 and 0 without {_NAME}")
        return {}
    check_vector(_NAME, view_of(counts, _NAME), batch, "int32", device)
    if world < 1:
        raise UsageError("expected 1 or more", argument="cp_world", value=world)
    if not 0 <= rank < world:
        raise UsageError(f"expected 0 to {world - 1}, below cp_world", argument="cp_rank", value=rank)
    if world == 1:
        return {}
    if call.mask is not None:
        raise UsageError(f"given with cp_world={world}, expected None: query tokens are causal", argument="mask")
    if call.sinks is not None:
        raise UsageError(
            f"given with cp_world={world}, expected None: the merge of the ranks counts them once", argument="sinks"
        )
    if q_len == 1 and call.window_left < 0:
        return {}
    tokens = q_len if call.cum_seq_lens_q is None else call.cum_seq_lens_q
    ends = call.runtime.memory.lengthened(_NAME, counts, tokens)
    return {"global_seq_lens": ends, "cp_world": world, "cp_rank": rank}
