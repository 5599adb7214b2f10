"""The parameter struct of NVIDIA's trtllm-gen FMHA kernels, release flashinfer-cubin 0.6.13: 1280 bytes.

Offsets are those of the reference launcher, as a C++ compiler places them; each cubin's ELF confirms the size. The
kernels take the struct by value, with zeros as padding. Lengths are in tokens; a null pointer turns its feature off.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...launch.structs import Field, StructLayout

_DESCRIPTORS = (
    ("tmaQ_", "queries"),
    ("tmaK_", "keys, or the pool of pages"),
    ("tmaKSlidingWindowKvPool_", "keys of the separate pool for sliding-window layers"),
    ("tmaV_", "values, or the pool of pages"),
    ("tmaO_", "output"),
    ("tmaKSf_", "block scales of FP4 keys"),
    ("tmaVSf_", "block scales of FP4 values"),
)
_POINTERS = (
    ("ptrO", "output"),
    ("ptrSfO", "block scales of an FP4 output"),
    ("ptrAttentionSinks", "float32 a head: logits that only enter the softmax denominator"),
    ("ptrCumSeqLensQ", "int32 [batch + 1]: running sum of query lengths"),
    ("ptrCumSeqLensKv", "int32 [batch + 1]: running sum of KV lengths"),
    ("ptrCustomMask", "packed mask words; the reference launcher leaves it zero"),
    ("ptrCustomMaskOffsets", "where each sequence's mask begins; the reference launcher leaves it zero"),
    ("ptrDebugO", "debug output; the reference launcher leaves it zero"),
    (
        "ptrFirstSparseMaskOffsetsKv",
        "first KV position that a sparse mask governs; the reference launcher leaves it zero",
    ),
    (
        "ptrMultiCtasKvCounter",
        "int32 counters of finished splits; zero before first use, reset by the kernel",
    ),
    ("ptrOutputScale", "float32 on the device that replaces mOutputScale"),
    ("ptrPageIdxKv", "int32 page table"),
    ("ptrPartialO", "scratch: partial outputs of the splits"),
    ("ptrPartialStats", "scratch: partial softmax maxima and sums of the splits"),
    ("ptrSageAttnSfsK", "SageAttention scales of K"),
    ("ptrSageAttnSfsP", "SageAttention scales of P"),
    ("ptrSageAttnSfsQ", "SageAttention scales of Q"),
    ("ptrSageAttnSfsV", "SageAttention scales of V"),
    ("ptrScaleSoftmaxLog2", "float32 on the device that replaces mScaleSoftmaxLog2"),
    ("ptrScaleSfKv", "scale of FP4 keys and values on the device; the reference launcher leaves it zero"),
    ("ptrScaleSfO", "scale of an FP4 output on the device; the reference launcher leaves it zero"),
    ("ptrSeqLensKv", "int32 [batch]: KV lengths"),
    ("ptrSkipSoftmaxStats", "statistics of skip-softmax; the reference launcher leaves it zero"),
    ("ptrSoftmaxStats", "float32 pairs, maximum and sum of each row, from which the LSE is made"),
    ("ptrSparseMlaTopKLens", "int32 a token: how many of its sparse indices are valid"),
)
_NUMBERS = (
    ("mAttentionWindowSize", "int32", "visible tokens up to the row's own; 2**31 - 1 is no window"),
    ("mBatchSize", "int32", "sequences"),
    ("mChunkedAttentionSizeLog2", "int32", "log2 of the attention chunk; the reference launcher leaves it zero"),
    ("mInflateMax", "float", "not known; the reference launcher leaves it zero"),
    ("mLogNumEltsPerSageAttnBlkK", "int32", "log2 of the elements that share a scale, K"),
    ("mLogNumEltsPerSageAttnBlkP", "int32", "log2 of the elements that share a scale, P"),
    ("mLogNumEltsPerSageAttnBlkQ", "int32", "log2 of the elements that share a scale, Q"),
    ("mLogNumEltsPerSageAttnBlkV", "int32", "log2 of the elements that share a scale, V"),
    ("mMaxSeqLenQ", "int32", "bound of the query lengths"),
    ("mMaxSeqLenKv", "int32", "bound of the KV lengths"),
    ("mMaxNumCtasQ", "int32", "CTAs along the queries of one sequence"),
    ("mMaxNumCtasKv", "int32", "CTAs that share one sequence's KV"),
    ("mMaxNumPagesPerSeqKv", "int32", "row length of the page table"),
    ("mNumHeadsKv", "int32", "KV heads"),
    ("mNumHeadsQ", "int32", "query heads"),
    ("mNumHeadsQPerKv", "int32", "query heads that share a KV head"),
    ("mNumHeadsQPerKvDivisor", "FastModDiv", "division by mNumHeadsQPerKv"),
    ("mNumHiddenEltsO", "int64", "query heads times the head dimension of Q and K"),
    ("mNumPagesInMemPool", "int32", "pages in the pool; doubled where K and V interleave"),
    ("mNumTokensPerCtaQ", "int32", "query tokens of one CTA"),
    ("mNumTokensPerPageLog2", "int32", "log2 of the page size; -1 when KV is not paged"),
    ("mReshapeFactorKv", "int32", "how many KV rows the descriptor folds into one"),
    ("mOutputScale", "float", "multiplies the output"),
    ("mScaleSoftmaxLog2", "float", "softmax scale times log2 e"),
    ("mScaleSfKv", "float", "scale of FP4 block scales, keys and values"),
    ("mScaleSfO", "float", "scale of FP4 block scales, output; -1 where unused"),
    ("mSkipSoftmaxThresholdScaleFactor", "float", "skip-softmax threshold times the length; 0 is off"),
    ("mSparseAttnTopK", "int32", "KV tokens that sparse attention visits a query"),
    ("mStartTokenIdxSfO", "int32", "first token of the FP4 output's block scales"),
    ("mSumOfSeqLensQ", "int32", "query tokens in all"),
    ("mSumOfSeqLensKv", "int32", "KV tokens in all; 0 for paged KV"),
    ("mUseBlockSparseAttention", "bool", "block-sparse attention is on; the reference launcher leaves it zero"),
    ("mUsesSharedPagedKvIdx", "bool", "K and V share one page table"),
)

KERNEL_PARAMS = StructLayout.declare(
    "KernelParams",
    [
        *(Field(name, "CUtensorMap", f"TMA descriptor: {what}") for name, what in _DESCRIPTORS),
        Field("logicalGridDimX", "int32", "logical grid x; the reference launcher leaves it zero"),
        Field("logicalGridDimY", "int32", "logical grid y; the reference launcher leaves it zero"),
        Field("logicalGridDimZ", "int32", "logical grid z; the reference launcher leaves it zero"),
        *(Field(name, "ptr", what) for name, what in _POINTERS),
        *(Field(*row) for row in _NUMBERS),
    ],
    tensor_map_alignment=128,
)
LAYOUTS: Mapping[str, StructLayout] = {KERNEL_PARAMS.name: KERNEL_PARAMS}
