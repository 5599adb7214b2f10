"""The differences between the versions of vLLM, 0.26 to 0.33: each is asked of the engine itself."""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from ..dealt_batch import Ranks
from ..interface import require

NAME = "CUBIN_RUNTIME"

# Names that ``backend`` takes from vLLM, in every version.
_INTERFACE = {
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
    "vllm.v1.attention.backend": (
        *("AttentionBackend", "AttentionCGSupport", "AttentionImpl"),
        *("AttentionMetadataBuilder", "AttentionType", "CommonAttentionMetadata"),
    ),
    "vllm.v1.attention.backends.utils": ("split_decodes_and_prefills",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.config": ("get_current_vllm_config_or_none",),
}


def check_interface() -> None:
    """Raise ImportError that names what ``backend`` needs and this vLLM has not."""
    require(_INTERFACE)
    if not _has_layouts():  # before 0.29 the backend describes the cache itself
        require({"vllm.v1.attention.backends.utils": ("get_kv_cache_layout",)})


def backend_name() -> str:
    """The name of our backend in vLLM's registry: our own from 0.32 on, before that the one kept for plug-ins."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"


def add_backend(path: str) -> None:
    """Register the class at ``path`` unless it is registered.

    Raises:
        UsageError: another plug-in has the only name that there is.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name = backend_name()
    member = AttentionBackendEnum.__members__.get(name)
    if member is None and name == NAME:
        register_backend(NAME, path)
    elif member is None:
        raise UsageError(f"attention backend {name}: expected a member of AttentionBackendEnum")
    elif not member.is_overridden():
        register_backend(member, path)
    elif member.get_path() != path:
        raise UsageError(f"attention backend {name}: another plug-in has it, {member.get_path()}")


def decode_tokens(config: Any) -> int:
    """The most query tokens of a request that vLLM takes for a decode: one, and its draft tokens."""
    from vllm.v1.attention import backend

    if hasattr(backend, "max_decode_query_len"):
        return int(backend.max_decode_query_len(config))
    drafts = config.speculative_config
    if drafts is None or drafts.num_speculative_tokens is None:
        return 1
    return 1 + (2 if drafts.parallel_drafting else 1) * int(drafts.num_speculative_tokens)


def lists_width(model: Any) -> int | None:
    """The rows that a model's indexer chooses for each query token; None: it has no indexer."""
    both = (getattr(model, name, None) for name in ("hf_text_config", "hf_config"))  # the former from 0.30 on
    widths = (getattr(config, "index_topk", None) for config in both)
    return next((int(width) for width in widths if width is not None), None)


def key_ranks(all_to_all: bool) -> Ranks:
    """The ranks of vLLM's decode context parallelism, with its own collectives.

    Args:
        all_to_all: as ``dcp_comm_backend`` "a2a" asks for it; else log-sum-exps are gathered and outputs added.
    """
    from vllm.distributed import parallel_state

    try:
        from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
    except ImportError:  # two modules, before 0.29
        from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
        from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce
    reduce = dcp_a2a_lse_reduce if all_to_all else cp_lse_ag_out_rs

    def gather(queries: Any) -> Any:
        return parallel_state.get_dcp_group().all_gather(queries.contiguous(), dim=1)

    def combine(out: Any, lse: Any) -> Any:
        return reduce(out, lse, parallel_state.get_dcp_group(), return_lse=True, is_lse_base_on_e=False)

    return Ranks(gather, combine)


def _has_layouts() -> bool:
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "supported_kv_cache_layouts")


class CacheLayouts:
    """The physical layouts that a backend takes, from 0.29 on."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layouts whose pages lie in one piece; the first is the fastest."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


class CacheShapes:
    """The shape and the order of strides that a backend gives the cache, before 0.29."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """``[blocks, kv_heads, block_size, 2 * head_size]``, the keys of a head before its values."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The dimensions in the order of memory; with that of the layers in front, the blocks stay outermost."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        order = (0, 1, 2, 3) if get_kv_cache_layout() == "HND" else (0, 2, 1, 3)
        return (1, 0, *(axis + 1 for axis in order[1:])) if include_num_layers_dimension else order


def cache_interface() -> type:
    """Return the base class with what a backend says of the cache."""
    return CacheLayouts if _has_layouts() else CacheShapes


def latent_cache_interface() -> tuple[type, ...]:
    """Return the base classes with what a backend says of a latent cache, whose shape vLLM knows."""
    return (CacheLayouts,) if _has_layouts() else ()
