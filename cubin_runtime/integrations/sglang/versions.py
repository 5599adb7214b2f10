"""The differences between the versions of SGLang, 0.5.16 to 0.5.23: each is asked of the engine itself."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from ..interface import require

NAME = "cubin_runtime"
_NAME_WITH_LISTS = f"{NAME}_lists"

_LOGGER = logging.getLogger(__name__)
# Modules with the names of backends, the newest first; from 0.5.20 on `server_args` only repeats them.
_CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")
_ADDING = (
    "add_attention_backend_choices",
    "add_deterministic_attention_backend_choices",
    "add_radix_supported_deterministic_attention_backend_choices",
)
_ADDING_ONE = "add_chunked_prefix_cache_attention_backend"
_OVERRIDES, _PAGE_SIZE_DEFAULT = "sglang.srt.arg_groups.overrides", "_page_size_default"
# Tokens of a page where the user says nothing: SGLang's default of 1 has no kernels.
PAGE_SIZE = 64


def check_interface() -> None:
    """Raise ImportError that names what ``backend`` needs and this SGLang has not."""
    require(
        {
            "sglang.srt.layers.attention.attention_registry": ("ATTENTION_BACKENDS", "register_attention_backend"),
            "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
            "sglang.srt.layers.radix_attention": ("AttentionType", "RadixAttention"),
            "sglang.srt.mem_cache.memory_pool": ("KVWriteLoc", "MHATokenToKVPool", "MLATokenToKVPool"),
            "sglang.srt.runtime_context": ("get_server_args",),
            _choices().__name__: ("ATTENTION_BACKEND_CHOICES", *_ADDING, _ADDING_ONE),
        }
    )


def add_backend(make: Callable[[Any], Any]) -> None:
    """Register what makes the backend for a model runner, and its name where the command line chooses."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices = _choices()
    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    for add in _ADDING:
        getattr(choices, add)([NAME])
    getattr(choices, _ADDING_ONE)(NAME)
    register_attention_backend(NAME)(make)
    _default_page_size()


def has_lists(runner: Any) -> bool:
    """Return whether an indexer chooses the rows that the model attends to."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    config = getattr(runner.model_config, "hf_config", None)
    return config is not None and bool(is_deepseek_dsa(config))


def serve_latent_layers() -> None:
    """Have SGLang's layers with MLA ask ``forward_method`` about a step.

    A process may have layers of both kinds, of a target and a draft model, and SGLang knows them by a backend's name:
    where an indexer chooses rows, it is the name with ``_lists``, whose layers pass latent and rope columns apart.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    AttentionBackendRegistry.register(NAME, forward_method)
    if _NAME_WITH_LISTS not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(_NAME_WITH_LISTS)


def forward_method(attn: Any, forward_batch: Any) -> Any:
    """The way in which a layer with MLA runs a step: as SGLang's own where an indexer chooses rows, else prompts on
    projected keys and the rest in the latent space.

    It is a handler of SGLang's ``AttentionBackendRegistry``, which a layer calls after it noted the backend's name.
    """
    if getattr(attn, "use_dsa", False):
        from sglang.srt.models.deepseek_common.attention_backend_handler import handle_attention_dsa

        attn.current_attention_backend = _NAME_WITH_LISTS
        return handle_attention_dsa(attn, forward_batch)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    prompts = forward_batch.forward_mode.is_extend_without_speculative()
    return AttnForwardMethod.MHA_CHUNKED_KV if prompts else AttnForwardMethod.MLA


def run_prefixes_without_graphs() -> None:
    """Have SGLang run prompts behind cached keys without a graph where a backend ``captures_no_prefix``.

    A graph of prompts is captured of one without a prefix, and while it is replayed no layer is asked how it runs: the
    keys of a prefix would be left out. SGLang's own backends run captured prompts of such layers in the latent space.
    """
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    # The former, from 0.5.19 on, is asked for all ranks of data parallelism too, which have to agree.
    name = next(name for name in ("can_replay_locally", "can_run_graph") if hasattr(PrefillCudaGraphRunner, name))
    replays = getattr(PrefillCudaGraphRunner, name)
    if replays.__module__ == __name__:
        return

    def asked(runner: Any, *arguments: Any, **named: Any) -> bool:
        lens = named["prefix_lens"] if "prefix_lens" in named else arguments[0].extend_prefix_lens_cpu
        backend = runner.model_runner.attn_backend
        prompts = getattr(backend, "prefill_backend", backend)  # where others decode
        if lens is not None and any(lens) and getattr(prompts, "captures_no_prefix", False):
            return False
        return bool(replays(runner, *arguments, **named))

    setattr(PrefillCudaGraphRunner, name, asked)


def is_deterministic() -> bool:
    """Return whether the server runs with deterministic inference."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "get_exec"):
        return bool(runtime_context.get_exec().deterministic.enable_deterministic_inference)
    return bool(runtime_context.get_server_args().enable_deterministic_inference)


def draft_shape() -> tuple[int, int]:
    """The draft tokens of a request that the target model verifies, 0 without drafts, and the breadth of their tree."""
    bag = _drafting()
    if getattr(bag, "speculative_algorithm", None) is None:
        return 0, 1
    return int(bag.speculative_num_draft_tokens or 0), int(bag.speculative_eagle_topk or 1)


def drafts_branch() -> bool:
    """Return whether draft tokens of breadth 1 may be no chain: n-grams of several lengths each add a branch."""
    return str(getattr(_drafting(), "speculative_algorithm", None)).upper() == "NGRAM"


def _drafting() -> Any:
    """SGLang's arguments about draft tokens."""
    from sglang.srt import runtime_context

    return runtime_context.get_spec() if hasattr(runtime_context, "get_spec") else runtime_context.get_server_args()


def write_location(forward_batch: Any) -> Any:
    """Return where the pool writes a step's keys and values."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if hasattr(KVWriteLoc, "for_batch"):
        return KVWriteLoc.for_batch(forward_batch)
    return KVWriteLoc(forward_batch.out_cache_loc)


def _choices() -> Any:
    for name in _CHOICES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, and lacks another
    raise ImportError(f"the interface lacks {' and '.join(_CHOICES)}")


def _default_page_size() -> None:
    """Have SGLang's default depend on the backend; where it cannot be, our backend names ``--page-size``."""
    hooks = "sglang.srt.plugins.hook_registry"
    try:
        require({hooks: ("HookRegistry", "HookType"), _OVERRIDES: (_PAGE_SIZE_DEFAULT,)})
    except ImportError as error:
        _LOGGER.warning("cubin_runtime: no default for the page size, give --page-size %d: %s", PAGE_SIZE, error)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_OVERRIDES}.{_PAGE_SIZE_DEFAULT}", _with_our_page_size, HookType.AROUND)


def _with_our_page_size(default: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    chosen = ("attention_backend", "decode_attention_backend", "prefill_attention_backend")
    if view.page_size is None and NAME in [getattr(view, name, None) for name in chosen]:
        _LOGGER.info("cubin_runtime: page_size is %d, as there are no kernels for pages of one token", PAGE_SIZE)
        return {"page_size": PAGE_SIZE}
    return default(view)
