"""The classes that vLLM asks for where an indexer chooses the rows of a latent cache (sparse MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import get_mla_dims
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadata
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.ops import flashmla

from ...attention.operators.sparse_mla_decode import sparse_mla_decode
from ...errors import UsageError
from ...kernels.native.sparse_mla.select import ROW_FORMS
from ..latent_batch import LISTED_LATENT, LISTED_ROPE, PAGE_SIZE, unserved_lists
from ..latent_readiness import ListKind, reserve_lists
from ..scratch import SharedScratch, launch
from .backend import LOGGER, check_configuration, limits_of, refused_in_micro_batches
from .mla_backend import LatentBackend, joined
from .versions import latent_cache_interface, lists_width

PACKED, PACKED_ROWS = "fp8_ds_mla", "scaled_e4m3"  # vLLM's name, and that in ``ROW_FORMS``
# Requests with so many new tokens at most attend to their lists; longer prompts may go to vLLM's own MLA prefill.
_MOST_LISTED_TOKENS = 128
# vLLM's kernel for prompts over bf16 rows computes so many heads at a time; lists have a multiple of so many entries.
_PROMPT_HEADS, _PROMPT_ENTRIES = 64, 128
# Up to so many heads ours takes no longer for them.
_MOST_HEADS_OF_PROMPTS = 16


class CubinRuntimeSparseMlaBackend(LatentBackend, *latent_cache_interface(), AttentionBackend):  # type: ignore[misc]
    """Sparse MLA on SM90: bf16 queries, a cache of bf16 or of rows of 656 bytes (e4m3 with scales)."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", PACKED]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page; vLLM's blocks may be multiples of it."""
        return [PAGE_SIZE]

    @staticmethod
    def get_impl_cls() -> type[CubinRuntimeSparseMlaImpl]:
        """The class of a layer."""
        return CubinRuntimeSparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[CubinRuntimeSparseMlaMetadataBuilder]:
        """The class that makes a step's metadata."""
        return CubinRuntimeSparseMlaMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Columns of the cache."""
        return [LISTED_LATENT + LISTED_ROPE]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Have blocks begin whole rows apart, as lists number rows; vLLM asks from 0.30 on."""
        align = getattr(sparse_utils, "align_blocks_to_rows", None)
        return spec if align is None else align(spec)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """``[blocks, block_size, columns]``, or bytes; from 0.29 on vLLM knows it."""
        return num_blocks, block_size, ROW_FORMS[PACKED_ROWS][1] if cache_dtype_str == PACKED else head_size

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        """Refuse sizes without kernels, drafts in micro-batches, and keys that are dealt to several ranks."""
        config = get_current_vllm_config_or_none()
        if config is None:
            return None
        parallel, model = config.parallel_config, config.model_config
        if parallel.decode_context_parallel_size > 1:
            return "decode context parallelism with lists not supported"
        if (refused := refused_in_micro_batches(config)) is not None:
            return refused
        if getattr(config.attention_config, "hisparse_config", None) is not None:
            return "a cache with rows on the host not supported"
        width = lists_width(model)
        if width is None:
            return "sparse MLA without index_topk not supported"
        dims, heads = get_mla_dims(model), model.get_num_attention_heads(parallel)
        return unserved_lists(dims.kv_lora_rank, dims.qk_rope_head_dim, heads, width)


@dataclass
class OwnSparseMlaMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step, with the names that vLLM's layer and its builder read and fill before 0.30."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    prefill_max_seq_len: int
    prefill: Any
    cp_kv_cache_interleave_size: int = 1


class CubinRuntimeSparseMlaMetadataBuilder(sparse_mla_attention.SparseMLACommonMetadataBuilder):  # type: ignore[misc]
    """vLLM's own, which copies nothing from the device."""

    metadata_cls = getattr(sparse_mla_attention, "SparseMLACommonMetadata", OwnSparseMlaMetadata)
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(_MOST_LISTED_TOKENS, supports_spec_as_decode=True)


class _ConvertedLists:
    """Before 0.30 a layer converts positions to slots itself."""

    topk_indices_buffer: torch.Tensor

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """As vLLM's own from 0.30 on."""
        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        lists, block_size = self.topk_indices_buffer[:tokens], attn_metadata.block_size
        rows, more = kv_c_and_k_pe_cache, {}
        if hasattr(sparse_utils, "flat_kv_row_view"):  # from 0.29 on lists number rows, some of other layers
            rows, more["BLOCK_STRIDE_ROWS"] = sparse_utils.flat_kv_row_view(rows, block_size)
        indices = sparse_utils.triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            lists,
            BLOCK_SIZE=block_size,
            NUM_TOPK_TOKENS=lists.shape[1],
            **more,
        )
        return self.attend(q, rows, indices, attn_metadata.num_decode_tokens), None  # type: ignore[attr-defined]


_LAYER = sparse_mla_attention.SparseMLACommonImpl
_BASES = (_LAYER,) if hasattr(_LAYER, "_forward_mqa_kernel") else (_ConvertedLists, _LAYER)


class CubinRuntimeSparseMlaImpl(*_BASES):  # type: ignore[misc]
    """A layer. Its cache is written by vLLM's own kernel, and its lists by vLLM's indexer."""

    supports_quant_query_input = False
    supports_pcp = False
    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        check_configuration(CubinRuntimeSparseMlaBackend, attn_type, kv_cache_dtype)
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap:
            raise UsageError("alibi_slopes, sliding_window, logits_soft_cap: expected none of them")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if self.topk_indices_buffer is None:
            raise UsageError("indexer: expected one, or topk_indices_buffer")
        width = self.topk_indices_buffer.shape[1]
        if (refused := unserved_lists(self.kv_lora_rank, self.qk_rope_head_dim, num_heads, width)) is not None:
            raise UsageError(refused)
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._engine_prompts = not self._batch_invariant and _engine_prompts(num_heads, kv_cache_dtype, width)
        self._scratch = self._reserve(width)

    def _reserve(self, width: int) -> SharedScratch | None:
        """Load kernels and reserve scratch while vLLM makes the model, whose memory it counts."""
        limits, device = limits_of(get_current_vllm_config()), self.topk_indices_buffer.device
        if limits is None or device.type == "meta":
            return None
        rows = PACKED_ROWS if self.kv_cache_dtype == PACKED else "bf16"
        kind = ListKind(self.num_heads, rows, width, device.index or 0)
        return reserve_lists(kind, self._batch_invariant, limits, LOGGER)

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor | None,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, None]:
        """``attend`` with slots that vLLM has converted, from 0.30 on; ``kv_cache`` is ``[blocks, 64, ...]``."""
        rows, _ = sparse_utils.flat_kv_row_view(kv_cache, block_size)
        return self.attend(q, rows, topk_indices, topk_indices.shape[0] if is_decode else 0), None

    def attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        indices: torch.Tensor,
        decode_tokens: int,
    ) -> torch.Tensor:
        """Attention of query tokens to the rows that the indexer chose.

        Args:
            q: ``[tokens, heads, 576]``, or a pair of its two parts.
            kv_cache: ``[..., 576]``, or bytes ``[..., 656]``; rows, or blocks of 64 of them.
            indices: slots, int32 ``[tokens, width]``; the negative ones are holes, wherever they stand, but those that
                vLLM's kernel for prompts gets, at the end.
            decode_tokens: the first so many tokens decode; others, of prompts, may go to vLLM's own kernel.

        Returns:
            ``[tokens, heads, 512]``.
        """
        if isinstance(q, tuple):
            q = joined(q)
        out = torch.empty((*q.shape[:2], LISTED_LATENT), dtype=torch.bfloat16, device=q.device)
        if not self._engine_prompts or decode_tokens >= q.shape[0]:
            self._attend(q, kv_cache, indices, out)
            return out
        prompts = slice(decode_tokens, None)
        self._attend_to_prompts(q[prompts], kv_cache, indices[prompts], out[prompts])
        if decode_tokens > 0:
            self._attend(q[:decode_tokens], kv_cache, indices[:decode_tokens], out[:decode_tokens])
        return out

    def _attend_to_prompts(
        self, q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The same by vLLM's kernel for prompts, into ``out``."""
        heads = q.shape[1]
        padding = -heads % _PROMPT_HEADS
        queries = torch.nn.functional.pad(q, (0, 0, 0, padding)) if padding else q
        rows = kv_cache.view(-1, 1, kv_cache.shape[-1])
        entries = (indices >= 0).sum(-1, dtype=torch.int32)  # an indexer writes holes behind them
        buffer = None if padding else out
        result, *_ = flashmla.flash_mla_sparse_fwd(
            queries, rows, indices[:, None], self.scale, topk_length=entries, out=buffer
        )
        if padding:
            out.copy_(result[:, :heads])

    def _attend(self, q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
        """The same by ours."""
        launch(
            sparse_mla_decode,
            # Lists have the same length however many keys there are.
            self._scratch.of_launch(1, q.shape[0], 0) if self._scratch else None,
            q,
            kv_cache,
            indices,
            softmax_scale=self.scale,
            batch_invariant=self._batch_invariant,
            out=out,
        )


def _engine_prompts(heads: int, kv_cache_dtype: str, width: int) -> bool:
    """Return whether prompts go to vLLM's own kernel: over bf16 rows ours reads them again for each 16 heads."""
    if kv_cache_dtype == PACKED or heads <= _MOST_HEADS_OF_PROMPTS or width % _PROMPT_ENTRIES:
        return False
    return bool(flashmla.is_flashmla_sparse_supported()[0])
