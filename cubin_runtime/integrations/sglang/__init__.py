"""Attention backends of SGLang on our operators; SGLang loads them by the entry point ``sglang.srt.plugins``.

``--attention-backend cubin_runtime`` chooses that for the model. Nothing here imports SGLang before ``register`` is
called.
"""

from __future__ import annotations

from typing import Any

from ..interface import register_safely
from .versions import NAME, add_backend, check_interface, has_lists

__all__ = ["NAME", "register"]


def register() -> None:
    """Make ``cubin_runtime`` one of SGLang's attention backends; again in the same process it changes nothing.

    An SGLang whose interface does not fit keeps its own backends, and one warning says what is missing.
    """
    register_safely("sglang", _register)


def _register() -> None:
    check_interface()
    add_backend(_backend)


def _backend(runner: Any) -> Any:
    if getattr(runner, "use_mla_backend", False) and has_lists(runner):
        from .sparse_mla_backend import CubinRuntimeSparseMlaAttnBackend

        return CubinRuntimeSparseMlaAttnBackend(runner)
    if getattr(runner, "use_mla_backend", False):
        from .mla_backend import CubinRuntimeMlaAttnBackend

        return CubinRuntimeMlaAttnBackend(runner)
    from .backend import CubinRuntimeAttnBackend

    return CubinRuntimeAttnBackend(runner)
