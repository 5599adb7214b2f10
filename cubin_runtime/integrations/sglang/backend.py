"""The class that SGLang's model runner makes: page tables from its token slots, and a layer's forward pass."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ...errors import UsageError
from ..paged_batch import BLOCK_SIZES, LayerOptions, PagedBatch, Part, attend, check_layer
from .versions import is_deterministic, write_location


class CubinRuntimeAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Decoder attention with GQA in bf16 and fp16 on SM90, over pages of 16 to 256 tokens."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool, page = model_runner.token_to_kv_pool, model_runner.page_size
        if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
            layout = getattr(pool, "kv_cache_layout", None)
            raise UsageError(
                f"token_to_kv_pool: a {type(pool).__name__} with layout {layout!r}, expected a MHATokenToKVPool with "
                "'nhd' (models with windows: --disable-hybrid-swa-memory)"
            )
        if pool.dtype not in (torch.bfloat16, torch.float16) or pool.dtype != model_runner.dtype:
            raise UsageError(f"kv_cache_dtype: {pool.dtype}, expected the model's, bfloat16 or float16")
        if page not in BLOCK_SIZES:
            raise UsageError(f"page_size={page}: expected one of {BLOCK_SIZES} (--page-size)")
        server = getattr(model_runner, "server_args", None)
        if getattr(server, "enable_hierarchical_cache", False):
            raise UsageError("enable_hierarchical_cache: pages that come back from the host were never tried")
        self._pool, self._page = pool, page
        # Of a page's tokens the first says where the page is.
        self._first_slots = model_runner.req_to_token_pool.req_to_token[:, ::page]
        self._max_len: int = model_runner.model_config.context_len
        self._batch_invariant = is_deterministic()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step's ``PagedBatch``; lengths on the host bound its page table.

        Raises:
            UsageError: a mode that is neither decode nor extend.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = PagedBatch(None, None)
            return
        longest = int(forward_batch.seq_lens_cpu.max())
        columns = -(-longest // self._page)
        rows = self._first_slots[:, :columns].index_select(0, forward_batch.req_pool_indices)
        table = torch.div(rows, self._page, rounding_mode="floor")
        lengths = forward_batch.seq_lens.to(torch.int32)
        count = forward_batch.batch_size
        if mode.is_decode():
            bound = min(self._max_len, columns * self._page)
            self.forward_metadata = PagedBatch(Part(0, count, table, lengths, None, 1, bound), None)
            return
        if not mode.is_extend_or_draft_extend_or_mixed() or mode.is_split_prefill():
            raise UsageError(f"forward_mode={mode.name}: expected DECODE, EXTEND, MIXED or IDLE")
        sums = torch.zeros(count + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=sums[1:])
        new = forward_batch.extend_seq_lens_cpu
        self.forward_metadata = PagedBatch(None, Part(0, sum(new), table, lengths, sums, max(new), longest))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the page table and the lengths that captured steps read."""
        device, columns = self._first_slots.device, self._first_slots.shape[1]
        self._graph_table = torch.zeros(max_bs, columns, dtype=torch.int32, device=device)
        self._graph_lengths = torch.zeros(max_bs, dtype=torch.int32, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Point a captured step to its tables, which ``init_forward_metadata_in_graph`` fills.

        Raises:
            UsageError: a mode other than decode.
        """
        mode, count = forward_batch.forward_mode, forward_batch.batch_size
        if not mode.is_decode_or_idle():
            raise UsageError(f"forward_mode={mode.name}: captured, expected DECODE")
        part = Part(0, count, self._graph_table[:count], self._graph_lengths[:count], None, 1, self._max_len)
        self.forward_metadata = PagedBatch(part, None)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Fill the tables from the runner's own, on the device, at each replay."""
        count = forward_batch.batch_size
        rows = self._first_slots.index_select(0, forward_batch.req_pool_indices[:count])
        torch.div(rows, self._page, rounding_mode="floor", out=self._graph_table[:count])
        self._graph_lengths[:count].copy_(forward_batch.seq_lens[:count])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a captured step."""
        return 1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> Any:
        """As ``forward_extend``, one token of each request."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **given)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> Any:
        """Write the new keys and values to their slots, and attend.

        Args:
            q: ``[tokens, heads * head_dim]``; ``k`` and ``v`` alike.
            given: ``sinks``, ``[heads]``.

        Returns:
            ``[tokens, heads * head_dim]``.

        Raises:
            UsageError: the layer or an argument is not honoured; the message names it.
        """
        sinks = given.pop("sinks", None)
        named = [name for name, value in given.items() if value is not None and value is not False]
        if named:
            raise UsageError(f"{', '.join(named)}: attention here does not honour them")
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER or layer.xai_temperature_len > 0:
            raise UsageError("is_cross_attention, attn_type, xai_temperature_len: expected a plain decoder layer")
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        check_layer(size, layer.v_head_dim, heads, layer.tp_k_head_num)
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(layer, write_location(forward_batch), k, v)
        stored = self._pool.get_kv_buffer(layer.layer_id)
        k_cache, v_cache = (half.view(-1, self._page, layer.tp_k_head_num, size) for half in stored)
        if sinks is not None:
            sinks = sinks.to(torch.float32)
        soft_cap = float(layer.logit_cap or 0.0)
        options = LayerOptions(layer.scaling, layer.sliding_window_size, soft_cap, sinks, self._batch_invariant)
        queries = q.view(-1, heads, size)
        out = torch.empty_like(queries)
        attend(queries, k_cache, v_cache, "NHD", self.forward_metadata, options, out)
        return out.view(-1, heads * size)
