"""The class that SGLang's model runner makes for models without MLA: a layer's forward pass over K and V."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from ...errors import UsageError
from ..paged_batch import BLOCK_SIZES, LayerOptions, attend, check_layer, decodes_directly
from ..readiness import reserve, warm_up
from ..scratch import SharedScratch, shared_scratch
from .steps import PagedAttnBackend, refuse
from .versions import write_location

_LOGGER = logging.getLogger(__name__)


class CubinRuntimeAttnBackend(PagedAttnBackend):
    """Decoder attention with GQA in bf16 and fp16 on SM90, over pages of 16 to 1024 tokens of that type or of e4m3."""

    def __init__(self, model_runner: Any) -> None:
        pool = model_runner.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
            layout = getattr(pool, "kv_cache_layout", None)
            raise UsageError(
                f"token_to_kv_pool: a {type(pool).__name__} with layout {layout!r}, expected a MHATokenToKVPool with "
                "'nhd' (models with windows: --disable-hybrid-swa-memory)"
            )
        dtype = model_runner.dtype
        if dtype not in (torch.bfloat16, torch.float16) or pool.dtype not in (dtype, torch.float8_e4m3fn):
            raise UsageError(
                f"kv_cache_dtype: {pool.dtype}, expected the model's, bfloat16 or float16, or float8_e4m3fn"
            )
        super().__init__(model_runner, BLOCK_SIZES)
        self._dtype = dtype
        self._attn_types = _causal_types(model_runner.model_config)
        self._chunk = getattr(model_runner, "attention_chunk_size", None)
        self._scratch: SharedScratch | None = None
        self._get_ready(getattr(model_runner, "model", None))

    def _get_ready(self, model: Any) -> None:
        """Load the kernels of the model's layers, reserve scratch and write fast paths, before any graph is captured.

        Sinks belong to other modules than the layers, so that layers with sinks write theirs at the first steps.
        """
        layers = [each for each in model.modules() if isinstance(each, RadixAttention)] if model is not None else []
        for layer in layers:
            self._check(layer)
            options = self._options(layer, None)
            size, heads, kv_heads = layer.qk_head_dim, layer.tp_q_head_num, layer.tp_k_head_num
            # Queries are a part of the rows that a projection wrote, or, where they were normalized, apart.
            rows = torch.zeros(1, heads + 2 * kv_heads, size, dtype=self._dtype, device=self._first_slots.device)
            part = rows[:, :heads]
            reserve(part, kv_heads, self._page, "NHD", options, self._limits, _LOGGER, self.token_to_kv_pool.dtype)
            self._scratch = shared_scratch(rows.device.index or 0)
            columns = self._first_slots.shape[1]
            for q in (part, torch.zeros_like(part, memory_format=torch.contiguous_format)):
                warm_up(q, *self._caches(layer), "NHD", self._options(layer, None), self._limits, columns)

    def _check(self, layer: Any) -> None:
        """Refuse a layer that is not causal, sees the keys of its chunk alone, caps scores by another function, or has
        sizes without kernels.

        Raises:
            UsageError: the message names what it is.
        """
        if layer.is_cross_attention or layer.attn_type not in self._attn_types or layer.xai_temperature_len > 0:
            raise UsageError(
                f"is_cross_attention={layer.is_cross_attention}, attn_type={layer.attn_type.name}, "
                f"xai_temperature_len={layer.xai_temperature_len}: expected a causal decoder layer"
            )
        if layer.use_irope and self._chunk is not None:
            raise UsageError(f"use_irope=True, attention_chunk_size={self._chunk}: expected a layer without chunks")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise UsageError(f"logit_capping_method={layer.logit_capping_method!r}: expected 'tanh'")
        check_layer(layer.qk_head_dim, layer.v_head_dim, layer.tp_q_head_num, layer.tp_k_head_num)
        sizes = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        if self._branches and not decodes_directly(*sizes, self._options(layer, None)):
            raise UsageError(
                f"speculative_algorithm=NGRAM: {sizes[0]} heads on {sizes[1]} of {sizes[2]}, logit_cap="
                f"{layer.logit_cap or 0.0}, deterministic inference {self._batch_invariant}: verified by kernels "
                "without masks, which branches of draft tokens need"
            )

    def _options(self, layer: Any, sinks: Any) -> LayerOptions:
        soft_cap = float(layer.logit_cap or 0.0)
        window = layer.sliding_window_size
        options = (layer.scaling, window, soft_cap, sinks, self._batch_invariant, self._scratch)
        return LayerOptions(*options, *self._scales(layer))

    def _scales(self, layer: Any) -> tuple[Any, Any]:
        """The scales by which keys and values are divided when written, and multiplied when read; None: 1."""
        return (layer.k_scale, layer.v_scale) if self.token_to_kv_pool.dtype == torch.float8_e4m3fn else (None, None)

    def _caches(self, layer: Any) -> tuple[Any, Any]:
        """K and V of a layer, ``[pages, page_size, kv_heads, head_dim]``."""
        shape = (-1, self._page, layer.tp_k_head_num, layer.qk_head_dim)
        k_cache, v_cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return k_cache.view(shape), v_cache.view(shape)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> Any:
        """Write the new keys and values to their slots, and attend.

        Args:
            q: ``[tokens, heads * head_dim]``; ``k`` and ``v`` alike.
            arguments: ``sinks``, ``[heads]``.

        Returns:
            ``[tokens, heads * head_dim]``.

        Raises:
            UsageError: the layer or an argument is not honoured; the message names it.
        """
        sinks = arguments.pop("sinks", None)
        refuse(arguments)
        self._check(layer)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, write_location(forward_batch), k, v, *self._scales(layer))
        if sinks is not None:
            sinks = sinks.to(torch.float32)
        queries = q.view(-1, heads, size)
        out = torch.empty_like(queries)
        caches = self._caches(layer)
        attend(queries, *caches, "NHD", self.forward_metadata, self._options(layer, sinks), out)
        return out.view(-1, heads * size)


def _causal_types(model: Any) -> tuple[AttentionType, ...]:
    """The types of a model's layers that are causal.

    Before 0.5.19, SGLang says of all Gemma 3 that it looks both ways, as its embedding models do, whose configuration
    says so too, and its images; text is causal.
    """
    text = getattr(model, "hf_text_config", None)
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    both_ways = both_ways or getattr(model, "is_multimodal", False)
    return (AttentionType.DECODER,) if both_ways else (AttentionType.DECODER, AttentionType.DECODER_BIDIRECTIONAL)
