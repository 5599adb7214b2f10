"""FlashInfer's names for appending to paged caches: what reaches the kernel, and errors in its words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.append.params import APPEND_KV
from cubin_runtime.testing import StandIn
from tests.attention.copying_examples import BATCH, DIM, KV_HEADS, PAGE, PAGES, TOKENS, view

BOTH = view("bfloat16", PAGES, 2, PAGE, KV_HEADS, DIM, at=0x7F0010000000)


def call(**changes: Any) -> dict[str, Any]:
    given = {
        "append_key": view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000100000),
        "append_value": view("bfloat16", TOKENS, KV_HEADS, DIM, at=0x7F0000200000),
        "batch_indices": view("int32", TOKENS, at=0x7F0000003000),
        "positions": view("int32", TOKENS, at=0x7F0000004000),
        "paged_kv_cache": BOTH,
        "kv_indices": view("int32", 61, at=0x7F0000002000),
        "kv_indptr": view("int32", BATCH + 1, at=0x7F0000005000),
        "kv_last_page_len": view("int32", BATCH, at=0x7F0000006000),
    }
    return {**given, **changes}


def latent_call(**changes: Any) -> dict[str, Any]:
    cache = view("bfloat16", PAGES, PAGE, 576, at=0x7F0030000000)
    given = {name: value for name, value in call().items() if not name.startswith(("append", "paged"))}
    more = {
        "append_ckv": view("bfloat16", TOKENS, 512, at=0x7F0000100000),
        "append_kpe": view("bfloat16", TOKENS, 64, at=0x7F0000200000),
        "ckv_cache": replace(cache, shape=(PAGES, PAGE, 512)),
        "kpe_cache": replace(cache, pointer=cache.pointer + 1024, shape=(PAGES, PAGE, 64)),
    }
    return {**given, **more, **changes}


def sent(standin: StandIn) -> dict[str, Any]:
    return APPEND_KV.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def test_positions_and_a_ragged_table_arrive(hopper: Runtime, standin: StandIn) -> None:
    flashinfer.append_paged_kv_cache(**call())
    seen = sent(standin)
    assert (seen["positions"], seen["batch_indices"]) == (0x7F0000004000, 0x7F0000003000)
    assert (seen["page_table"], seen["page_indptr"], seen["columns"]) == (0x7F0000002000, 0x7F0000005000, 61)
    half = PAGE * KV_HEADS * DIM * 2
    assert (seen["k_cache"], seen["v_cache"]) == (BOTH.pointer, BOTH.pointer + half)
    assert (seen["k_page_stride"], seen["v_page_stride"], seen["seq_lens"]) == (2 * half, 2 * half, 0)
    assert standin.calls("cuLaunchKernelEx")[-1].seen["attributes"] == "1"  # programmatic


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_pair_is_the_same_in_both_layouts(hopper: Runtime, standin: StandIn, layout: str) -> None:
    shape = (PAGES, PAGE, KV_HEADS, DIM) if layout == "NHD" else (PAGES, KV_HEADS, PAGE, DIM)
    pair = (view("bfloat16", *shape, at=0x7F0010000000), view("bfloat16", *shape, at=0x7F0020000000))
    flashinfer.append_paged_kv_cache(**call(paged_kv_cache=pair), kv_layout=layout)
    seen = sent(standin)
    assert (seen["page_size"], seen["kv_heads"], seen["v_cache"]) == (PAGE, KV_HEADS, pair[1].pointer)


def test_latent_and_rope_may_be_columns_of_one_cache(hopper: Runtime, standin: StandIn) -> None:
    flashinfer.append_paged_mla_kv_cache(**latent_call())
    seen = sent(standin)
    assert (seen["kv_heads"], seen["k_units"], seen["v_units"]) == (1, 64, 8)
    assert (seen["k_token_stride"], seen["v_cache"] - seen["k_cache"]) == (1152, 1024)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"append_key": view("bfloat16", TOKENS, 4, DIM)},
            r"append_key: shape \(23, 4, 128\), expected \(23, 8, 128\)",
        ),
        ({"append_value": view("float16", TOKENS, KV_HEADS, DIM)}, "append_value: dtype float16, expected bfloat16"),
        ({"positions": None}, "^positions: got NoneType"),
        ({"batch_indices": None}, "^batch_indices: got NoneType"),
        ({"kv_indptr": view("int32", 1), "kv_last_page_len": view("int32", 0)}, "^kv_indptr: no requests"),
        ({"positions": view("int64", TOKENS)}, "positions: dtype int64, expected int32 or uint32"),
        ({"paged_kv_cache": (BOTH, BOTH)}, r"paged_kv_cache \(K\): shape .*, expected 4 dimensions"),
        ({"paged_kv_cache": view("bfloat16", PAGES, 3, 4, 5, 6)}, r"paged_kv_cache: shape .*, expected \[pages, 2"),
        ({"kv_indices": view("int32", 4, 16)}, r"kv_indices: shape \(4, 16\) with page_indptr"),
        ({"kv_last_page_len": view("int32", 3)}, r"kv_last_page_len: shape \(3,\) with kv_indptr of shape \(5,\)"),
        ({"kv_layout": "DNH"}, "kv_layout='DNH': expected NHD or HND"),
    ],
)
def test_errors_name_the_argument_as_flashinfer_does(hopper: Runtime, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.append_paged_kv_cache(**call(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ckv_cache": None}, "ckv_cache: got NoneType, expected a TensorView"),
        ({"append_kpe": view("bfloat16", TOKENS, 1, 64)}, r"append_kpe: shape \(23, 1, 64\), expected 2 dimensions"),
        ({"append_ckv": view("bfloat16", TOKENS, 256)}, r"append_ckv: shape \(23, 1, 256\), expected \(23, 1, 512\)"),
        ({"kpe_cache": view("bfloat16", PAGES, 32, 64)}, r"kpe_cache: shape .*, expected \(100, 64, 1, 64\)"),
    ],
)
def test_errors_of_mla_name_its_arguments(hopper: Runtime, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flashinfer.append_paged_mla_kv_cache(**latent_call(**changes))
