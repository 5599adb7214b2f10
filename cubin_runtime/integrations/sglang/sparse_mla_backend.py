"""The class that SGLang's model runner makes where an indexer chooses the rows of a latent cache (sparse MLA, DSA)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.dsa.utils import is_dsa_enable_prefill_cp
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, concat_mla_absorb_q_general
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from ...attention.operators.sparse_mla_decode import sparse_mla_decode
from ...errors import UsageError
from ...kernels.native.sparse_mla.select import ROW_FORMS
from ..latent_batch import LISTED_LATENT, unserved_lists
from ..latent_readiness import ListKind, reserve_lists
from ..scratch import Limits, launch
from .steps import refuse, refuse_context_parallelism, refuse_options, serve_steps
from .versions import NAME, draft_shape, drafts_branch, is_deterministic, serve_latent_layers

_LOGGER = logging.getLogger(__name__)


class CubinRuntimeSparseMlaAttnBackend(DeepseekSparseAttnBackend):  # type: ignore[misc]
    """SGLang's own backend of these models, but for the attention of decodes and of draft tokens that are verified.

    The indexer, a step's metadata and prompts stay SGLang's; its prompts need rows of bf16, or of 656 bytes.
    """

    def __init__(self, model_runner: Any) -> None:
        rows = _row_form(model_runner.token_to_kv_pool)
        _check(model_runner)
        super().__init__(model_runner)
        if getattr(self, "dsa_index_kpool", 1) > 1:
            raise UsageError(f"index_kpool={self.dsa_index_kpool}: expected 1, an entry of a list for each row")
        heads, width, rope = self.num_q_heads, self.dsa_index_topk, self.qk_rope_head_dim
        if (refused := unserved_lists(self.kv_lora_rank, rope, heads, width)) is not None:
            raise UsageError(refused)
        # A name that SGLang has no kernel for: it then plans none of its own for these steps.
        self.dsa_decode_impl = NAME
        serve_latent_layers()
        requests, device = self.req_to_token.shape[0], self.req_to_token.device.index or 0
        serve_steps(model_runner, device)
        limits = Limits(requests, requests * max(1, draft_shape()[0]), self.max_context_len)
        self._scratch = reserve_lists(ListKind(heads, rows, width, device), False, limits, _LOGGER)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Any:
        """Write the new rows to their slots, and attend to those that the indexer chose.

        Args:
            q: latent columns of the queries, ``[tokens, heads, 512]``, or flat; ``k`` those of the new rows.
            arguments: ``q_rope`` and ``k_rope``, the rope columns; ``topk_indices``, int32 ``[tokens, width]``;
                ``attn_sink``, ``[heads]``.

        Returns:
            ``[tokens, heads * 512]``.

        Raises:
            UsageError: an argument is not honoured; the message names it.
        """
        q_rope, k_rope, lists, sinks = (
            arguments.pop(name, None) for name in ("q_rope", "k_rope", "topk_indices", "attn_sink")
        )
        refuse(arguments)
        if q_rope is None or lists is None:
            raise UsageError("q_rope, topk_indices: expected both")
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        heads = layer.tp_q_head_num
        parts = q.view(-1, heads, LISTED_LATENT), q_rope.view(q_rope.shape[0], heads, -1)
        queries = concat_mla_absorb_q_general(*parts)  # several times as fast as torch.cat of transposed columns
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        out = torch.empty(*queries.shape[:2], LISTED_LATENT, dtype=queries.dtype, device=queries.device)
        launch(
            sparse_mla_decode,
            # Lists have the same length however many keys there are.
            self._scratch.of_launch(1, queries.shape[0], 0),
            queries,
            cache.view(cache.shape[0], cache.shape[-1]),
            self._slots(lists, queries.shape[0]),
            softmax_scale=layer.scaling,
            sinks=None if sinks is None else sinks.to(torch.float32),
            out=out,
        )
        return out.view(-1, heads * LISTED_LATENT)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Any:
        """As ``forward_decode`` for draft tokens; prompts are SGLang's own."""
        mode = forward_batch.forward_mode
        listed = mode.is_target_verify() or mode.is_draft_extend_v2()
        run = self.forward_decode if listed else super().forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache, **arguments)

    def _slots(self, lists: Any, tokens: int) -> Any:
        """The rows that the lists name, ``[tokens, width]``: SGLang's top-k has them, or their positions in a request.

        The metadata then have a page table with a row for each query token, and pages of one row.
        """
        if self.use_fused_topk:
            return self._pad_topk_indices(self._get_fused_topk_page_table(lists), tokens)
        table = self.forward_metadata.page_table_1[: lists.shape[0]]
        slots = torch.where(lists < 0, -1, table.gather(1, lists.clamp(min=0).long()))
        return self._pad_topk_indices(slots.to(torch.int32), tokens)


def _row_form(pool: Any) -> str:
    """The form of the pool's rows, one of ``ROW_FORMS``.

    Raises:
        UsageError: there is none.
    """
    forms = {(torch.bfloat16, ROW_FORMS["bf16"][0]): "bf16"}
    forms[torch.float8_e4m3fn, ROW_FORMS["scaled_e4m3"][1]] = "scaled_e4m3"
    row = (getattr(pool, "dtype", None), getattr(pool, "kv_cache_dim", None))
    if type(pool) is not DSATokenToKVPool or row not in forms:
        raise UsageError(
            f"token_to_kv_pool: a {type(pool).__name__} with rows of {row[1]} {row[0]}, expected a DSATokenToKVPool "
            "with rows of 576 bfloat16 or 656 float8_e4m3fn (--kv-cache-dtype; --dsa-decode-backend flashmla_kv has "
            "the latter)"
        )
    return forms[row]


def _check(model_runner: Any) -> None:
    """Refuse what never ran beside lists.

    Raises:
        UsageError: the message names it.
    """
    server = getattr(model_runner, "server_args", None)
    refuse_options(server)
    if model_runner.hisparse_coordinator is not None:
        raise UsageError("enable_hisparse: rows that come back from the host were never tried")
    if is_deterministic():
        raise UsageError("enable_deterministic_inference: prompts run on kernels that SGLang does not list for it")
    refuse_context_parallelism(server, is_dsa_enable_prefill_cp())
    if drafts_branch():
        raise UsageError(
            "speculative_algorithm=NGRAM: SGLang's indexer takes draft tokens for a chain; expected another"
        )
    if model_runner.dtype != torch.bfloat16:
        raise UsageError(f"dtype: {model_runner.dtype}, expected bfloat16")
