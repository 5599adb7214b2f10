"""FlashInfer's attention operators: its names, parameters and defaults on our planner and launch path.

Import these instead of those of its modules decode, mla, prefill, xqa, page and cascade, or call ``install`` to let
code that imports FlashInfer have them. The differences:

- An option that FlashInfer silently ignores is an error here, which names the argument.
- ``batch_invariant`` (keyword-only, last) makes the kernel, its tiles, the order of operands and the KV splits of a
  request independent of the other requests and of all bounds. The bits are then the same: tested on H100 and H200 for
  native kernels, and for trtllm-gen kernels on no GPU.
- A workspace that is too small is an error that states the bytes needed (FlashInfer writes past its end).

``xqa``, ``xqa_batch_decode_with_kv_cache``, ``xqa_mla`` and ``xqa_batch_decode_with_kv_cache_mla`` run native kernels;
so do ``trtllm_batch_decode_with_kv_cache`` and ``trtllm_batch_decode_with_kv_cache_mla`` on Hopper:

- Workspaces are FlashInfer's: semaphores, which are zero before first use and left so, and scratch memory.
- They take more: q_len up to 16 at every head dimension, up to 32 query heads per KV head, pages of up to 1024 tokens
  or of any size that holds a whole request, any mask on every path (None: causal), sinks with draft tokens, windows
  with any mask (counted from a query token's index, as FlashInfer does), ragged draft tokens, e4m3 queries, an LSE, any
  output dtype.
- MLA: what FlashInfer has for SM120 only, with 1 to 128 heads, q_len up to 16, ragged queries, sinks and an LSE.
  ``bmm2_scale`` of the batch operators is a factor of the output alone, on SM120 FlashInfer's of the scores too.
- ``bmm2_scale`` and ``kv_scale`` also apply to 16-bit caches, where FlashInfer drops them from one side or both.

``append_paged_kv_cache``, ``append_paged_mla_kv_cache``, ``merge_state``, ``merge_state_in_place`` and ``merge_states``
run native kernels on Hopper. They need no workspace and have no ``batch_invariant``: no token's bits depend on others.

``trtllm_batch_context_with_kv_cache`` and ``trtllm_ragged_attention_deepseek`` run native kernels on Hopper, where
FlashInfer has none:

- 16-bit tensors of one dtype, as ``cubin_runtime.attention.context_attention`` takes them; requests without
  query tokens or keys; windows without a causal mask. A token's bits never depend on other requests or on chunks;
  with ``batch_invariant`` and head_dim 64 or 128 they are also those of decoding with it.
- ``workspace_buffer`` may have any contents.

On SM100 and SM103 these two and decoding run NVIDIA's trtllm-gen kernels:

- ``workspace_buffer`` may have any contents: only ``multi_ctas_kv_counter_buffer`` must be zero; None allocates it.
- The kernels come from the pinned release; they are fetched on first use and verified
  (``cubin_runtime.attention.trtllm_gen`` has ``preload`` and ``workspace_size``).

Sizes are in tokens, strides are taken from the tensors, the LSE is float32 in base 2 (MLA: ``return_lse_base``). Every
function raises ``UsageError`` (a ``ValueError``) for an argument outside its domain or a call that no kernel takes,
``BackendError`` on a device that no backend supports, ``WorkspaceError`` for a workspace that is too small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .cascade import merge_state, merge_state_in_place, merge_states
from .decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from .installation import Installed, install
from .mla import (
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_prefill_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from .outputs import FP4Tensor
from .page import append_paged_kv_cache, append_paged_mla_kv_cache
from .prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from .xqa import xqa, xqa_mla

__all__ = [
    "FP4Tensor",
    "Installed",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "install",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_prefill_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]


if not TYPE_CHECKING:  # a name that is not there is an error of type checkers

    def __getattr__(name: str) -> NoReturn:
        if name.endswith("Wrapper"):
            # `from ... import` would drop the message of an AttributeError.
            raise ImportError(
                f"{name}: {__name__} has FlashInfer's functions, not its wrapper classes; instead of these, "
                "cubin_runtime.attention has paged_decode, context_attention and mla_decode, and plans of them",
                name=name,
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
