"""FlashInfer's attention operators by its names, parameters and defaults, on our planner and launch path.

Point a serving stack here instead of at ``flashinfer.decode``, ``.mla`` and ``.prefill``. What differs:

- What the peer ignores without a word is an error here, and names the argument.
- ``workspace_buffer`` may hold anything: only ``multi_ctas_kv_counter_buffer`` must be zero, and None makes one.
  A workspace that is too small is an error with the bytes needed (the peer writes past it).
- ``batch_invariant`` (keyword, last) keeps kernel, tile, operand order and split of a request independent of its
  neighbours and of all bounds; that its bits then are too rests on the published kernels, which we have not run.
- Kernels come from the published release, verified, fetched on first use (``cubin_runtime.attention.trtllm_gen``
  has ``preload`` and ``workspace_size``).

Sizes count tokens, strides are taken from the tensors, LSE is float32 in base 2. Every function raises ``UsageError``
(a ``ValueError``) for an argument outside its domain or a call that no kernel serves, ``BackendError`` on a device
that no backend supports, ``WorkspaceError`` for a workspace that is too small.
"""

from __future__ import annotations

from .decoding import trtllm_batch_decode_with_kv_cache
from .mla import trtllm_batch_decode_with_kv_cache_mla
from .outputs import FP4Tensor
from .prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from .xqa import xqa, xqa_batch_decode_with_kv_cache

__all__ = [
    "FP4Tensor",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
]
