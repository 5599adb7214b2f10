"""An attention backend of SGLang on our operators; SGLang loads it by the entry point ``sglang.srt.plugins``.

``--attention-backend cubin_runtime`` chooses it. Nothing here imports SGLang before ``register`` is called.
"""

from __future__ import annotations

from typing import Any

NAME = "cubin_runtime"


def register() -> None:
    """Make ``cubin_runtime`` one of SGLang's attention backends; again in the same process it changes nothing.

    Raises:
        ImportError: there is no SGLang with ``sglang.srt.layers.attention.attention_registry``.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
        register_attention_backend(NAME)(_backend)


def _backend(runner: Any) -> Any:
    from .backend import CubinRuntimeAttnBackend

    return CubinRuntimeAttnBackend(runner)
