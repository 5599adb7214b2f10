"""The classes that vLLM's v1 engine asks for: what is supported, the metadata of a step, a layer's forward pass."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...attention.paged_cache import MAX_QUERIES
from ...distributed.partition import KvPartition
from ...errors import UsageError
from ...tensor import dtype_word
from ..dealt_batch import Ranks, attend_dealt, check_dealt_layer, hold_a_dealt_step
from ..paged_batch import BLOCK_SIZES, HEAD_SIZES, DealtBatch, LayerOptions, PagedBatch, Part, attend, check_layer
from ..readiness import reserve, warm_up
from ..scratch import Limits, prompt_bound
from .versions import backend_name, cache_interface, decode_tokens, key_ranks

E4M3_CACHES = ("fp8", "fp8_e4m3")
_16_BIT_CACHES = ("float16", "bfloat16")
_TABLE_TOKENS = 128  # rows of vLLM's page tables are for multiples of so many
LOGGER = logging.getLogger("vllm.cubin_runtime")  # below vLLM's own, whose level and handlers it has


def limits_of(config: Any) -> Limits | None:
    """The most that a step has, of vLLM's configuration; None: it is not set."""
    scheduler, model = config.scheduler_config, config.model_config
    if scheduler is None or model is None:
        return None
    tokens = scheduler.max_num_batched_tokens
    return Limits(scheduler.max_num_seqs, tokens, model.max_model_len, _decode_tokens(config))


def table_columns(keys: int, page_size: int, ranks: int = 1) -> int:
    """The columns of vLLM's page tables, which hold the pages of a rank, for ``keys`` tokens on all ``ranks``."""
    pages, together = -(-keys // (page_size * ranks)), max(1, _TABLE_TOKENS // page_size)
    return -(-pages // together) * together


def _decode_tokens(config: Any) -> int:
    """The most query tokens of a request that our builders take for a decode."""
    most = decode_tokens(config)
    return most if most <= MAX_QUERIES else 1


def refused_in_micro_batches(config: Any) -> str | None:
    """Return the reason why this configuration cannot have micro-batches, or None."""
    parallel = config.parallel_config
    features = {
        "drafts": config.speculative_config is not None,
        "DCP": parallel.decode_context_parallel_size > 1,  # whose lengths on a rank vLLM leaves out of them
    }
    refused = [name for name, is_asked in features.items() if is_asked and parallel.use_ubatching]
    return f"{', '.join(refused)} in micro-batches not supported" if refused else None


class HopperBackend:
    """The answers that the backends of all layers give alike; in front of vLLM's own class."""

    @staticmethod
    def get_name() -> str:
        """The name that ``--attention-backend`` takes, one for all models."""
        return backend_name()

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """SM90 alone, where the kernels were measured."""
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, of all that runs on our kernels."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: pages that another host or process writes were never tried."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: how many query tokens each request has is read on the host."""
        return False


def check_configuration(backend: Any, attn_type: str, kv_cache_dtype: str, has_sink: bool = False) -> None:
    """Ask a backend about the configuration that a layer is made for.

    vLLM asks too, but keeps the answer for all configurations of a process that have some of their values alike.

    Raises:
        UsageError: the backend's reason, a layer of an encoder, or a cache of another dtype.
    """
    if (refused := backend.supports_combination(*[None] * 5, has_sink)) is not None:
        raise UsageError(refused)
    if attn_type != AttentionType.DECODER:
        raise UsageError(f"attn_type={attn_type}: expected {AttentionType.DECODER}")
    if kv_cache_dtype not in backend.supported_kv_cache_dtypes:
        expected = ", ".join(backend.supported_kv_cache_dtypes)
        raise UsageError(f"kv_cache_dtype={kv_cache_dtype!r}: expected one of {expected}")


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return whether the stream that the tensor's work goes to captures a graph."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class CubinRuntimeBackend(HopperBackend, cache_interface(), AttentionBackend):  # type: ignore[misc]
    """Decoder attention with GQA in bf16 and fp16 on SM90, over caches of the same or of e4m3."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_16_BIT_CACHES, *E4M3_CACHES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_impl_cls() -> type[CubinRuntimeImpl]:
        """The class of a layer."""
        return CubinRuntimeImpl

    @staticmethod
    def get_builder_cls() -> type[CubinRuntimeMetadataBuilder]:
        """The class that makes a step's metadata."""
        return CubinRuntimeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page; vLLM's blocks may be multiples of these."""
        return list(BLOCK_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions that both operators have."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: Any, dtype: Any, kv_cache_dtype: Any, block_size: Any, use_mla: Any, has_sink: bool, *_: Any
    ) -> str | None:
        """Refuse a 16-bit cache of another dtype than the model's, what micro-batches and keys on several ranks rule
        out, and R-SWA, which vLLM does not ask for before 0.30."""
        if kv_cache_dtype in _16_BIT_CACHES and dtype is not None and kv_cache_dtype != dtype_word(dtype):
            return f"kv_cache_dtype={kv_cache_dtype} with a model of {dtype_word(dtype)} not supported"
        config = get_current_vllm_config_or_none()
        if config is None:
            return None
        if getattr(config.model_config, "rswa_window", None) is not None:
            return "R-SWA not supported"
        if (refused := refused_in_micro_batches(config)) is not None:
            return refused
        if config.parallel_config.decode_context_parallel_size > 1:
            features = {
                "drafts": config.speculative_config is not None,
                "batch invariance": bool(envs.VLLM_BATCH_INVARIANT),
                "sinks": has_sink,
            }
            asked = [name for name, is_asked in features.items() if is_asked]
            return f"{', '.join(asked)} with DCP not supported" if asked else None
        return None


def partition_of(parallel: Any) -> KvPartition | None:
    """Return how vLLM deals keys to the ranks of decode context parallelism; None: each rank has them all."""
    if parallel.decode_context_parallel_size == 1:
        return None
    group = parallel_state.get_dcp_group()
    return KvPartition(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def keys_of_a_rank(partition: KvPartition | None, keys: int) -> int:
    """The most keys that a rank holds of a request with so many."""
    # The first rank has the most.
    return keys if partition is None else replace(partition, rank=0).own_keys(keys)


def _has_context(step: Any, decodes: int) -> bool:
    """Return whether a request behind the decodes may have keys before its new tokens, as all ranks' hosts know."""
    lengths = step.seq_lens_cpu_upper_bound
    behind = slice(decodes, step.num_reqs)
    return lengths is None or bool((lengths[behind] > step.query_start_loc_cpu.diff()[behind]).any())


class CubinRuntimeMetadataBuilder(AttentionMetadataBuilder[PagedBatch]):  # type: ignore[misc]
    """A step's ``PagedBatch`` from vLLM's common metadata; reads only what is on the host, and copies nothing back."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Decodes are views of tensors that an engine keeps: what a drafter's graph changes in them is there already.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(_decode_tokens(vllm_config))
        value_size = getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size)
        if value_size != kv_cache_spec.head_size:
            raise UsageError(f"head_size_v={value_size}: expected {kv_cache_spec.head_size}, as the keys have")
        self._block_size: int = kv_cache_spec.block_size
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._partition = partition_of(vllm_config.parallel_config)
        # With --kv-sharing-fast-prefill, vLLM copies the sums of some steps to the host, and waits for none of them.
        cache = getattr(vllm_config, "cache_config", None)
        self._has_late_sums = bool(getattr(cache, "kv_sharing_fast_prefill", False))
        # Of two micro-batches, vLLM would have the second as the first with other pages.
        self.supports_update_block_table = not vllm_config.parallel_config.use_ubatching

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedBatch:
        """Split the step into requests that decode, which come first, and the others.

        Raises:
            UsageError: the step is not causal, or has ranges that see one another.
        """
        step = common_attn_metadata
        prefixes = getattr(step, "rswa_prefix_lens", None)
        if step.causal is not True or getattr(step, "mm_req_doc_ranges", None) or prefixes is not None:
            raise UsageError("causal, mm_req_doc_ranges, rswa_prefix_lens: expected a causal step without exceptions")
        split = split_decodes_and_prefills(step, decode_threshold=self.reorder_batch_threshold)
        decodes, prefills, decode_rows, prefill_rows = split
        table, partition = step.block_table_tensor, self._partition
        lengths = step.seq_lens if partition is None else step.dcp_local_seq_lens
        room = table.shape[1] * self._block_size
        # The model's bound, as a captured launch is replayed with longer requests; keys that are sinks come on top.
        bound = min(keys_of_a_rank(partition, max(self._max_model_len, step.max_seq_len)), room)
        first = last = None
        if decode_rows:
            width, sums = self._widths(step, decodes)
            # Of the decodes that pad a captured step, there may be more than tokens.
            filled = decodes if sums is not None else min(decodes, decode_rows // width)
            rows = decode_rows if sums is not None else filled * width
            first = Part(0, rows, table[:filled], lengths[:filled], sums, width, bound)
        if prefills:
            rest = slice(decodes, decodes + prefills)
            sums = step.query_start_loc[decodes : decodes + prefills + 1]
            sums = sums - decode_rows if decode_rows else sums
            keys = lengths[rest] if partition is None else partition.own_lens(step.seq_lens[rest] - sums.diff())
            bound = prompt_bound(step.max_seq_len, bound) if partition is None else bound
            last = Part(decode_rows, prefill_rows, table[rest], keys, sums, step.max_query_len, bound)
        parts = first, last, step.slot_mapping
        return PagedBatch(*parts) if partition is None else DealtBatch(*parts, _has_context(step, decodes))

    def _widths(self, step: Any, decodes: int) -> tuple[int, torch.Tensor | None]:
        """The query tokens of each request that decodes, and None; or their bound, and running sums.

        Requests without a token, behind the others, count as having as many: they pad a captured step.
        """
        most = self.reorder_batch_threshold
        if most == 1:
            return 1, None
        if self._has_late_sums:
            return most, step.query_start_loc[: decodes + 1]
        counts = step.query_start_loc_cpu[: decodes + 1].diff()
        width = max(1, int(counts.max()))
        if bool((counts[: int(counts.count_nonzero())] == width).all()):
            return width, None
        return most, step.query_start_loc[: decodes + 1]

    def update_draft_decode_metadata(self, metadata: PagedBatch) -> None:
        """Do nothing, see ``supports_draft_decode_metadata_update``."""

    def update_block_table(self, metadata: PagedBatch, blk_table: torch.Tensor, slot_mapping: Any) -> PagedBatch:
        """A copy of a step's metadata with the pages and slots of another group of layers like these."""
        changed, room = copy.copy(metadata), blk_table.shape[1] * self._block_size
        changed.slot_mapping = slot_mapping
        begin = 0
        for name in ("decodes", "prefills"):
            part: Part | None = getattr(metadata, name)
            if part is not None:
                table = blk_table[begin : begin + part.table.shape[0]]
                bound = min(part.max_seq_len, room)
                setattr(changed, name, part._replace(table=table, max_seq_len=bound))
                begin += part.table.shape[0]
        return changed


class CubinRuntimeImpl(AttentionImpl[PagedBatch]):  # type: ignore[misc]
    """A layer. Its keys and values are written by vLLM's own kernel, by slots."""

    can_return_lse_for_decode = True  # vLLM asks for it where keys are dealt to ranks, whose outputs are combined here
    supports_dcp = True
    supports_quant_query_input = False  # queries stay in 16 bits over an e4m3 cache, too

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_configuration(CubinRuntimeBackend, attn_type, kv_cache_dtype, sinks is not None)
        check_layer(head_size, head_size, num_heads, kv_heads)
        if alibi_slopes is not None:
            raise UsageError("alibi_slopes: no kernel here honours them; expected None")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        window_left = -1 if sliding_window is None else sliding_window - 1
        soft_cap = float(logits_soft_cap or 0.0)
        self._options = LayerOptions(self.scale, window_left, soft_cap, None, bool(envs.VLLM_BATCH_INVARIANT))
        config = get_current_vllm_config_or_none()
        self._limits = None if config is None else limits_of(config)
        self._is_warm = self._limits is None
        self._ranks: Ranks | None = None
        if self.dcp_world_size > 1:
            self._deal_keys(config, sliding_window, kv_sharing_target_layer_name is not None)
        block = None if config is None else config.cache_config.block_size
        self._page_size = block if block in BLOCK_SIZES else BLOCK_SIZES[0]

    def _deal_keys(self, config: Any, sliding_window: int | None, shares_keys: bool) -> None:
        """Have the keys dealt to the ranks of decode context parallelism."""
        check_layer(self.head_size, self.head_size, self.num_heads * self.dcp_world_size, self.num_kv_heads)
        check_dealt_layer(sliding_window, self.sinks is not None, shares_keys)
        parallel = config.parallel_config
        self._ranks = key_ranks(parallel.dcp_comm_backend == "a2a")
        if self._limits is not None:
            keys = keys_of_a_rank(partition_of(parallel), self._limits.keys)
            self._limits = self._limits._replace(keys=keys)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks, which are loaded by now; captured graphs keep the address when they are loaded again."""
        if self.sinks is None:
            return
        if self._options.sinks is None:
            converted = torch.empty(self.sinks.shape, dtype=torch.float32, device=self.sinks.device)
            self._options = self._options._replace(sinks=converted)
        self._options.sinks.copy_(self.sinks.detach())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's tokens.

        Args:
            query: ``[tokens, num_heads, head_size]``; ``output`` alike, into which is written.
            key, value: ``[tokens, num_kv_heads, head_size]``, read where keys are dealt to ranks.
            layer: with an e4m3 cache its ``_k_scale`` and ``_v_scale`` are read when kernels run.
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_size]``, the keys before the values.
            attn_metadata: None while vLLM measures memory.

        Raises:
            UsageError: a scale of the output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UsageError("output_scale, output_block_scale: no kernel here quantizes; expected None")
        if self.kv_cache_dtype in E4M3_CACHES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM's is of bytes
            if self._options.k_scale is not layer._k_scale or self._options.v_scale is not layer._v_scale:
                self._options = self._options._replace(k_scale=layer._k_scale, v_scale=layer._v_scale)
        if not self._is_warm:
            self._make_ready(query, kv_cache)
        if attn_metadata is None:
            return output.fill_(0)
        k_cache, v_cache = kv_cache.chunk(2, dim=-1)
        if self._ranks is None:
            attend(query, k_cache, v_cache, "HND", attn_metadata, self._options, output)
        else:
            states = (query, key, value, k_cache, v_cache)
            attend_dealt(*states, "HND", attn_metadata, self._options, self._ranks, output)
        return output

    def _make_ready(self, query: torch.Tensor, kv_cache: torch.Tensor | None) -> None:
        """While vLLM measures memory, load kernels and reserve scratch; once there is a cache, write fast paths.

        vLLM's first step over a cache may have metadata or not, by its version and model.
        """
        if self._limits is None or is_capturing(query):
            return
        if kv_cache is None or not kv_cache.numel():
            arguments = (query, self.num_kv_heads, self._page_size, "HND", self._options, self._limits)
            cache_dtype = torch.float8_e4m3fn if self.kv_cache_dtype in E4M3_CACHES else None
            self._options = reserve(*arguments, LOGGER, cache_dtype, self.dcp_world_size)
            if self._options.scratch is not None:
                query.new_empty(self._options.scratch.lent, dtype=torch.uint8)  # which vLLM then leaves free
            if self._ranks is not None:
                hold_a_dealt_step(query, self.dcp_world_size)
            return
        if self._ranks is not None:
            self._is_warm = True
        elif (scratch := self._options.scratch) is not None and scratch.serves_current():
            self._is_warm = True
            columns = table_columns(self._limits.keys, kv_cache.shape[2])
            k_cache, v_cache = kv_cache.chunk(2, dim=-1)
            warm_up(query, k_cache, v_cache, "HND", self._options, self._limits, columns)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write a step's keys and values, ``[tokens, num_kv_heads, head_size]``, to their slots; -1: nowhere."""
        # Of vLLM's compiled part, which choosing a backend does not need.
        from vllm._custom_ops import reshape_and_cache_flash

        caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        reshape_and_cache_flash(key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
