"""Attention over several GPUs, on ``torch.distributed``: its heads or its keys are divided between ranks."""

from __future__ import annotations

from .context_merge import ContextParallelMerge, Step
from .head_gather import HeadGather
from .heads import HeadShare
from .partition import KvPartition

__all__ = ["ContextParallelMerge", "HeadGather", "HeadShare", "KvPartition", "Step"]
