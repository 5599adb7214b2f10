"""The class that SGLang's model runner makes for models with MLA: decodes over the latent cache, prompts beside it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from ...attention.operators.context_attention import context_attention
from ...errors import UsageError
from ..latent_batch import PAGE_SIZE, LatentDecodes, LatentOptions, attend_latent, check_latent_layer
from ..latent_readiness import LatentKind, reserve_latent, reserve_prompts, warm_up_latent
from ..scratch import SharedScratch, launch
from .steps import PagedAttnBackend, refuse
from .versions import NAME, run_prefixes_without_graphs, serve_latent_layers, write_location

_LOGGER = logging.getLogger(__name__)
_DTYPES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}


class CubinRuntimeMlaAttnBackend(PagedAttnBackend):
    """Dense MLA in bf16 on SM90, over a latent cache of bf16 or e4m3 in pages of 64 tokens."""

    captures_no_prefix = True  # prompts attend to cached keys in launches of their own, as many as these need

    def __init__(self, model_runner: Any) -> None:
        pool = model_runner.token_to_kv_pool
        if type(pool) is not MLATokenToKVPool or pool.dtype not in _DTYPES:
            raise UsageError(
                f"token_to_kv_pool: a {type(pool).__name__} of {getattr(pool, 'dtype', None)}, expected a "
                "MLATokenToKVPool of bfloat16 or float8_e4m3fn (--kv-cache-dtype)"
            )
        if model_runner.dtype != torch.bfloat16:
            raise UsageError(f"dtype: {model_runner.dtype}, expected bfloat16")
        super().__init__(model_runner, (PAGE_SIZE,))
        server = getattr(model_runner, "server_args", None)
        prompts = getattr(server, "prefill_attention_backend", None) or getattr(server, "attention_backend", None)
        if self._batch_invariant and prompts == NAME:
            raise UsageError(
                "enable_deterministic_inference: the bits of prompts depend on cached prefixes here; "
                "expected another --prefill-attention-backend"
            )
        self._scratch: SharedScratch | None = None
        serve_latent_layers()
        run_prefixes_without_graphs()
        self._get_ready(getattr(model_runner, "model", None))

    def _get_ready(self, model: Any) -> None:
        """Check the model's layers, load their kernels, reserve scratch and write fast paths."""
        layers = [each for each in model.modules() if isinstance(each, RadixAttention)] if model is not None else []
        tokens = max(1, self._drafts)
        for layer in layers:
            device = self._first_slots.device.index or 0
            if layer.tp_k_head_num != 1:  # of prompts, whose keys are projected
                sizes = (layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim)
                reserve_prompts(sizes, layer.scaling, self._limits, device, _LOGGER)
                continue
            _check(layer, tokens)
            cache = self._cache(layer)
            latent, dtype = layer.v_head_dim, _DTYPES[self.token_to_kv_pool.dtype]
            rope = layer.qk_head_dim - latent
            kind = LatentKind(layer.tp_q_head_num, latent, rope, "bfloat16", dtype, tokens, device)
            options = reserve_latent(kind, self._options(layer), self._limits, _LOGGER)
            self._scratch = options.scratch
            warm_up_latent(kind, cache, options, self._limits, self._first_slots.shape[1])

    def _options(self, layer: Any) -> LatentOptions:
        return LatentOptions(layer.scaling, 1.0, self._batch_invariant, scratch=self._scratch)

    def _cache(self, layer: Any) -> Any:
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return rows.view(-1, PAGE_SIZE, rows.shape[-1])

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Any:
        """Attention of a step's queries in the latent space, or of prompts' queries on projected keys.

        Args:
            q: ``[tokens, heads * (latent + rope)]`` with ``k`` ``[tokens, 1, latent + rope]``, which is written to its
                slots; of prompts ``[tokens, heads * head_dim]`` with as many heads of ``k`` and ``v``.

        Returns:
            ``[tokens, heads * v_head_dim]``; with it the log-sum-exp ``[tokens, heads]`` in base e, if SGLang merges.

        Raises:
            UsageError: the layer or an argument is not honoured; the message names it.
        """
        refuse(arguments)
        step = self.forward_metadata
        if step.decodes is None:
            return self._prompts(q, k, v, layer, forward_batch)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, write_location(forward_batch), k, v)
        heads, part = layer.tp_q_head_num, step.decodes
        queries = q.view(-1, heads, layer.qk_head_dim)
        out = torch.empty(queries.shape[0], heads, layer.v_head_dim, dtype=q.dtype, device=q.device)
        decodes = LatentDecodes(part.table, part.lengths, None, part.max_q_len, part.max_seq_len, mask=part.mask)
        attend_latent(queries, self._cache(layer), decodes, self._options(layer), out)
        return out.view(-1, heads * layer.v_head_dim)

    def _prompts(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        """Attention of prompts: their new tokens, or with no causality a chunk of what was cached before them."""
        part, heads = self.forward_metadata.prefills, layer.tp_q_head_num
        if layer.tp_k_head_num != heads or part is None:
            raise UsageError(f"forward_mode={forward_batch.forward_mode.name}: prompts in the latent space")
        queries = q.view(-1, heads, layer.qk_head_dim)
        keys, values = k.view(-1, heads, layer.qk_head_dim), v.view(-1, heads, layer.v_head_dim)
        prefix = bool(forward_batch.attn_attend_prefix_cache)
        sums = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx] if prefix else part.sums
        out = torch.empty(queries.shape[0], heads, layer.v_head_dim, dtype=q.dtype, device=q.device)
        merged, scratch = bool(forward_batch.mha_return_lse), self._scratch
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device) if merged else None
        bound = min(part.max_seq_len, keys.shape[0])
        launch(
            context_attention,
            scratch.of_launch(part.table.shape[0], part.rows, bound) if scratch else None,
            queries,
            keys,
            values,
            max_seq_len=bound,
            q_cu_seq_lens=part.sums,
            kv_cu_seq_lens=sums,
            max_q_len=part.max_q_len,
            causal=not prefix,
            softmax_scale=layer.scaling,
            lse_base="e",
            out=out,
            lse=lse,
        )
        return out.view(-1, heads * layer.v_head_dim) if lse is None else (out, lse)


def _check(layer: Any, tokens: int) -> None:
    """Refuse a layer without kernels, and keys that the pool would have to scale.

    Raises:
        UsageError: the message names the size or the scale.
    """
    latent = layer.v_head_dim
    check_latent_layer(latent, layer.qk_head_dim - latent, layer.tp_q_head_num, tokens)
    if layer.logit_cap or layer.sliding_window_size != -1:
        raise UsageError("logit_cap, sliding_window_size: expected neither with MLA")
    scale = getattr(layer, "k_scale_float", None)
    if scale not in (None, 1.0):
        raise UsageError(f"k_scale={scale}: SGLang's pool writes keys without a scale, expected 1")
