from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.attention_operator import AttentionCall
from cubin_runtime.attention.checks import split_scale, token_stride
from cubin_runtime.attention.decode_rules import problem_values
from cubin_runtime.attention.operators.paged_decode import PAGED_DECODE, PagedDecodeOptions
from cubin_runtime.attention.paged_cache import cache_view
from cubin_runtime.errors import UsageError
from tests.attention.attention_examples import Tensors

GOOD = Tensors()
E4M3 = "float8_e4m3fn"


LONG = {"max_seq_len": 1 << 20}


def call_of(tensors: Tensors, **options: Any) -> AttentionCall:
    asked = PagedDecodeOptions(**{"max_seq_len": 1024, "softmax_scale": 0.1, **options})
    PAGED_DECODE.checked(asked)
    return AttentionCall(PAGED_DECODE.read(tensors.by_name, asked), asked)


def check(tensors: Tensors, **options: Any) -> None:
    call = call_of(tensors, **options)
    PAGED_DECODE.check(call)
    call.tensors.check_addresses()


def contiguous(shape: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, Any]:
    view = TensorView.contiguous(0x1000, dtype, shape)
    return {"dtype": dtype, "shape": shape, "strides": view.strides}


def test_the_example_passes() -> None:
    check(GOOD)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_every_page_size_passes(page_size: int) -> None:
    shape = contiguous((100, page_size, 8, 128))
    check(GOOD.changed("k_cache", **shape).changed("v_cache", **shape), max_seq_len=16 * page_size)


def test_an_hnd_cache_passes() -> None:
    shape = contiguous((100, 8, 64, 128))
    check(GOOD.changed("k_cache", **shape).changed("v_cache", **shape), kv_layout="HND")


def test_a_stride_of_a_dimension_of_one_does_not_matter() -> None:
    shape = {"shape": (100, 64, 1, 128), "strides": (64 * 128, 128, 3, 1)}
    single = GOOD.changed("k_cache", **shape).changed("v_cache", **shape)
    check(single.changed("q", **contiguous((4, 8, 128))).changed("out", **contiguous((4, 8, 128))))


@pytest.mark.parametrize("name", ["seq_lens", "page_table"])
def test_one_request_of_one_page_may_have_any_strides(name: str) -> None:
    one = {"q": (1, 64, 128), "out": (1, 64, 128)}
    tensors = GOOD.changed("seq_lens", shape=(1,)).changed("page_table", shape=(1, 1))
    for tensor, shape in one.items():
        tensors = tensors.changed(tensor, **contiguous(shape))
    strides = (5,) * len(getattr(tensors, name).shape)
    check(tensors.changed(name, strides=strides), max_seq_len=64)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("q", contiguous((4, 8192)), r"q: shape \(4, 8192\), expected \[batch"),
        ("q", contiguous((4, 2, 2, 64, 128)), r"q: shape .*, expected \[batch"),
        ("q", contiguous((0, 64, 128)), "batch of 1 or more"),
        ("q", contiguous((4, 60, 128)), "60 heads over 8 KV heads, expected a multiple of 8: 1 to 32 query"),
        ("q", contiguous((4, 264, 128)), "1 to 32 query heads"),
        ("q", contiguous((4, 64, 96)), "head dimension 96, expected one of 32, 64, 128, 256 or 512"),
        ("q", contiguous((4, 65, 64, 128)), "65 tokens per request, expected 1 to 64"),
        ("q", contiguous((4, 0, 64, 128)), "0 tokens per request, expected 1 to 64"),
        ("q", {"dtype": "float16"}, "q: dtype float16, expected bfloat16 with bfloat16 caches"),
        ("q", {"pointer": 0x1002}, "q: address 0x1002, expected a multiple of 4"),
        ("q", {"pointer": 0}, "q: address 0x0"),
        ("q", {"strides": (8192, 127, 1)}, "multiples of 2 elements"),
        ("q", {"strides": (8192, 128, 2)}, "last stride 2, expected 1"),
        ("q", {"device": 1}, "k_cache: on device 0, q is on device 1"),
        ("k_cache", contiguous((100, 64, 8, 64)), "k_cache: shape"),
        ("k_cache", contiguous((100, 48, 8, 128)), "page size 48, expected 16"),
        ("k_cache", contiguous((100, 8, 64, 128)), "page size 8, expected 16, .*; the other kv_layout makes it 64"),
        ("k_cache", contiguous((0, 64, 8, 128)), "at least one of each"),
        ("k_cache", {"dtype": "float8_e5m2"}, "dtype='float8_e5m2'"),
        ("k_cache", {"dtype": "float32"}, "k_cache: dtype float32, expected bfloat16, float16 or float8_e4m3fn"),
        ("v_cache", {"dtype": "float16"}, "v_cache: dtype float16, expected bfloat16"),
        ("k_cache", {"pointer": 0x1008}, "k_cache: address 0x1008, expected a multiple of 16"),
        ("k_cache", {"strides": (65540, 1024, 128, 1)}, "k_cache: strides .* multiples of 8"),
        ("v_cache", contiguous((99, 64, 8, 128)), "v_cache: shape"),
        ("v_cache", {"strides": (65536, -1024, 128, 1)}, "no negative stride"),
        (
            "page_table",
            contiguous((3, 16), "int32"),
            r"page_table: shape .*expected \[4, columns\] or \[4, 2, columns\]",
        ),
        ("page_table", contiguous((4, 3, 16), "int32"), "page_table: shape"),
        ("page_table", contiguous((), "int32"), r"page_table: shape \(\), expected"),
        ("page_table", contiguous((4,), "int32"), "page_table: shape"),
        ("page_table", contiguous((4, 2, 0), "int32"), "page_table: shape"),
        ("page_table", contiguous((4, 0), "int32"), "page_table: shape"),
        ("page_table", contiguous((4, 16), "int64"), "page_table: dtype int64, expected int32"),
        ("seq_lens", contiguous((5,), "int32"), "seq_lens: shape"),
        ("seq_lens", contiguous((4,), "int64"), "seq_lens: dtype int64"),
        ("out", contiguous((4, 64, 64)), "out: shape"),
        ("out", {"dtype": "float32"}, "out: dtype float32"),
        ("out", {"pointer": 0x1004}, "out: address 0x1004, expected a multiple of 8"),
        ("out", {"strides": (8194, 128, 1)}, "out: strides .* multiples of 4 elements"),
        ("out", {"strides": (0, 128, 1)}, "out: strides .* no overlapping elements"),
    ],
)
def test_a_broken_rule_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(GOOD.changed(name, **changes))


def test_a_dtype_that_an_output_was_made_with_is_that_of_the_queries() -> None:
    with pytest.raises(UsageError, match=r"^q: dtype float32, expected bfloat16 with bfloat16 caches"):
        check(GOOD.changed("q", dtype="float32").changed("out", dtype="float32"))


@pytest.mark.parametrize(
    ("lse", "words"),
    [
        (TensorView.contiguous(0x1000, "float32", (4, 8)), "lse: shape"),
        (TensorView.contiguous(0x1000, "bfloat16", (4, 64)), "lse: dtype"),
        (TensorView.contiguous(0x1000, "float32", (4, 64), device=1), "lse: on device 1"),
    ],
)
def test_a_wrong_lse_is_named(lse: TensorView, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(Tensors(lse=lse))


def test_a_transposed_lse_passes() -> None:
    check(Tensors(lse=TensorView(0x1000, "float32", (4, 64), (1, 4))))


@pytest.mark.parametrize("bound", [-1, 1025])
def test_a_bound_outside_the_table_is_named(bound: int) -> None:
    with pytest.raises(UsageError, match=f"max_seq_len={bound}: expected 0 to 1024"):
        check(GOOD, max_seq_len=bound)


@pytest.mark.parametrize("name", ["softmax_scale", "output_scale"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39])
def test_a_scale_that_is_no_finite_number_is_named(name: str, scale: float) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{name}={scale}: expected a finite number")):
        PAGED_DECODE.split_scales({**dict.fromkeys(PAGED_DECODE.scales), name: scale})


def test_more_tiles_than_the_kernel_counts_are_refused() -> None:
    sizes = {"q": (16, 64, 128), "out": (16, 64, 128), "seq_lens": (16,), "page_table": (16, 1 << 24)}
    tensors = GOOD
    for name, shape in sizes.items():
        tensors = tensors.changed(name, **contiguous(shape, getattr(tensors, name).dtype))
    with pytest.raises(UsageError, match="2147483776 tiles, expected below 2147483648"):
        check(tensors, max_seq_len=1 << 30)


def test_a_bound_whose_positions_do_not_fit_is_refused() -> None:
    tensors = GOOD.changed("page_table", **contiguous((4, 1 << 26), "int32"))
    with pytest.raises(UsageError, match="max_seq_len=1073741825: expected at most 1073741824"):
        check(tensors, max_seq_len=(1 << 30) + 1)


def test_row_tiles_count_among_the_tiles() -> None:
    wide = {name: contiguous((512, 16, 256, 128)) for name in ("q", "out")}
    tensors = GOOD.changed("page_table", **contiguous((512, 1 << 14), "int32"))
    tensors = tensors.changed("seq_lens", **contiguous((512,), "int32"))
    check(tensors.changed("q", **contiguous((512, 1, 8, 128))).changed("out", **contiguous((512, 1, 8, 128))), **LONG)
    for name, form in wide.items():
        tensors = tensors.changed(name, **form)
    with pytest.raises(UsageError, match="4295229440 tiles, expected below 2147483648"):
        check(tensors, **LONG)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_two_tokens_at_one_address_are_refused(name: str) -> None:
    tensors = replace(GOOD, lse=TensorView.contiguous(0x1000, "float32", (4, 64)))
    two = {"q": (2, 64, 128), "out": (2, 64, 128), "lse": (2, 64), "seq_lens": (2,), "page_table": (2, 16)}
    for tensor, shape in two.items():
        tensors = tensors.changed(tensor, **contiguous(shape, getattr(tensors, tensor).dtype))
    check(tensors)
    strides = (0, *getattr(tensors, name).strides[1:])
    with pytest.raises(UsageError, match=f"{name}: .* expected no overlapping elements"):
        check(tensors.changed(name, strides=strides))


@pytest.mark.parametrize(
    ("name", "strides"), [("out", (64, 4096, 1)), ("out", (4096, 64, 1)), ("lse", (1, 1)), ("lse", (63, 1))], ids=repr
)
def test_rows_that_lie_within_others_are_refused(name: str, strides: tuple[int, ...]) -> None:
    tensors = replace(GOOD, lse=TensorView.contiguous(0x1000, "float32", (4, 64)))
    with pytest.raises(UsageError, match=f"{name}: strides .* expected no overlapping elements"):
        check(tensors.changed(name, strides=strides))


@pytest.mark.parametrize("strides", [(128, 512, 1), (8192 + 8, 128, 1), (1 << 20, 256, 1)], ids=repr)
def test_rows_between_others_are_no_overlap(strides: tuple[int, ...]) -> None:
    check(GOOD.changed("out", strides=strides))


def test_tables_of_keys_and_of_values_hold_as_many_keys_each() -> None:
    tables = GOOD.changed("page_table", **contiguous((4, 2, 16), "int32"))
    check(tables, max_seq_len=1024)
    with pytest.raises(UsageError, match="max_seq_len=1025: expected 0 to 1024"):
        check(tables, max_seq_len=1025)


@pytest.mark.parametrize("page_size", [1, 17, 1000, 4096])
def test_a_page_that_holds_a_request_has_any_size(page_size: int) -> None:
    one = GOOD.changed("page_table", **contiguous((4, 1), "int32"))
    caches = contiguous((100, page_size, 8, 128))
    whole = one.changed("k_cache", **caches).changed("v_cache", **caches)
    check(whole, max_seq_len=page_size)
    two = whole.changed("page_table", **contiguous((4, 2), "int32"))
    with pytest.raises(
        UsageError, match=f"k_cache: page size {page_size}, expected 16, .* or any up to 1073741824 with"
    ):
        check(two, max_seq_len=page_size)


@pytest.mark.parametrize("position", ["Depth", "", "place"])
def test_an_unknown_position_of_drafts_is_named(position: str) -> None:
    with pytest.raises(UsageError, match=f"draft_position={position!r}: expected 'depth' or 'index'"):
        check(GOOD, draft_position=position)


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(UsageError, match="kv_layout='NDH': expected NHD or HND"):
        check(GOOD, kv_layout="NDH")


def test_a_cache_of_another_rank_is_named() -> None:
    with pytest.raises(UsageError, match=r"k_cache: shape .* expected 4 dimensions"):
        check(GOOD.changed("k_cache", **contiguous((100, 64, 1024))))


def test_an_hnd_cache_is_seen_as_nhd_without_moving() -> None:
    hnd = TensorView.contiguous(0x1000, "bfloat16", (100, 8, 64, 128))
    seen = cache_view(hnd, "k_cache", "HND")
    assert (seen.pointer, seen.shape, seen.strides) == (0x1000, (100, 64, 8, 128), (65536, 128, 8192, 1))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("kv", "q", "out"),
    [
        ("bfloat16", "bfloat16", "float16"),
        ("float16", "float16", E4M3),
        (E4M3, "bfloat16", "bfloat16"),
        (E4M3, "float16", E4M3),
        (E4M3, E4M3, "bfloat16"),
    ],
)
def test_dtypes_and_head_dimensions_pass(kv: str, q: str, out: str, head_dim: int) -> None:
    check(GOOD.of_dtypes(kv, q, out, head_dim))


@pytest.mark.parametrize(
    ("kv", "q", "words"),
    [
        ("bfloat16", E4M3, f"q: dtype {E4M3}, expected bfloat16 with bfloat16 caches"),
        ("float16", "bfloat16", "q: dtype bfloat16, expected float16 with float16 caches"),
        (E4M3, "float32", f"q: dtype float32, expected bfloat16, float16 or {E4M3} with {E4M3} caches"),
    ],
)
def test_a_query_that_its_caches_do_not_go_with_is_named(kv: str, q: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(GOOD.of_dtypes(kv, q, "bfloat16"))


@pytest.mark.parametrize(
    ("name", "unit"), [("q", "multiples of 4 "), ("k_cache", "multiples of 16 "), ("out", "multiples of 8 ")]
)
def test_strides_are_held_in_bytes(name: str, unit: str) -> None:
    eights = GOOD.of_dtypes(E4M3, E4M3, E4M3)
    strides = (getattr(eights, name).strides[0] + 2, *getattr(eights, name).strides[1:])
    with pytest.raises(UsageError, match=f"{name}: strides .*{unit}"):
        check(eights.changed(name, strides=strides))


@pytest.mark.parametrize("group", [1, 3, 8, 32])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_any_kv_heads_and_groups_up_to_32_pass(kv_heads: int, group: int) -> None:
    caches = contiguous((100, 64, kv_heads, 128))
    heads = contiguous((4, kv_heads * group, 128))
    check(GOOD.changed("k_cache", **caches).changed("v_cache", **caches).changed("q", **heads).changed("out", **heads))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_lengths_of_either_sign_pass(dtype: str) -> None:
    check(GOOD.changed("seq_lens", dtype=dtype))


def view(dtype: str, *shape: int, **changes: Any) -> TensorView:
    return replace(TensorView.contiguous(0x1000, dtype, shape), **changes)


@pytest.mark.parametrize("q_len", [1, 2, 16])
def test_draft_tokens_pass(q_len: int) -> None:
    check(GOOD.draft(q_len, lse=view("float32", 4, q_len, 64)))


def test_ragged_tokens_pass() -> None:
    check(GOOD.ragged(23, lse=view("float32", 23, 64)), max_q_len=16)


@pytest.mark.parametrize(
    "mask",
    [
        view("uint16", 4, 3, 2),
        view("uint16", 12, 2),
        view("uint32", 4, 3, 1),
        view("uint32", 12, 1),
        view("uint16", 4, 3, 2, pointer=0x1004),
    ],
)
def test_masks_by_request_or_token_pass(mask: TensorView) -> None:
    check(GOOD.draft(3, mask=mask))


@pytest.mark.parametrize(("q_len", "words"), [(32, 1), (33, 2), (64, 2)])
def test_a_mask_has_32_query_tokens_in_a_word(q_len: int, words: int) -> None:
    check(GOOD.draft(q_len, mask=view("uint32", 4, q_len, words)))
    check(GOOD.draft(q_len, mask=view("uint16", 4 * q_len, 2 * words)))
    check(GOOD.ragged(23, mask=view("uint32", 23, words)), max_q_len=q_len)
    with pytest.raises(UsageError, match="mask: shape"):
        check(GOOD.draft(q_len, mask=view("uint32", 4, q_len, words + 1)))


@pytest.mark.parametrize("mask", [view("uint16", 23, 2), view("uint32", 23, 1)])
def test_masks_of_ragged_tokens_pass(mask: TensorView) -> None:
    check(GOOD.ragged(23, mask=mask), max_q_len=8)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (view("int16", 12, 2), "mask: dtype int16, expected uint16 or uint32"),
        (view("uint16", 12, 1), r"mask: shape \(12, 1\), expected \(12, 2\) or \(4, 3, 2\)"),
        (view("uint32", 4, 4, 1), r"mask: shape \(4, 4, 1\), expected \(12, 1\) or \(4, 3, 1\)"),
        (view("uint16", 12, 2, strides=(4, 1)), r"mask: .* strides \(4, 1\), expected a contiguous tensor"),
        (view("uint16", 12, 2, pointer=0x1002), "mask: address 0x1002, expected a multiple of 4"),
        (view("uint16", 12, 2, pointer=0), "mask: address 0x0, expected a multiple of 4 that is not 0"),
        (view("uint16", 12, 2, device=1), "mask: on device 1, q is on device 0"),
    ],
)
def test_a_wrong_mask_is_named(mask: TensorView, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(GOOD.draft(3, mask=mask))


def test_a_mask_by_request_is_refused_where_requests_differ() -> None:
    with pytest.raises(UsageError, match=r"mask: shape \(4, 2, 2\), expected \(8, 2\)$"):
        check(GOOD.ragged(8, mask=view("uint16", 4, 2, 2)), max_q_len=2)


@pytest.mark.parametrize("sinks", [view("float32", 64), view("float32", 8, 8)])
def test_sinks_of_every_head_pass(sinks: TensorView) -> None:
    check(replace(GOOD, sinks=sinks))


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        (view("bfloat16", 64), "sinks: dtype bfloat16, expected float32"),
        (view("float32", 8), r"sinks: shape \(8,\), expected \(64,\) or \(8, 8\)"),
        (view("float32", 64, strides=(2,)), "sinks: .*expected a contiguous tensor"),
        (view("float32", 64, pointer=0x1002), "sinks: address 0x1002"),
    ],
)
def test_wrong_sinks_are_named(sinks: TensorView, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(replace(GOOD, sinks=sinks))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("name", ["softmax_scale", "output_scale"])
def test_a_scale_on_the_device_may_have_any_rank(name: str, shape: tuple[int, ...]) -> None:
    check(replace(GOOD, **{name: view("float32", *shape)}))


@pytest.mark.parametrize("name", ["softmax_scale", "output_scale"])
@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (view("float16", 1), "dtype float16, expected float32"),
        (view("float32", 2), r"shape \(2,\), expected one element"),
        (view("float32", 0), r"shape \(0,\), expected one element"),
        (view("float32", 1, device=2), "on device 2"),
    ],
)
def test_a_wrong_scale_on_the_device_is_named(name: str, scale: TensorView, words: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: {words}"):
        check(replace(GOOD, **{name: scale}))


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        (GOOD, {"max_q_len": 1}, "max_q_len=1: expected only with q_cu_seq_lens"),
        (GOOD.ragged(8), {}, "max_q_len: None with q_cu_seq_lens, expected a bound from 1 to 64"),
        (GOOD.ragged(8), {"max_q_len": 0}, "max_q_len=0: expected 1 to 64"),
        (GOOD.ragged(8), {"max_q_len": 65}, "max_q_len=65: expected 1 to 64"),
        (GOOD.ragged(8), {"max_q_len": 2.0}, "max_q_len=2.0: expected an integer"),
        (GOOD.ragged(0), {"max_q_len": 2}, "of 1 token or more"),
        (GOOD.draft(2, q_cu_seq_lens=view("int32", 5)), {"max_q_len": 2}, r"with q_cu_seq_lens, expected \[tokens"),
        (GOOD.ragged(8, q_cu_seq_lens=view("int32", 4)), {"max_q_len": 2}, r"q_cu_seq_lens: shape \(4,\), .* \(5,\)"),
        (GOOD.ragged(8, q_cu_seq_lens=view("int64", 5)), {"max_q_len": 2}, "q_cu_seq_lens: dtype int64"),
        (
            GOOD.ragged(8, q_cu_seq_lens=view("int32", 5, strides=(2,))),
            {"max_q_len": 2},
            "q_cu_seq_lens: .* expected a contiguous tensor",
        ),
        (GOOD.ragged(8).changed("seq_lens", **contiguous((0,), "int32")), {"max_q_len": 2}, "seq_lens: shape"),
        (GOOD.ragged(8, lse=view("float32", 4, 64)), {"max_q_len": 2}, r"lse: shape \(4, 64\), expected \(8, 64\)"),
        (GOOD.draft(2, lse=view("float32", 8, 64)), {}, r"lse: shape \(8, 64\), expected \(4, 2, 64\)"),
        (GOOD, {"window_left": -2}, r"window_left=-2: expected -1 \(none\) or more"),
        (GOOD, {"window_left": 1 << 31}, "window_left=2147483648: expected -1"),
        (GOOD, {"window_left": 1.5}, "window_left=1.5: expected an integer"),
        (GOOD, {"max_seq_len": 64.0}, "max_seq_len=64.0: expected an integer"),
    ],
)
def test_options_that_do_not_go_together_are_named(tensors: Tensors, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(tensors, **options)


def test_draft_tokens_apart_from_their_neighbours_pass_at_one_stride() -> None:
    wide = {"strides": (2 * 16384, 16384, 128, 1)}
    lse = view("float32", 4, 2, 64, strides=(2, 1, 8))
    problem_values(call_of(GOOD.draft(2, lse=lse).changed("q", **wide).changed("out", **wide)))


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_draft_tokens_that_lie_at_two_strides_are_refused(name: str) -> None:
    tensors = GOOD.draft(2, lse=view("float32", 4, 2, 64))
    request, *inner = getattr(tensors, name).strides
    call = call_of(tensors.changed(name, strides=(request * 2, *inner)))
    with pytest.raises(UsageError, match=f"{name}: strides .* expected one stride between all tokens"):
        problem_values(call)


def test_one_request_or_one_token_lies_at_one_stride_whatever_the_other_stride() -> None:
    assert token_stride("q", view("bfloat16", 1, 3, 8, 128, strides=(5, 4096, 128, 1)), 2) == 4096
    assert token_stride("q", view("bfloat16", 3, 1, 8, 128, strides=(4096, 5, 128, 1)), 2) == 4096


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, (None, None)), (2, (2.0, None)), (0.5, (0.5, None)), (np.float32(0.25), (0.25, None))],
)
def test_a_number_is_a_scale(value: Any, expected: tuple[Any, Any]) -> None:
    assert split_scale(value, "output_scale") == expected


def test_a_tensor_is_a_scale() -> None:
    tensor = view("float32", 1)
    assert split_scale(tensor, "output_scale") == (None, tensor)


def test_what_is_neither_number_nor_tensor_is_no_scale() -> None:
    with pytest.raises(UsageError, match="output_scale: got str, expected a number or a float32 CUDA tensor"):
        split_scale("2", "output_scale")
