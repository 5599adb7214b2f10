"""The columns of a trtllm-gen kernel table: their names in the header, our fields, and the lookup key of a kernel."""

from __future__ import annotations

from collections.abc import Mapping

from ...values import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """The conversion of one column of the header to one field: ``kind`` is dtype, sm, uint, bool, symbol or digest.

    ``stand_in`` is the column that says the same in releases that do not have this one, ``absent`` the cell that
    stands for it there.
    """

    name: str
    field: str
    kind: str
    stand_in: str | None = None
    absent: str | None = None


# The one table that ties the header's names to ours.
COLUMNS = (
    Column("mFuncName", "symbol", "symbol"),
    Column("sha256", "sha256", "digest"),
    Column("mSM", "sm", "sm"),
    Column("mDataTypeQ", "dtype_q", "dtype"),
    Column("mDataTypeKv", "dtype_kv", "dtype"),
    Column("mDataTypeK", "dtype_k", "dtype", stand_in="mDataTypeKv"),
    Column("mDataTypeV", "dtype_v", "dtype", stand_in="mDataTypeKv"),
    Column("mDataTypeO", "dtype_o", "dtype"),
    Column("mTileSizeQ", "tile_q", "uint"),
    Column("mTileSizeKv", "tile_kv", "uint"),
    Column("mStepQ", "step_q", "uint"),
    Column("mStepKv", "step_kv", "uint"),
    Column("mHeadDimPerCtaV", "head_dim_per_cta_v", "uint"),
    Column("mHeadDimQk", "head_dim_qk", "uint"),
    Column("mHeadDimV", "head_dim_v", "uint"),
    Column("mSharedMemBytes", "shared_bytes", "uint"),
    Column("mThreadsPerCTA", "threads", "uint"),
    Column("mQkvLayout", "qkv_layout", "uint"),
    Column("mNumTokensPerPage", "tokens_per_page", "uint"),
    Column("mMaskType", "mask_type", "uint"),
    Column("mKernelType", "kernel_type", "uint"),
    Column("mTileScheduler", "tile_scheduler", "uint"),
    Column("mMultiCtasKvMode", "multi_ctas_kv_mode", "uint"),
    Column("mNumEltsPerSageAttnBlkQ", "sage_block_q", "uint", absent="0"),
    Column("mNumEltsPerSageAttnBlkK", "sage_block_k", "uint", absent="0"),
    Column("mNumEltsPerSageAttnBlkP", "sage_block_p", "uint", absent="0"),
    Column("mNumEltsPerSageAttnBlkV", "sage_block_v", "uint", absent="0"),
    Column("mGroupsHeadsQ", "groups_heads_q", "bool"),
    Column("mGroupsTokensHeadsQ", "groups_tokens_heads_q", "bool"),
    Column("mReuseSmemKForV", "reuses_smem_k_for_v", "bool"),
    Column("m2CtaMma", "two_cta_mma", "bool"),
    Column("mSparseAttn", "sparse_attention", "uint", stand_in="mSparseMla"),
    Column("mSkipsSoftmaxWhenPossible", "skips_softmax", "bool"),
)
# The traits by which a launcher looks up a kernel, words first; together they identify one kernel of a release.
SELECTION_WORDS = 5
SELECTION_FIELDS = (
    "sm",
    "dtype_q",
    "dtype_k",
    "dtype_v",
    "dtype_o",
    "sage_block_q",
    "sage_block_k",
    "sage_block_p",
    "sage_block_v",
    "qkv_layout",
    "mask_type",
    "kernel_type",
    "tile_scheduler",
    "multi_ctas_kv_mode",
    "head_dim_per_cta_v",
    "head_dim_qk",
    "head_dim_v",
    "tile_q",
    "tile_kv",
    "tokens_per_page",
    "takes_any_page",
    "reuses_smem_k_for_v",
    "two_cta_mma",
    "sparse_attention",
    "skips_softmax",
)
# Placeholders for embedding a cubin in C++, and columns that the publisher reserves.
IGNORED_COLUMNS = frozenset({"mCubin", "mCubinSize", "mReserved1", "mReserved2"})
COLUMN_OF_FIELD: Mapping[str, Column] = {column.field: column for column in COLUMNS}
