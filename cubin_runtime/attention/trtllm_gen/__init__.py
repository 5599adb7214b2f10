"""Attention on NVIDIA's trtllm-gen kernels: calls as values, and functions that plan, preload and run them.

A call holds views (``cubin_runtime.attention.view_of``) of the caller's tensors, which must outlive its run::

    call = DecodeCall(query=view_of(q, "q"), out=view_of(out, "out"), key=view_of(k, "k"), value=view_of(v, "v"),
                      block_tables=view_of(table, "table"), seq_lens=view_of(lengths, "lengths"),
                      max_q=1, max_kv=4096, bmm1=Scale(head_dim**-0.5))
    preload(call)
    workspace = torch.empty(workspace_size(call), dtype=torch.uint8, device="cuda")
    run(call, workspace)
"""

from ...kernels.trtllm_gen.arguments import OutScales, Sage, Scale
from ...kernels.trtllm_gen.call import Call
from ...kernels.trtllm_gen.calls import ContextCall, DecodeCall, PagedCall, RaggedCall
from .operators import counter_size, plan, preload, run, workspace_size
from .plans import AttentionPlan

__all__ = [
    "AttentionPlan",
    "Call",
    "ContextCall",
    "DecodeCall",
    "OutScales",
    "PagedCall",
    "RaggedCall",
    "Sage",
    "Scale",
    "counter_size",
    "plan",
    "preload",
    "run",
    "workspace_size",
]
