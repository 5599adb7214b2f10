"""Attention on the published trtllm-gen kernels: calls as values, checks, plans, and running them."""

from .calls import ContextCall, DecodeCall, RaggedCall
from .operators import counter_size, plan, preload, run, workspace_size
from .plans import AttentionPlan

__all__ = [
    "AttentionPlan",
    "ContextCall",
    "DecodeCall",
    "RaggedCall",
    "counter_size",
    "plan",
    "preload",
    "run",
    "workspace_size",
]
