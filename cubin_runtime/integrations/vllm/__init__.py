"""An attention backend of vLLM on our operators; vLLM loads it by the entry point ``vllm.general_plugins``.

``--attention-backend CUBIN_RUNTIME`` chooses it. Nothing here imports vLLM before ``register`` is called.
"""

from __future__ import annotations

NAME = "CUBIN_RUNTIME"


def register() -> None:
    """Make ``CUBIN_RUNTIME`` one of vLLM's attention backends; again in the same process it changes nothing.

    Raises:
        ImportError: there is no vLLM with ``vllm.v1.attention.backends.registry``.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.backend.CubinRuntimeBackend")
