"""The classes that vLLM asks for where layers have a latent cache (MLA); long prompts go to vLLM's own MLA prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm import _custom_ops, envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    get_mla_dims,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ...attention.paged_cache import PAGE_SIZES
from ...errors import UsageError
from ...kernels.native.problem import Dealing
from ..latent_batch import (
    LAYER_COLUMNS,
    SHORT_PROMPT_TOKENS,
    LatentDecodes,
    LatentOptions,
    attend_latent,
    check_latent_layer,
    chunk_of,
    chunks_of,
    even_q_len,
    unserved,
)
from ..latent_readiness import LatentKind, reserve_latent, warm_up_latent
from .backend import (
    E4M3_CACHES,
    LOGGER,
    HopperBackend,
    check_configuration,
    is_capturing,
    limits_of,
    refused_in_micro_batches,
    table_columns,
)
from .versions import decode_tokens, latent_cache_interface

_JOINED_BY_VLLM = (512, 64)
_FASTEST_BLOCK = 64  # tokens; smaller ones are copied in more parts, those of an fp8 cache slowly
_MOST_PAIRS = 1 << 32  # of tokens and keys of a step, where launches of up to 128 heads number tiles in 31 bits


def keys_on_a_rank(keys: int, dealing: Dealing) -> int:
    """The most keys that a rank holds of a request with so many."""
    return -(-keys // (dealing.world * dealing.interleave)) * dealing.interleave


def cuts_short_prompts(config: Any) -> bool:
    """Return whether prompts of few new tokens are decoded in chunks.

    The bits of a prompt must not depend on how it is cut; lengths on a rank do not follow from those of a request; and
    vLLM lets a request of a micro-batch with no more tokens than a decode read what another micro-batch writes.
    """
    parallel = config.parallel_config
    if envs.VLLM_BATCH_INVARIANT or parallel.decode_context_parallel_size > 1 or parallel.use_ubatching:
        return False
    return bool(config.scheduler_config.max_num_batched_tokens * config.model_config.max_model_len <= _MOST_PAIRS)


def joined(parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Latent and rope columns of queries side by side, by vLLM's own kernel where it has one for them.

    The latent columns come transposed from a matrix product, which ``torch.cat`` copies at a quarter of the speed.
    """
    latent, rope = parts
    if latent.device.type == "cpu" or (latent.shape[-1], rope.shape[-1]) != _JOINED_BY_VLLM:
        return torch.cat(parts, dim=-1)
    q = torch.empty((*rope.shape[:2], sum(_JOINED_BY_VLLM)), dtype=rope.dtype, device=rope.device)
    _custom_ops.concat_mla_q(latent, rope, q)
    return q


class LatentBackend(HopperBackend):
    """The answers that the backends of a latent cache give alike."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]


class CubinRuntimeMlaBackend(LatentBackend, *latent_cache_interface(), MLACommonBackend):  # type: ignore[misc]
    """Dense MLA on SM90: bf16 queries and cache, or e4m3 both."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", *E4M3_CACHES]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page; vLLM's blocks may be multiples of these."""
        return list(PAGE_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """vLLM's, as whole blocks of cached prompts are shared; the fastest where that costs more or none is."""
        config = get_current_vllm_config_or_none()
        if config is None:
            return default_block_size
        cache = config.cache_config
        is_shared = cache.enable_prefix_caching and cache.cache_dtype not in E4M3_CACHES
        return default_block_size if is_shared else max(default_block_size, _FASTEST_BLOCK)

    @staticmethod
    def get_impl_cls() -> type[CubinRuntimeMlaImpl]:
        """The class of a layer."""
        return CubinRuntimeMlaImpl

    @staticmethod
    def get_builder_cls() -> type[CubinRuntimeMlaMetadataBuilder]:
        """The class that makes a step's metadata."""
        return CubinRuntimeMlaMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Columns of the cache, of those that vLLM's metadata of steps take."""
        sizes = MLACommonBackend.get_supported_head_sizes()
        return [latent + rope for latent, rope in LAYER_COLUMNS if latent + rope in sizes]

    @classmethod
    def supports_combination(cls, *_: Any, **__: Any) -> str | None:
        """Refuse sizes without kernels, what micro-batches rule out, and scales that vLLM finds in the first step."""
        config = get_current_vllm_config_or_none()
        if config is None:
            return None
        if getattr(config.cache_config, "calculate_kv_scales", False):
            return "calculate_kv_scales not supported"
        if (refused := refused_in_micro_batches(config)) is not None:
            return refused
        dims, parallel = get_mla_dims(config.model_config), config.parallel_config
        heads = config.model_config.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size
        return unserved(dims.kv_lora_rank, dims.qk_rope_head_dim, heads, decode_tokens(config))


@dataclass
class CubinRuntimeMlaDecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The decodes of a step."""

    decodes: LatentDecodes


class CubinRuntimeMlaMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """Decodes with one token each, or with up to 16 where there are drafts, and prompts of few new tokens in chunks.

    It copies nothing from the device.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        if cuts_short_prompts(vllm_config):
            self.reorder_batch_threshold = SHORT_PROMPT_TOKENS
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, supports_dcp_with_varlen=True)
        self._decode_tokens, self._chunk = decode_tokens(vllm_config), chunk_of(self.num_heads)
        dealing = Dealing(self.dcp_world_size, 0, vllm_config.parallel_config.cp_kv_cache_interleave_size)
        self._most_keys = keys_on_a_rank(vllm_config.model_config.max_model_len, dealing)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> MLACommonMetadata:
        """As vLLM's own.

        Raises:
            UsageError: the step is not causal.
        """
        if common_attn_metadata.causal is not True:
            raise UsageError("causal: expected a causal step")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> CubinRuntimeMlaDecodeMetadata:
        """The decodes, whose bound is the model's, as a captured launch is replayed with longer requests."""
        q_lens = query_start_loc_cpu.diff().tolist()
        room = block_table_tensor.shape[1] * self.page_size
        bound = min(max(self._most_keys, max_seq_len), room)
        totals = dcp_tot_seq_lens_device
        if max(q_lens) > self._decode_tokens:
            decodes = self._in_chunks(block_table_tensor, seq_lens_device, q_lens, num_decode_tokens, bound)
        else:
            even = even_q_len(q_lens, num_decode_tokens)
            requests = num_decode_tokens // even if even else len(q_lens)
            decodes = LatentDecodes(
                block_table_tensor[:requests],
                seq_lens_device[:requests],
                None if even else query_start_loc_device[: requests + 1],
                even or max(1, *q_lens),
                bound,
                None if totals is None else totals[:requests],
            )
        return CubinRuntimeMlaDecodeMetadata(
            block_table=block_table_tensor, seq_lens=seq_lens_device, dcp_tot_seq_lens=totals, decodes=decodes
        )

    def _in_chunks(
        self, table: torch.Tensor, lengths: torch.Tensor, q_lens: list[int], rows: int, bound: int
    ) -> LatentDecodes:
        """Each chunk as a request that ends with its last token, so that it sees no later one."""
        chunks = chunks_of(q_lens, self._chunk)
        packed = torch.from_numpy(np.concatenate(chunks))
        if table.is_cuda:
            packed = packed.pin_memory()
        sums, requests, behind = packed.to(table.device, non_blocking=True).split([len(part) for part in chunks])
        # Without sums each row is a request; with rows that pad the step there are more.
        single = self._chunk == 1 and rows == len(requests)
        return LatentDecodes(
            table.index_select(0, requests),
            lengths.index_select(0, requests) - behind,
            None if single else sums,
            self._chunk,
            bound,
        )


class CubinRuntimeMlaImpl(MLACommonImpl[MLACommonMetadata]):  # type: ignore[misc]
    """A layer. Its cache is written by vLLM's own kernel, by slots."""

    can_return_lse_for_decode = True
    lse_base_on_e = False
    supports_pcp = False
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

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
        check_configuration(CubinRuntimeMlaBackend, attn_type, kv_cache_dtype)
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap or mla_args.get("indexer"):
            raise UsageError("alibi_slopes, sliding_window, logits_soft_cap, indexer: expected none of them")
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
        config = get_current_vllm_config()
        parallel, q_len = config.parallel_config, decode_tokens(config)
        world = parallel.decode_context_parallel_size
        check_latent_layer(self.kv_lora_rank, self.qk_rope_head_dim, num_heads * world, q_len)
        rank = self.dcp_rank if world > 1 else 0
        dealing = Dealing(world, rank, parallel.cp_kv_cache_interleave_size) if world > 1 else Dealing()
        self._options = LatentOptions(self.scale, 1.0, bool(envs.VLLM_BATCH_INVARIANT), dealing)
        self._quantized = kv_cache_dtype in E4M3_CACHES
        self._warm_shape: torch.Size | None = None
        self._get_ready(config, q_len)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a step's decodes.

        Args:
            q: ``[tokens, heads, kv_lora_rank + qk_rope_head_dim]``, or a pair of its two parts.
            kv_c_and_k_pe_cache: ``[blocks, block_size, kv_lora_rank + qk_rope_head_dim]``.

        Returns:
            ``[tokens, heads, kv_lora_rank]`` and, with decode context parallelism, the log-sum-exp ``[tokens, heads]``
            in base 2, else None.
        """
        rope = None
        if isinstance(q, tuple):
            # The strides of the latent columns follow from the number of tokens, which fast paths of any number do not
            # take. A graph has one number, and launches as they were captured.
            if is_capturing(q[0]):
                q, rope = q
            else:
                q = joined(q)
        options = self._options
        if self._quantized:
            key_scale = float(layer._k_scale_float)
            softmax_scale = self.scale * key_scale * float(layer._q_scale_float)
            options = options._replace(softmax_scale=softmax_scale, output_scale=key_scale)
        out = torch.empty((*q.shape[:2], self.kv_lora_rank), dtype=torch.bfloat16, device=q.device)
        with_lse = options.dealing.world > 1
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if with_lse else None
        attend_latent(q, kv_c_and_k_pe_cache, attn_metadata.decode.decodes, options, out, lse, rope)
        return out, lse

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, *arguments: Any, **more: Any
    ) -> None:
        """As vLLM's own; when it first runs over a cache, in a dummy step, write the fast paths.

        vLLM measures its graphs over a smaller cache first.
        """
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, *arguments, **more)
        if kv_cache.shape == self._warm_shape or not kv_cache.numel() or is_capturing(kv_cache):
            return
        if (scratch := self._options.scratch) is not None and scratch.serves_current():
            self._warm_shape = kv_cache.shape
            columns = table_columns(self._table_keys, kv_cache.shape[1], self._options.dealing.world)
            cache = kv_cache.view(torch.float8_e4m3fn) if self._quantized else kv_cache
            warm_up_latent(self._kind, cache, self._options, self._limits, columns)

    def _get_ready(self, config: Any, q_len: int) -> None:
        """Load kernels and reserve scratch while vLLM makes the model, whose memory it counts."""
        limits, parameter = limits_of(config), next(self.kv_b_proj.parameters(), None)
        if limits is None or parameter is None or parameter.device.type == "meta":
            return
        heads, dtype = self.num_heads * self._options.dealing.world, "float8_e4m3fn" if self._quantized else "bfloat16"
        latent, rope, device = self.kv_lora_rank, self.qk_rope_head_dim, parameter.device.index or 0
        chunk = chunk_of(heads) if cuts_short_prompts(config) else 0
        self._kind = LatentKind(heads, latent, rope, dtype, dtype, q_len, device, chunk)
        self._table_keys = limits.keys
        self._limits = limits._replace(keys=keys_on_a_rank(limits.keys, self._options.dealing))
        self._options = reserve_latent(self._kind, self._options, self._limits, LOGGER)
