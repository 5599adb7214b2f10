"""The class behind the one name that vLLM's registry has for us: ``Backend`` is that for the model being loaded.

vLLM asks for the class when it makes a layer, with the model's configuration as the current one, and goes on with the
class's own path.
"""

from __future__ import annotations

from typing import Any

from .versions import lists_width


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        if lists_width(config.model_config) is not None:
            from .sparse_mla_backend import CubinRuntimeSparseMlaBackend

            return CubinRuntimeSparseMlaBackend
        from .mla_backend import CubinRuntimeMlaBackend

        return CubinRuntimeMlaBackend
    from .backend import CubinRuntimeBackend

    return CubinRuntimeBackend
