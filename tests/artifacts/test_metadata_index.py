from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from cubin_runtime.artifacts.tables.metadata import KernelMeta, KernelTable, MetadataError
from cubin_runtime.artifacts.tables.metadata_index import INDEX_FORMAT, MetadataIndex, build_index
from cubin_runtime.errors import MissingError

ROW = KernelMeta(
    symbol="fmhaSm100fKernel_M",
    sha256="0123456789abcdef" * 4,
    row=0,
    sm="100f",
    dtype_q="bf16",
    dtype_kv="e4m3",
    dtype_k="e4m3",
    dtype_v="e4m3",
    dtype_o="fp16",
    tile_q=8,
    tile_kv=128,
    step_q=16,
    step_kv=256,
    head_dim_per_cta_v=256,
    head_dim_qk=576,
    head_dim_v=512,
    shared_bytes=224480,
    threads=384,
    qkv_layout=2,
    tokens_per_page=64,
    mask_type=1,
    kernel_type=2,
    tile_scheduler=0,
    multi_ctas_kv_mode=3,
    sage_block_q=0,
    sage_block_k=4,
    sage_block_p=0,
    sage_block_v=1,
    groups_heads_q=True,
    groups_tokens_heads_q=False,
    reuses_smem_k_for_v=True,
    two_cta_mma=False,
    sparse_attention=2,
    skips_softmax=True,
)
ROWS = (
    ROW,
    replace(ROW, symbol="fmhaSm103aKernel_Z", row=1, sm="103", dtype_q="e2m1", shared_bytes=(1 << 31) - 1),
    replace(ROW, symbol="fmhaSm100aKernel_A", row=2, sm="100", threads=512, skips_softmax=False),
)


def table(*rows: KernelMeta, new: tuple[str, ...] = ()) -> KernelTable:
    return KernelTable(rows, new, "f" * 64)


def reworded(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    assert len(old) == len(new)
    return data.replace(old, new)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_comes_back_as_it_went_in(row: KernelMeta) -> None:
    assert MetadataIndex(build_index(table(*ROWS))).find(row.symbol) == row


def test_walking_gives_all_rows_by_symbol() -> None:
    assert list(MetadataIndex(build_index(table(*ROWS)))) == sorted(ROWS, key=lambda row: row.symbol)


def test_equal_tables_give_equal_bytes() -> None:
    assert build_index(table(*ROWS)) == build_index(table(*ROWS))


def test_another_header_digest_gives_other_bytes() -> None:
    assert build_index(table(*ROWS)) != build_index(replace(table(*ROWS), header_sha256="e" * 64))


def test_new_columns_are_still_known_from_the_index() -> None:
    assert MetadataIndex(build_index(table(ROW, new=("mNew",)))).new_columns == ("mNew",)


def test_missing_columns_are_still_known_from_the_index() -> None:
    lacking = replace(table(ROW), missing_columns=("mOld",))
    assert MetadataIndex(build_index(lacking)).missing_columns == ("mOld",)


def test_the_index_knows_the_header_it_came_from() -> None:
    assert MetadataIndex(build_index(table(ROW))).header_sha256 == "f" * 64


@pytest.mark.parametrize("symbol", ["", "fmhaSm100fKernel_", "fmhaSm100fKernel_MM", "zzz", "é"])
def test_an_absent_symbol_is_an_error_that_names_it(symbol: str) -> None:
    with pytest.raises(MissingError, match="among its 3"):
        MetadataIndex(build_index(table(*ROWS))).find(symbol)


def test_membership_is_by_symbol() -> None:
    index = MetadataIndex(build_index(table(*ROWS)))
    assert ROW.symbol in index
    assert "fmhaSm100fKernel_N" not in index


def test_length_is_the_number_of_rows() -> None:
    assert len(MetadataIndex(build_index(table(*ROWS)))) == 3


def test_an_empty_table_has_an_index_too() -> None:
    assert list(MetadataIndex(build_index(table()))) == []


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_outside_is_an_index_error(place: int) -> None:
    with pytest.raises(IndexError):
        MetadataIndex(build_index(table(*ROWS))).at(place)


@pytest.mark.parametrize("size", [0, 7, 27, 200, -1])
def test_a_cut_index_is_refused(size: int) -> None:
    with pytest.raises(MetadataError):
        MetadataIndex(build_index(table(*ROWS))[:size])


def test_another_format_version_is_refused_by_number() -> None:
    data = bytearray(build_index(table(ROW)))
    data[8] = INDEX_FORMAT + 1
    with pytest.raises(MetadataError, match=f"format {INDEX_FORMAT + 1}"):
        MetadataIndex(bytes(data))


def test_other_columns_are_refused() -> None:
    with pytest.raises(MetadataError, match="columns"):
        MetadataIndex(reworded(build_index(table(ROW)), b'"tile_kv"', b'"tile_xy"'))


def test_a_description_that_is_no_json_is_refused() -> None:
    with pytest.raises(MetadataError, match="description"):
        MetadataIndex(reworded(build_index(table(ROW)), b'{"columns"', b'["columns"'))


def test_a_word_outside_the_list_is_refused() -> None:
    data = bytearray(build_index(table(ROW)))
    data[-1 - len(json.dumps(None))] = 1
    listed = reworded(bytes(data), b'["bf16","e4m3","fp16"]', b'["bf16"              ]')
    with pytest.raises(MetadataError, match="word"):
        MetadataIndex(listed).find(ROW.symbol)


def test_the_layout_is_the_one_that_pins_were_made_with() -> None:
    digest = hashlib.sha256(build_index(table(*ROWS))).hexdigest()
    assert digest == "b12ef2915e280155ec6d540a893dee0935a9efc8e48792a6a627d5e68b7d127c"
