"""Gathering the queries of all heads of a group: with context parallelism each rank computes them on its own keys."""

from __future__ import annotations

from typing import Any

from ..attention.checks import integer
from ..errors import UsageError
from .collectives import all_gather, world_and_rank


class HeadGather:
    """Queries of a rank's own heads -> those of all heads of the group, through buffers made once.

    Args:
        group: a ``torch.distributed`` process group; None: the default one.
        tokens: query tokens of a step.
        own_heads: heads of each rank; rank r has heads r * own_heads to (r + 1) * own_heads - 1.
        head_dim: of the queries.
        dtype: a torch dtype.
        device: where the buffers are made.

    Raises:
        UsageError: a size is no integer of 1 or more.
    """

    def __init__(self, group: Any, *, tokens: int, own_heads: int, head_dim: int, dtype: Any, device: Any) -> None:
        import torch

        for name, size in (("tokens", tokens), ("own_heads", own_heads), ("head_dim", head_dim)):
            if integer(name, size) < 1:
                raise UsageError("expected 1 or more", argument=name, value=size)
        self._group = group
        self._world, _ = world_and_rank(group)
        self._sent = torch.empty(own_heads, tokens, head_dim, dtype=dtype, device=device)
        self._received = torch.empty(self._world * own_heads, tokens, head_dim, dtype=dtype, device=device)

    def __call__(self, q: Any) -> Any:
        """All heads of ``q``, which is ``[tokens, own_heads, head_dim]``; in stream order.

        Returns:
            ``[tokens, heads, head_dim]``, a view of the buffer that the next call overwrites. A decode reads it as it
            lies: its tokens have one stride, and so have its heads.

        Raises:
            UsageError: ``q`` has another shape.
        """
        heads, tokens, dim = self._sent.shape
        if tuple(q.shape) != (tokens, heads, dim):
            raise UsageError(f"shape {tuple(q.shape)}, expected {(tokens, heads, dim)}", argument="q")
        self._sent.copy_(q.transpose(0, 1))
        all_gather(self._received, self._sent, self._group)
        return self._received.transpose(0, 1)
