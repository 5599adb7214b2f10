"""A client with torch's tensors and streams as strict type checkers must accept it; it is checked and never run."""

from __future__ import annotations

import torch

from cubin_runtime import paged_decode, plan_paged_decode
from cubin_runtime.compat import flashinfer


def decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, stream: torch.cuda.Stream
) -> torch.Tensor:
    out = paged_decode(q, cache, cache, table, lengths, max_seq_len=4096, stream=stream, softmax_scale=lengths)
    plan_paged_decode(q, cache, cache, table, lengths, out, max_seq_len=4096).prepare(stream)
    flashinfer.xqa_batch_decode_with_kv_cache(q, [cache, cache], q, table, lengths, 4096)
    return paged_decode(q, cache, cache, table, lengths, out=out, max_seq_len=4096)
