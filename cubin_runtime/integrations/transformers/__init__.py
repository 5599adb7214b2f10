"""Attention of transformers' models on our operators, through its ``AttentionInterface``.

``register()`` makes the name ``cubin_runtime`` an attention implementation::

    from cubin_runtime.integrations.transformers import register

    model.set_attn_implementation(register())

transformers 5 with torch, forward only. transformers is imported by ``register`` alone.
"""

from __future__ import annotations

from .registration import register

__all__ = ["register"]
