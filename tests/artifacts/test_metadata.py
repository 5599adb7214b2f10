from __future__ import annotations

import hashlib

import pytest

from cubin_runtime.artifacts.cubins.architecture import Architecture
from cubin_runtime.artifacts.tables.metadata import KernelMeta, MetadataError, parse_header
from cubin_runtime.artifacts.tables.metadata_columns import COLUMNS, IGNORED_COLUMNS

FIRST = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ8Kv128"
SECOND = "fmhaSm103aKernel_QkvE4m3OFp16H64SeparateQkvDenseVarSeqQ128Kv128"
CELLS = {
    "mDataTypeQ": "DATA_TYPE_BF16",
    "mDataTypeKv": "DATA_TYPE_BF16",
    "mDataTypeK": "DATA_TYPE_BF16",
    "mDataTypeV": "DATA_TYPE_BF16",
    "mDataTypeO": "DATA_TYPE_FP16",
    "mTileSizeQ": "8",
    "mTileSizeKv": "128",
    "mStepQ": "8",
    "mStepKv": "256",
    "mHeadDimPerCtaV": "64",
    "mHeadDimQk": "192",
    "mHeadDimV": "128",
    "mSM": "kSM_100f",
    "mCubin": "nullptr",
    "mCubinSize": "0",
    "mFuncName": f'"{FIRST}"',
    "mSharedMemBytes": "64656",
    "mThreadsPerCTA": "384",
    "mQkvLayout": "2",
    "mNumTokensPerPage": "64",
    "mMaskType": "1",
    "mKernelType": "3",
    "mTileScheduler": "1",
    "mMultiCtasKvMode": "2",
    "mNumEltsPerSageAttnBlkQ": "1",
    "mNumEltsPerSageAttnBlkK": "4",
    "mNumEltsPerSageAttnBlkP": "0",
    "mNumEltsPerSageAttnBlkV": "16",
    "mGroupsHeadsQ": "true",
    "mGroupsTokensHeadsQ": "false",
    "mReuseSmemKForV": "false",
    "m2CtaMma": "true",
    "mSparseAttn": "2",
    "mSkipsSoftmaxWhenPossible": "true",
    "mReserved1": "false",
    "mReserved2": "false",
    "sha256": '"' + "a" * 64 + '"',
}
OTHER = {"mFuncName": f'"{SECOND}"', "mSM": "kSM_103", "sha256": '"' + "b" * 64 + '"', "mHeadDimQk": "64"}


def header(*changes: dict[str, str], order: list[str] | None = None, extra: str = "") -> bytes:
    """A metadata header with one row for each dict of cells that differ from ``CELLS``."""
    names = order or list(CELLS)
    declared = "".join(f"    int {name};\n" for name in names) + extra
    rows = "".join("{ " + ", ".join({**CELLS, **c}[n] for n in names) + "},\n" for c in changes)
    return (
        f"#pragma once\nnamespace n\n{{\nstruct Info\n{{\n{declared}}};\n\n"
        f"static const Info sInfos[] = {{\n{rows}}};\n// clang-format on\n}}\n"
    ).encode()


def test_every_column_lands_in_its_field() -> None:
    assert parse_header(header({})).rows == (
        KernelMeta(
            symbol=FIRST,
            sha256="a" * 64,
            row=0,
            sm="100f",
            dtype_q="bf16",
            dtype_kv="bf16",
            dtype_k="bf16",
            dtype_v="bf16",
            dtype_o="fp16",
            tile_q=8,
            tile_kv=128,
            step_q=8,
            step_kv=256,
            head_dim_per_cta_v=64,
            head_dim_qk=192,
            head_dim_v=128,
            shared_bytes=64656,
            threads=384,
            qkv_layout=2,
            tokens_per_page=64,
            mask_type=1,
            kernel_type=3,
            tile_scheduler=1,
            multi_ctas_kv_mode=2,
            sage_block_q=1,
            sage_block_k=4,
            sage_block_p=0,
            sage_block_v=16,
            groups_heads_q=True,
            groups_tokens_heads_q=False,
            reuses_smem_k_for_v=False,
            two_cta_mma=True,
            sparse_attention=2,
            skips_softmax=True,
        ),
    )


def test_columns_are_found_by_name_wherever_they_stand() -> None:
    assert parse_header(header({}, OTHER, order=sorted(CELLS))).rows == parse_header(header({}, OTHER)).rows


def test_rows_keep_their_place_in_the_header() -> None:
    assert [row.row for row in parse_header(header(OTHER, {})).rows] == [0, 1]


def test_the_digest_of_the_header_is_kept() -> None:
    assert parse_header(header({})).header_sha256 == hashlib.sha256(header({})).hexdigest()


def without(*columns: str) -> list[str]:
    return [name for name in CELLS if name not in columns]


NEEDED = [c.name for c in COLUMNS if c.absent is None and c.stand_in not in CELLS]
ABSENT_AS_ZERO = [c.name for c in COLUMNS if c.absent is not None]


@pytest.mark.parametrize("column", NEEDED)
def test_a_missing_column_is_an_error_that_names_it(column: str) -> None:
    with pytest.raises(MetadataError, match=rf"lacks the columns {column}$"):
        parse_header(header({}, order=without(column)))


def test_a_missing_column_takes_those_along_that_it_stands_for() -> None:
    with pytest.raises(MetadataError, match=r"lacks the columns mDataTypeKv, mDataTypeK$"):
        parse_header(header({}, order=without("mDataTypeKv", "mDataTypeK")))


@pytest.mark.parametrize(("column", "field"), [("mDataTypeK", "dtype_k"), ("mDataTypeV", "dtype_v")])
def test_one_type_for_keys_and_values_stands_for_each(column: str, field: str) -> None:
    table = parse_header(header({"mDataTypeKv": "DATA_TYPE_E4M3"}, order=without(column)))
    assert getattr(table.rows[0], field) == "e4m3"
    assert (table.missing_columns, table.new_columns) == ((column,), ())


@pytest.mark.parametrize("column", ABSENT_AS_ZERO)
def test_a_feature_that_an_older_release_lacks_is_off(column: str) -> None:
    table = parse_header(header({}, order=without(column)))
    field = next(c.field for c in COLUMNS if c.name == column)
    assert (getattr(table.rows[0], field), table.missing_columns) == (0, (column,))


@pytest.mark.parametrize(("cell", "sparse"), [("true", 1), ("false", 0)])
def test_an_older_truth_value_stands_for_the_sparse_type(cell: str, sparse: int) -> None:
    names = [*without("mSparseAttn"), "mSparseMla"]
    table = parse_header(header({"mSparseMla": cell}, order=names))
    assert (table.rows[0].sparse_attention, table.missing_columns) == (sparse, ("mSparseAttn",))


def test_a_stand_in_that_is_no_truth_value_is_refused() -> None:
    names = [*without("mSparseAttn"), "mSparseMla"]
    with pytest.raises(MetadataError, match="mSparseAttn is '2'"):
        parse_header(header({"mSparseMla": "2"}, order=names))


def test_a_stand_in_beside_its_column_is_new() -> None:
    names = [*CELLS, "mSparseMla"]
    assert parse_header(header({"mSparseMla": "true"}, order=names)).new_columns == ("mSparseMla",)


def test_nothing_is_missing_from_the_known_columns() -> None:
    assert parse_header(header({})).missing_columns == ()


def test_new_columns_are_reported_by_name() -> None:
    names = [*CELLS, "mBrandNew"]
    assert parse_header(header({"mBrandNew": "7"}, order=names)).new_columns == ("mBrandNew",)


def test_the_known_columns_are_not_new() -> None:
    assert parse_header(header({})).new_columns == ()


@pytest.mark.parametrize("column", sorted(IGNORED_COLUMNS))
def test_placeholders_may_be_absent(column: str) -> None:
    assert len(parse_header(header({}, order=[name for name in CELLS if name != column])).rows) == 1


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("mTileSizeQ", "-1"),
        ("mTileSizeQ", "1e3"),
        ("mTileSizeQ", "4294967296"),
        ("mTileSizeQ", "0x10"),
        ("mDataTypeQ", "BF16"),
        ("mDataTypeQ", "DATA_TYPE_"),
        ("mSM", "100"),
        ("mSM", "kSM_"),
        ("mGroupsHeadsQ", "1"),
        ("mFuncName", '"../escape"'),
        ("mFuncName", "unquoted"),
        ("mFuncName", '""'),
        ("sha256", '"ABC"'),
    ],
)
def test_a_value_that_its_column_cannot_hold_names_line_and_column(column: str, cell: str) -> None:
    with pytest.raises(MetadataError, match=rf"meta\.h:47: {column} is"):
        parse_header(header({}, {**OTHER, column: cell}), "meta.h")


def test_a_row_of_another_width_names_its_line() -> None:
    with pytest.raises(MetadataError, match=r"meta\.h:46: 36 values for 37 columns"):
        parse_header(header({}).replace(b"{ DATA_TYPE_BF16, ", b"{ "), "meta.h")


def test_a_symbol_given_twice_names_it() -> None:
    with pytest.raises(MetadataError, match=f"symbol {FIRST} occurs twice"):
        parse_header(header({}, {}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace(b"struct Info", b"union Info"), "no struct"),
        (lambda text: text.replace(b"sInfos[]", b"sInfos"), "no array"),
        (lambda text: text[: text.rindex(b"};")], "is not terminated"),
        (lambda text: text.replace(b"{ DATA", b"< DATA"), "one row in braces"),
        (lambda text: text + b"\xff", "not ASCII"),
        (lambda text: text.replace(b"int mReserved2", b"int mReserved1"), "declared twice"),
        (lambda text: text.replace(b"int mReserved2", b"int ?"), "cannot read the declaration"),
        (lambda _: b"", "no struct"),
    ],
)
def test_a_header_of_another_shape_is_refused(damage, message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        parse_header(damage(header({})))


def test_the_file_is_named_after_the_symbol() -> None:
    assert parse_header(header({})).rows[0].file == f"{FIRST}.cubin"


def test_a_family_kernel_is_declared_for_its_family() -> None:
    assert parse_header(header({})).rows[0].architecture == Architecture(100, "f", declared=True)


def test_an_exact_kernel_is_declared_for_its_device() -> None:
    assert parse_header(header(OTHER)).rows[0].architecture == Architecture(103, "a", declared=True)


@pytest.mark.parametrize("sm", ["kSM_100", "kSM_103f", "kSM_103"])
def test_an_sm_that_the_file_name_contradicts_establishes_nothing(sm: str) -> None:
    row = parse_header(header({"mSM": sm})).rows[0]
    with pytest.raises(MetadataError, match="file name another"):
        _ = row.architecture
