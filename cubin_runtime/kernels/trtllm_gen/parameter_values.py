"""Values of the 1280-byte parameter struct: those that a decision fixes, and those that each call binds."""

from __future__ import annotations

from collections.abc import Mapping

from ...launch.structs import FastModDiv
from .arithmetic import int32
from .grid import Geometry
from .params import KERNEL_PARAMS
from .problem import Bindings, Problem
from .tensor_maps import TensorMaps

# TMA descriptor -> the tensor that it describes, as ``TensorMaps`` and ``Bindings`` name it.
DESCRIPTORS: Mapping[str, str] = {
    "tmaQ_": "query",
    "tmaK_": "key",
    "tmaKSlidingWindowKvPool_": "window_pool",
    "tmaV_": "value",
    "tmaO_": "out",
    "tmaKSf_": "key_scales",
    "tmaVSf_": "value_scales",
}
# Any other field that each call binds -> the value that it takes, as ``Bindings`` names it.
_SCALARS: Mapping[str, str] = {
    "ptrO": "out",
    "ptrSfO": "out_scales",
    "ptrAttentionSinks": "sinks",
    "ptrCumSeqLensQ": "cum_seq_lens_q",
    "ptrCumSeqLensKv": "cum_seq_lens_kv",
    "ptrMultiCtasKvCounter": "counters",
    "ptrOutputScale": "device_output_scale",
    "ptrPageIdxKv": "page_table",
    "ptrPartialO": "partial_out",
    "ptrPartialStats": "scratch",
    "ptrSageAttnSfsK": "sage_k",
    "ptrSageAttnSfsP": "sage_p",
    "ptrSageAttnSfsQ": "sage_q",
    "ptrSageAttnSfsV": "sage_v",
    "ptrScaleSoftmaxLog2": "device_softmax_scale_log2",
    "ptrSeqLensKv": "seq_lens",
    "ptrSoftmaxStats": "softmax_stats",
    "ptrSparseMlaTopKLens": "top_k_lens",
    "mOutputScale": "output_scale",
    "mScaleSoftmaxLog2": "softmax_scale_log2",
    "mScaleSfO": "scale_out_scales",
    "mStartTokenIdxSfO": "first_out_scale_token",
}
INPUTS: Mapping[str, str] = {**DESCRIPTORS, **_SCALARS}
_EMPTY: Mapping[str, object] = {"CUtensorMap": None, "bool": False, "float": 0.0}
_UNSET: Mapping[str, object] = {member.name: _EMPTY.get(member.type, 0) for member in KERNEL_PARAMS.fields}


def parameter_values(problem: Problem, geometry: Geometry, maps: TensorMaps, bindings: Bindings) -> dict[str, object]:
    """The value of every field, in the struct's order.

    Descriptors are specs, or None if they are not built. Null pointers and fields that the reference launcher never
    sets are 0.
    """
    sage_q, sage_k, sage_p, sage_v = problem.sage_blocks
    decided: dict[str, object] = {
        "mAttentionWindowSize": problem.window,
        "mBatchSize": problem.batch,
        "mLogNumEltsPerSageAttnBlkK": _log2(sage_k, 0),
        "mLogNumEltsPerSageAttnBlkP": _log2(sage_p, 0),
        "mLogNumEltsPerSageAttnBlkQ": _log2(sage_q, 0),
        "mLogNumEltsPerSageAttnBlkV": _log2(sage_v, 0),
        "mMaxSeqLenQ": problem.max_q,
        "mMaxSeqLenKv": problem.max_kv,
        "mMaxNumCtasQ": geometry.ctas_q,
        "mMaxNumCtasKv": geometry.ctas_kv,
        "mMaxNumPagesPerSeqKv": problem.table_width,
        "mNumHeadsKv": problem.heads_kv,
        "mNumHeadsQ": problem.heads_q,
        "mNumHeadsQPerKv": problem.group,
        "mNumHeadsQPerKvDivisor": FastModDiv.of(problem.group),
        "mNumHiddenEltsO": int32(problem.heads_q * problem.head_dim_qk),
        "mNumPagesInMemPool": problem.pages,
        "mNumTokensPerCtaQ": maps.tokens_per_cta,
        "mNumTokensPerPageLog2": _log2(problem.page, -1),
        "mReshapeFactorKv": maps.reshape_factor,
        "mScaleSfKv": problem.scale_kv_scales,
        "mSkipSoftmaxThresholdScaleFactor": problem.skip_softmax_factor,
        "mSparseAttnTopK": problem.top_k,
        "mSumOfSeqLensQ": problem.tokens_q,
        "mSumOfSeqLensKv": problem.tokens_kv,
        "mUsesSharedPagedKvIdx": problem.shares_page_index,
    }
    described = {field: getattr(maps, tensor) for field, tensor in DESCRIPTORS.items()}
    return {**_UNSET, **described, **decided, **{field: getattr(bindings, name) for field, name in _SCALARS.items()}}


def _log2(value: int, of_zero: int) -> int:
    return value.bit_length() - 1 if value > 0 else of_zero
