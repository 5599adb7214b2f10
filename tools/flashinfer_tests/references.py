"""FlashInfer's wrappers, as far as its tests use them for references, in torch's float32 arithmetic.

They take what the wrappers take and need no compiled kernel. What they do not know is an error.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

LOG2_E = math.log2(math.e)
# Options of ``plan`` that mean nothing to a float32 reference with the value that the tests give.
_WITHOUT_EFFECT = {"pos_encoding_mode": ("NONE",), "logits_soft_cap": (0.0, None)}
_DTYPES = frozenset({"q_data_type", "kv_data_type", "o_data_type", "non_blocking"})


class WrapperNotOffered(Exception):
    """A test asked for a wrapper around the peer's own trtllm-gen kernels, after it had compared the function."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window_left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request, ``[tokens, heads, head_dim]`` each, and its log-sum-exp in base 2."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    rows = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    keys = torch.arange(k.shape[0], device=q.device)[None]
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    if causal:
        hidden |= keys > rows
    if window_left >= 0:
        hidden |= keys < rows - window_left
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T * LOG2_E


class _Reference:
    """What the references share: options, and the loop over requests."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", *_: Any, backend: str = "auto", **__: Any):
        if backend == "trtllm-gen":
            raise WrapperNotOffered
        self.kv_layout = kv_layout

    def _options(
        self, more: dict[str, Any], scale: float | None, head_dim: int, causal: bool, window_left: int
    ) -> None:
        for name, value in more.items():
            if name not in _DTYPES and value not in _WITHOUT_EFFECT.get(name, (None,)):
                raise NotImplementedError(f"{name}={value!r}: the torch reference does not know it")
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.causal, self.window_left = causal, window_left

    def _all(self, q: torch.Tensor, starts: Any, keys_of: Any, dtype: torch.dtype, return_lse: bool) -> Any:
        parts = [
            attend(q[begin:end], *keys_of(request), self.scale, self.causal, self.window_left)
            for request, (begin, end) in enumerate(pairwise(starts.tolist()))
        ]
        out, lse = torch.cat([part[0] for part in parts]).to(dtype), torch.cat([part[1] for part in parts])
        return (out, lse) if return_lse else out


class _Paged(_Reference):
    def _pages(self, starts: Any, indices: Any, last: Any, page_size: int) -> None:
        self.indices, self.page_size = indices, page_size
        self.pages_of, self.last = list(pairwise(starts.tolist())), last.tolist()

    def _run(self, q: torch.Tensor, q_starts: Any, kv_cache: Any, return_lse: bool) -> Any:
        k_cache, v_cache = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(1)

        def keys_of(request: int) -> list[torch.Tensor]:
            begin, end = self.pages_of[request]
            pages = self.indices[begin:end].long().to(q.device)
            length = (end - begin - 1) * self.page_size + self.last[request]
            both = []
            for cache in (k_cache, v_cache):
                rows = cache[pages].transpose(1, 2) if self.kv_layout == "HND" else cache[pages]
                both.append(rows.flatten(0, 1)[: max(0, length)])
            return both

        return self._all(q, q_starts, keys_of, q.dtype, return_lse)


class PagedDecode(_Paged):
    """``BatchDecodeWithPagedKVCacheWrapper``."""

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        sm_scale: float | None = None,
        **more: Any,
    ) -> None:
        """Take the requests."""
        self._options(more, sm_scale, head_dim, True, window_left)
        self._pages(indptr, indices, last_page_len, page_size)

    def run(self, q: torch.Tensor, kv_cache: Any, return_lse: bool = False) -> Any:
        """Compute."""
        return self._run(q, torch.arange(q.shape[0] + 1), kv_cache, return_lse)


class PagedPrefill(_Paged):
    """``BatchPrefillWithPagedKVCacheWrapper``."""

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        **more: Any,
    ) -> None:
        """Take the requests."""
        self._options(more, sm_scale, head_dim_qk, causal, window_left)
        self._pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.q_starts = qo_indptr

    def run(self, q: torch.Tensor, kv_cache: Any, return_lse: bool = False) -> Any:
        """Compute."""
        return self._run(q, self.q_starts, kv_cache, return_lse)


class RaggedPrefill(_Reference):
    """``BatchPrefillWithRaggedKVCacheWrapper``."""

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        **more: Any,
    ) -> None:
        """Take the requests."""
        self._options(more, sm_scale, head_dim_qk, causal, window_left)
        self.q_starts, self.kv_starts = qo_indptr, kv_indptr.tolist()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False) -> Any:
        """Compute."""

        def keys_of(request: int) -> list[torch.Tensor]:
            begin, end = self.kv_starts[request : request + 2]
            return [k[begin:end], v[begin:end]]

        return self._all(q, self.q_starts, keys_of, q.dtype, return_lse)


class PagedMla(_Reference):
    """``BatchMLAPagedAttentionWrapper``."""

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        **more: Any,
    ) -> None:
        """Take the requests."""
        self._options(more, sm_scale, head_dim_ckv, causal, -1)
        self.q_starts, self.indices, self.lengths = qo_indptr, kv_indices, kv_len_arr.tolist()
        self.pages_of = list(pairwise(kv_indptr.tolist()))

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, return_lse: bool = False
    ) -> Any:
        """Compute."""

        def keys_of(request: int) -> list[torch.Tensor]:
            begin, end = self.pages_of[request]
            pages, length = self.indices[begin:end].long(), self.lengths[request]
            latent, rope = (x[pages].flatten(0, -2)[:length].unsqueeze(1) for x in (ckv, kpe))
            return [torch.cat((latent.float(), rope.float()), dim=-1), latent]

        q = torch.cat((q_nope.float(), q_pe.float()), dim=-1)
        return self._all(q, self.q_starts, keys_of, q_nope.dtype, return_lse)


WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
    "BatchPrefillWithPagedKVCacheWrapper": PagedPrefill,
    "BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefill,
    "BatchMLAPagedAttentionWrapper": PagedMla,
}
