"""FlashInfer's attention operators by its names, parameters and defaults, on our planner and launch path.

Point a serving stack here instead of at ``flashinfer.decode``, ``.mla``, ``.prefill`` and ``.xqa``. What differs:

- What the peer ignores without a word is an error here, and names the argument.
- ``batch_invariant`` (keyword, last) keeps kernel, tile, operand order and split of a request independent of its
  neighbours and of all bounds; that its bits then are too rests, for published kernels, on what we have not run.
- A workspace that is too small is an error with the bytes needed (the peer writes past it).

``xqa``, ``xqa_batch_decode_with_kv_cache``, ``xqa_mla``, ``xqa_batch_decode_with_kv_cache_mla`` and, on Hopper,
``trtllm_batch_decode_with_kv_cache`` and ``trtllm_batch_decode_with_kv_cache_mla`` run our own kernels:

- Workspaces as the peer has them: semaphores (zero on first use, left so) and scratch.
- More is possible: q_len up to 16 at every head dimension, groups to 32, pages to 256, masks of any pattern on every
  path (None: causal), windows and sinks with drafts, ragged drafts, e4m3 queries, a log-sum-exp, any output dtype.
- MLA: what the peer has for SM120 alone, with 1 to 128 heads, q_len up to 16, ragged queries, sinks, a log-sum-exp.
- ``bmm2_scale`` and ``kv_scale`` count for 16-bit caches too, where the peer drops them from one side or both.

The others, and decoding on SM100 and SM103, run the published kernels:

- ``workspace_buffer`` may hold anything: only ``multi_ctas_kv_counter_buffer`` must be zero, and None makes one.
- Kernels come from the published release, verified, fetched on first use (``cubin_runtime.attention.trtllm_gen``
  has ``preload`` and ``workspace_size``).

Sizes count tokens, strides are taken from the tensors, LSE is float32 in base 2. Every function raises ``UsageError``
(a ``ValueError``) for an argument outside its domain or a call that no kernel serves, ``BackendError`` on a device
that no backend supports, ``WorkspaceError`` for a workspace that is too small.
"""

from __future__ import annotations

from .decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from .mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from .outputs import FP4Tensor
from .prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from .xqa import xqa, xqa_mla

__all__ = [
    "FP4Tensor",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]
