"""The peers' calls of a case: FlashInfer's fa3 and fa2, cuDNN through torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from decode.peers import library

from .problem import PrefillProblem

Call = Callable[[], torch.Tensor]


@cache
def _workspace() -> torch.Tensor:
    return torch.zeros(384 << 20, dtype=torch.uint8, device="cuda")


def flashinfer_call(problem: PrefillProblem, backend: str) -> Call:
    """FlashInfer's wrapper for ragged or paged keys, planned once; one ragged request takes its plain function."""
    flashinfer = library()
    case, q = problem.case, problem.q
    common = {"causal": case.causal, "window_left": case.window_left}
    if not case.page and len(case.q_lens) == 1 and case.head_dim == case.value_dim:
        return lambda: flashinfer.single_prefill_with_kv_cache(q, problem.k, problem.v, **common, backend=backend)
    common |= {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if not case.page:
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        heads = (case.heads, case.kv_heads, case.head_dim, case.value_dim)
        ragged.plan(problem.q_sums, problem.kv_sums, *heads, **common)
        return lambda: ragged.run(q, problem.k, problem.v)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
    pages = torch.tensor([0, *problem.pages_of], device="cuda").cumsum(0).int()
    last = (problem.seq_lens - 1) % case.page + 1
    sizes = (case.heads, case.kv_heads, case.head_dim, case.page)
    paged.plan(problem.q_sums, pages, problem.page_ids, last, *sizes, **common)
    caches = problem.caches
    return lambda: paged.run(q, caches)


def cudnn_call(problem: PrefillProblem) -> Call | None:
    """cuDNN's attention, which torch offers for requests of one size without windows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    case, batch = problem.case, len(problem.case.q_lens)
    if case.page or len({*case.q_lens, *case.kv_lens}) > 1 or case.window_left >= 0:
        return None
    group = case.heads // case.kv_heads
    # torch wants [batch, heads, tokens, head_dim], and as many KV heads as query heads to be sure of cuDNN.
    k, v = (side.repeat_interleave(group, 1) for side in (problem.k, problem.v))
    q, k, v = (side.unflatten(0, (batch, -1)).transpose(1, 2).contiguous() for side in (problem.q, k, v))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            result: Any = scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        return result.transpose(1, 2).flatten(0, 1)

    return call


PEERS: dict[str, Callable[[PrefillProblem], Call | None]] = {
    "fa3": lambda problem: flashinfer_call(problem, "fa3"),
    "fa2": lambda problem: flashinfer_call(problem, "fa2"),
    "cudnn": cudnn_call,
}
