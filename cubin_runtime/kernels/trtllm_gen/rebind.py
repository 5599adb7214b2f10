"""A plan at other addresses: what changes from call to call of one form, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...launch.tensormap import TensorMapSpec
from .fill import partial_address
from .plan import Planned
from .problem import Problem
from .reduction import lse_after

# Descriptor -> the address that it describes, by its name in ``Pointers``.
DESCRIPTORS: Mapping[str, str] = {
    "tmaQ_": "query",
    "tmaK_": "key",
    "tmaKSlidingWindowKvPool_": "window_pool",
    "tmaV_": "value",
    "tmaO_": "out",
    "tmaKSf_": "key_scales",
    "tmaVSf_": "value_scales",
}
POINTERS: Mapping[str, str] = {
    "ptrO": "out",
    "ptrSfO": "out_scales",
    "ptrAttentionSinks": "sinks",
    "ptrCumSeqLensQ": "cum_seq_lens_q",
    "ptrCumSeqLensKv": "cum_seq_lens_kv",
    "ptrMultiCtasKvCounter": "counters",
    "ptrOutputScale": "output_scale",
    "ptrPageIdxKv": "page_table",
    "ptrPartialStats": "scratch",
    "ptrSageAttnSfsK": "sage_k",
    "ptrSageAttnSfsP": "sage_p",
    "ptrSageAttnSfsQ": "sage_q",
    "ptrSageAttnSfsV": "sage_v",
    "ptrScaleSoftmaxLog2": "softmax_scale_log2",
    "ptrSeqLensKv": "seq_lens",
    "ptrSoftmaxStats": "softmax_stats",
    "ptrSparseMlaTopKLens": "top_k_lens",
}
# Numbers that a call may change without another plan, by their names in ``Problem``.
NUMBERS: Mapping[str, str] = {
    "mOutputScale": "output_scale",
    "mScaleSoftmaxLog2": "softmax_scale_log2",
    "mScaleSfO": "scale_out_scales",
    "mStartTokenIdxSfO": "first_out_scale_token",
}


def moved_to(planned: Planned, problem: Problem) -> Planned:
    """``planned`` for a call of the same form: other addresses and scales, the same kernel, grid and sizes.

    ``values`` of the result hold only the fields that may differ.
    """
    at = problem.pointers
    values: dict[str, object] = {}
    for name, source in DESCRIPTORS.items():
        spec = planned.values[name]
        if isinstance(spec, TensorMapSpec):
            values[name] = spec.moved(getattr(at, source))
    for name, source in POINTERS.items():
        values[name] = getattr(at, source)
    for name, source in NUMBERS.items():
        values[name] = getattr(problem, source)
    values["ptrPartialO"] = partial_address(problem, planned.meta)
    return replace(planned, problem=problem, values=values, lse=lse_after(problem))
