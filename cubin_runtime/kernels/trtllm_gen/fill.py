"""The 1280-byte parameter struct of a launch: every field from the problem, the kernel and its geometry."""

from __future__ import annotations

from ...artifacts.tables.metadata import KernelMeta
from ...launch.fastmoddiv import FastModDiv
from .grid import Geometry
from .problem import Problem
from .tensor_maps import TensorMaps
from .traits import int32
from .workspace_layout import partial_offset

_ADDRESS_MASK = 2**64 - 1


def fill(problem: Problem, meta: KernelMeta, geometry: Geometry, maps: TensorMaps) -> dict[str, object]:
    """The value of every field, in the struct's order; descriptors are specs or None, absent pointers None.

    Fields that the reference never sets are zero.
    """
    at = problem.pointers
    sage_q, sage_k, sage_p, sage_v = problem.sage_blocks
    return {
        "tmaQ_": maps.query,
        "tmaK_": maps.key,
        "tmaKSlidingWindowKvPool_": maps.window_pool,
        "tmaV_": maps.value,
        "tmaO_": maps.out,
        "tmaKSf_": maps.key_scales,
        "tmaVSf_": maps.value_scales,
        "logicalGridDimX": 0,
        "logicalGridDimY": 0,
        "logicalGridDimZ": 0,
        "ptrO": at.out or None,
        "ptrSfO": at.out_scales or None,
        "ptrAttentionSinks": at.sinks or None,
        "ptrCumSeqLensQ": at.cum_seq_lens_q or None,
        "ptrCumSeqLensKv": at.cum_seq_lens_kv or None,
        "ptrCustomMask": None,
        "ptrCustomMaskOffsets": None,
        "ptrDebugO": None,
        "ptrFirstSparseMaskOffsetsKv": None,
        "ptrMultiCtasKvCounter": at.counters or None,
        "ptrOutputScale": at.output_scale or None,
        "ptrPageIdxKv": at.page_table or None,
        # Without scratch this is a small number and no address: no kernel without scratch looks at it.
        "ptrPartialO": partial_address(problem, meta),
        "ptrPartialStats": at.scratch or None,
        "ptrSageAttnSfsK": at.sage_k or None,
        "ptrSageAttnSfsP": at.sage_p or None,
        "ptrSageAttnSfsQ": at.sage_q or None,
        "ptrSageAttnSfsV": at.sage_v or None,
        "ptrScaleSoftmaxLog2": at.softmax_scale_log2 or None,
        "ptrScaleSfKv": None,
        "ptrScaleSfO": None,
        "ptrSeqLensKv": at.seq_lens or None,
        "ptrSkipSoftmaxStats": None,
        "ptrSoftmaxStats": at.softmax_stats or None,
        "ptrSparseMlaTopKLens": at.top_k_lens or None,
        "mAttentionWindowSize": problem.window,
        "mBatchSize": problem.batch,
        "mChunkedAttentionSizeLog2": 0,
        "mInflateMax": 0.0,
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
        "mOutputScale": problem.output_scale,
        "mScaleSoftmaxLog2": problem.softmax_scale_log2,
        "mScaleSfKv": problem.scale_kv_scales,
        "mScaleSfO": problem.scale_out_scales,
        "mSkipSoftmaxThresholdScaleFactor": problem.skip_softmax_factor,
        "mSparseAttnTopK": problem.top_k,
        "mStartTokenIdxSfO": problem.first_out_scale_token,
        "mSumOfSeqLensQ": problem.tokens_q,
        "mSumOfSeqLensKv": problem.tokens_kv,
        "mUseBlockSparseAttention": False,
        "mUsesSharedPagedKvIdx": problem.shares_page_index,
    }


def partial_address(problem: Problem, meta: KernelMeta) -> int:
    """Where the partial outputs lie."""
    return problem.pointers.scratch + partial_offset(problem, meta) & _ADDRESS_MASK


def _log2(value: int, of_zero: int) -> int:
    return value.bit_length() - 1 if value > 0 else of_zero
