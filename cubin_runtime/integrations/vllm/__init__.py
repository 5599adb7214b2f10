"""Attention backends of vLLM on our operators; vLLM loads them by the entry point ``vllm.general_plugins``.

``--attention-backend CUBIN_RUNTIME`` chooses them, ``--attention-backend CUSTOM`` before vLLM 0.32, whose registry
takes no new names; whether the model has MLA decides between them. Nothing here imports vLLM before ``register`` is
called.
"""

from __future__ import annotations

from ..interface import register_safely
from .versions import NAME, add_backend, check_interface

__all__ = ["NAME", "register"]


def register() -> None:
    """Make our backends one of vLLM's names; again in the same process it changes nothing.

    A vLLM whose interface does not fit keeps its own backends, and one warning says what is missing.
    """
    register_safely("vllm", _register)


def _register() -> None:
    check_interface()
    add_backend(f"{__name__}.selection.Backend")
