"""SGLang's steps as parts of a batch: page tables from its token slots, lengths, and what a captured step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ...errors import UsageError
from ...kernels.native.mla.select import MAX_QUERIES
from ..paged_batch import PagedBatch, Part
from ..scratch import Limits, prompt_bound, shared_scratch
from .versions import draft_shape, drafts_branch, is_deterministic

_PAGES_OF_OTHERS = "pages from the host's memory or another process were never tried"
REFUSED_OPTIONS = {
    "enable_hierarchical_cache": _PAGES_OF_OTHERS,
    "enable_lmcache": _PAGES_OF_OTHERS,
    "enable_flexkv": _PAGES_OF_OTHERS,
    "enable_unified_cache_external_linker": _PAGES_OF_OTHERS,
    "disaggregation_mode": _PAGES_OF_OTHERS,  # which asks nothing of a backend but its pool
    "enable_pdmux": "prompts whose layers run in several steps are not supported",
}


class PagedAttnBackend(AttentionBackend):  # type: ignore[misc]
    """The common part of our backends: ``forward_metadata`` is the step's ``PagedBatch``."""

    # Where draft tokens are verified, SGLang would wait for the device to know them.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, page_sizes: Sequence[int]) -> None:
        """Read what a step needs of the model runner.

        Raises:
            UsageError: a page size, an option, context parallelism or drafts that are not supported.
        """
        super().__init__()
        page = model_runner.page_size
        if page not in page_sizes:
            raise UsageError(f"page_size={page}: expected one of {tuple(page_sizes)} (--page-size)")
        server = getattr(model_runner, "server_args", None)
        refuse_options(server)
        refuse_context_parallelism(server)
        self._drafts, breadth = draft_shape()
        if self._drafts > MAX_QUERIES or breadth > 1:
            raise UsageError(
                f"speculative_num_draft_tokens={self._drafts}, speculative_eagle_topk={breadth}: expected at most "
                f"{MAX_QUERIES} tokens of a chain, topk 1 (n-gram: --speculative-ngram-max-bfs-breadth 1)"
            )
        self._branches = drafts_branch()
        self._page: int = page
        # SGLang asks the backend of a step for both pools.
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        # Of a page's tokens the first says where the page is.
        self._first_slots = self.req_to_token_pool.req_to_token[:, ::page]
        self.max_context_len: int = model_runner.model_config.context_len
        columns, requests = self._first_slots.shape[1], self._first_slots.shape[0]
        self._bound = min(self.max_context_len + self._drafts, columns * page)
        self._batch_invariant = is_deterministic()
        self._draft_sums = torch.arange(requests + 1, dtype=torch.int32, device=self._first_slots.device) * self._drafts
        chunk = getattr(server, "chunked_prefill_size", None) or 0
        whole = max(getattr(server, "max_prefill_tokens", None) or 0, self.max_context_len)
        prompts = chunk + requests if chunk > 0 else whole
        serve_steps(model_runner, self._first_slots.device.index or 0)
        tokens = max(1, self._drafts)
        self._limits = Limits(requests, max(prompts, requests * tokens), self._bound, tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step's parts.

        Raises:
            UsageError: a mode that is neither decode, verify nor extend, or draft tokens of different number.
        """
        mode, count = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_idle():
            self.forward_metadata = PagedBatch(None, None)
            return
        rows = self._first_slots.index_select(0, forward_batch.req_pool_indices)
        table = torch.div(rows, self._page, rounding_mode="floor")
        lengths = forward_batch.seq_lens.to(torch.int32)
        if getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None:
            raise UsageError(
                "ragged_verify_layout: expected as many draft tokens of each request (SGLANG_RAGGED_VERIFY_MODE=static)"
            )
        if mode.is_decode() or self._is_verify(mode):
            lengths = lengths + self._drafts if mode.is_target_verify() else lengths
            part = self._decodes(mode, table, lengths, self._mask(forward_batch))
            self.forward_metadata = PagedBatch(part, None)
            return
        if not mode.is_extend_or_draft_extend_or_mixed() or mode.is_split_prefill() or mode.is_target_verify():
            raise UsageError(f"forward_mode={mode.name}: expected DECODE, TARGET_VERIFY, EXTEND, MIXED or IDLE")
        sums = torch.zeros(count + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=sums[1:])
        new = forward_batch.extend_seq_lens_cpu
        on_host = forward_batch.seq_lens_cpu
        bound = self._bound if on_host is None else prompt_bound(int(on_host.max()), self._bound)
        self.forward_metadata = PagedBatch(None, Part(0, sum(new), table, lengths, sums, max(new), bound))

    def _is_verify(self, mode: Any) -> bool:
        return bool(self._drafts and mode.is_target_verify())

    def _decodes(self, mode: Any, table: Any, lengths: Any, mask: Any = None) -> Part:
        """Requests with one token each, or with as many as there are draft tokens; bounded by the model."""
        count = table.shape[0]
        if mode.is_target_verify():
            sums = self._draft_sums[: count + 1]
            bits = None if mask is None else mask.view(torch.uint32)
            return Part(0, count * self._drafts, table, lengths, sums, self._drafts, self._bound, bits)
        return Part(0, count, table, lengths, None, 1, self._bound)

    def _mask(self, forward_batch: Any) -> Any:
        """A bit for each draft token of its request that a token sees, int32 ``[tokens, 1]``, from SGLang's mask; None
        where draft tokens are a chain, or are not verified.

        SGLang's has a row for each token, with an entry for each key and draft token of its request.
        """
        if not (self._branches and forward_batch.forward_mode.is_target_verify()):
            return None
        drafts, lengths = self._drafts, forward_batch.seq_lens[: forward_batch.batch_size, None, None]
        entries = forward_batch.spec_info.custom_mask
        rows = drafts * (lengths + drafts)
        among = torch.arange(drafts, device=lengths.device)
        places = rows.cumsum(0) - rows + among[:, None] * (lengths + drafts) + lengths + among
        # Of requests that pad a captured step there are no entries.
        seen = entries[places.clamp(max=entries.numel() - 1)]
        return (seen.long() << among).sum(-1).to(torch.int32).view(-1, 1)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the page table, the lengths and the mask that captured steps read."""
        device, columns = self._first_slots.device, self._first_slots.shape[1]
        self._graph_table = torch.zeros(max_bs, columns, dtype=torch.int32, device=device)
        self._graph_lengths = torch.zeros(max_bs, dtype=torch.int32, device=device)
        if self._branches:
            self._graph_mask = torch.zeros(max_bs * self._drafts, 1, dtype=torch.int32, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Point a captured step to its tables, which ``init_forward_metadata_in_graph`` fills, and fill its mask.

        Raises:
            UsageError: a mode other than decode and verify.
        """
        mode, count = forward_batch.forward_mode, forward_batch.batch_size
        if not mode.is_decode_or_idle() and not self._is_verify(mode):
            raise UsageError(f"forward_mode={mode.name}: captured, expected DECODE or TARGET_VERIFY")
        if (mask := self._mask(forward_batch)) is not None:
            mask = self._graph_mask[: count * self._drafts].copy_(mask)
        part = self._decodes(mode, self._graph_table[:count], self._graph_lengths[:count], mask)
        self.forward_metadata = PagedBatch(part, None)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables from the runner's own, on the device, at each replay."""
        count = forward_batch.batch_size
        rows = self._first_slots.index_select(0, forward_batch.req_pool_indices[:count])
        torch.div(rows, self._page, rounding_mode="floor", out=self._graph_table[:count])
        lengths = forward_batch.seq_lens[:count]
        if forward_batch.forward_mode.is_target_verify():
            lengths = lengths + self._drafts
        self._graph_lengths[:count].copy_(lengths)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a captured step."""
        return 1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Any:
        """As ``forward_extend``, one token of each request."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **arguments)


def serve_steps(model_runner: Any, device: int) -> None:
    """Have scratch for the stream on which SGLang runs its steps; it makes backends, and captures graphs, on others."""
    stream = getattr(model_runner, "forward_stream", None)
    if stream is not None:
        shared_scratch(device).serve(stream.cuda_stream)


def refuse_options(server: Any) -> None:
    """Refuse options of SGLang's arguments that are in ``REFUSED_OPTIONS``.

    Raises:
        UsageError: there are some; the message names the first.
    """
    for name, reason in REFUSED_OPTIONS.items():
        if getattr(server, name, None) not in (None, False, "null"):
            raise UsageError(f"{name}: {reason}")


def refuse_context_parallelism(server: Any, splits_prompts: bool = False) -> None:
    """Refuse keys of decodes, or tokens of prompts, that are split over ranks.

    Args:
        server: SGLang's arguments.
        splits_prompts: whether prompts are known to be split, whatever ``server`` says.

    Raises:
        UsageError: they are.
    """
    ranks = getattr(server, "dcp_size", None) or 1
    if ranks > 1 or splits_prompts or getattr(server, "enable_prefill_cp", False):
        raise UsageError(f"dcp_size={ranks}, enable_prefill_cp: expected no context parallelism")


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a layer that change its result.

    Raises:
        UsageError: there are some; the message names them.
    """
    named = [name for name, value in arguments.items() if value is not None and value is not False]
    if named:
        raise UsageError(f"{', '.join(named)}: attention here does not honour them")
