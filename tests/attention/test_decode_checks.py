from __future__ import annotations

from typing import Any

import pytest
from attention_examples import Tensors

from cubin_runtime.attention import TensorView
from cubin_runtime.attention.decode_checks import DecodeOptions, check_decode
from cubin_runtime.attention.decode_tensors import cache_view, decode_tensors
from cubin_runtime.errors import UsageError

GOOD = Tensors()


def check(tensors: Tensors, **options: Any) -> None:
    asked = DecodeOptions(**{"max_seq_len": 1024, "softmax_scale": 0.1, **options})
    check_decode(decode_tensors(tensors.all, asked.kv_layout), asked)


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


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("q", contiguous((4, 8192)), r"q: shape \(4, 8192\), expected \[batch"),
        ("q", contiguous((4, 2, 2, 64, 128)), r"q: shape .*, expected \[batch"),
        ("q", contiguous((0, 64, 128)), "batch of 1 or more"),
        ("q", contiguous((4, 60, 128)), "60 heads over 8 KV heads"),
        ("q", contiguous((4, 264, 128)), "1 to 32 query heads"),
        ("q", contiguous((4, 64, 96)), "head dimension 96, expected one of 32, 64, 128, 256 or 512"),
        ("q", contiguous((4, 17, 64, 128)), "17 tokens a request, expected 1 to 16"),
        ("q", contiguous((4, 0, 64, 128)), "0 tokens a request, expected 1 to 16"),
        ("q", {"dtype": "float16"}, "q: dtype float16, expected bfloat16 with bfloat16 caches"),
        ("q", {"pointer": 0x1002}, "q: address 0x1002, expected a multiple of 4"),
        ("q", {"pointer": 0}, "q: address 0x0"),
        ("q", {"strides": (8192, 127, 1)}, "multiples of 2 elements"),
        ("q", {"strides": (8192, 128, 2)}, "last stride 2, expected 1"),
        ("q", {"device": 1}, "k_cache: on device 0, q is on device 1"),
        ("k_cache", contiguous((100, 64, 8, 64)), "k_cache: shape"),
        ("k_cache", contiguous((100, 48, 8, 128)), "page size 48, expected one of 16"),
        ("k_cache", contiguous((0, 64, 8, 128)), "at least one of each"),
        ("k_cache", {"dtype": "float8_e5m2"}, "dtype='float8_e5m2'"),
        ("k_cache", {"dtype": "float32"}, "k_cache: dtype float32, expected bfloat16, float16 or float8_e4m3fn"),
        ("v_cache", {"dtype": "float16"}, "v_cache: dtype float16, expected bfloat16"),
        ("k_cache", {"pointer": 0x1008}, "k_cache: address 0x1008, expected a multiple of 16"),
        ("k_cache", {"strides": (65540, 1024, 128, 1)}, "k_cache: strides .* multiples of 8"),
        ("v_cache", contiguous((99, 64, 8, 128)), "v_cache: shape"),
        ("v_cache", {"strides": (65536, -1024, 128, 1)}, "none below 0"),
        ("page_table", contiguous((3, 16), "int32"), "page_table: shape"),
        ("page_table", contiguous((4, 0), "int32"), "page_table: shape"),
        ("page_table", contiguous((4, 16), "int64"), "page_table: dtype int64, expected int32"),
        ("seq_lens", contiguous((5,), "int32"), "seq_lens: shape"),
        ("seq_lens", contiguous((4,), "int64"), "seq_lens: dtype int64"),
        ("out", contiguous((4, 64, 64)), "out: shape"),
        ("out", {"dtype": "float32"}, "out: dtype float32"),
        ("out", {"pointer": 0x1004}, "out: address 0x1004, expected a multiple of 8"),
        ("out", {"strides": (8194, 128, 1)}, "out: strides .* multiples of 4 elements"),
    ],
)
def test_a_broken_rule_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(GOOD.changed(name, **changes))


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
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_finite_number_is_named(name: str, scale: float) -> None:
    with pytest.raises(UsageError, match=f"{name}={scale}: expected a finite number"):
        check(GOOD, **{name: scale})


def test_more_tiles_than_the_kernel_counts_are_refused() -> None:
    table = contiguous((4, 1 << 26), "int32")
    with pytest.raises(UsageError, match="tiles, expected below"):
        check(GOOD.changed("page_table", **table), max_seq_len=(1 << 32) - 64)


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
