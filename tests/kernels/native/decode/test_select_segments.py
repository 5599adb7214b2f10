"""Kernels that give the bits of prefill: batch_invariant takes them for all requests, nothing else does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cubin_runtime.kernels.native.decode.grids import ANY_ROWS
from cubin_runtime.kernels.native.decode.select import select_decode
from tests.kernels.decode_kernels import HOPPER, segments_kernel
from tests.kernels.select_cases import H200_DEVICE, SHAPE

SIZES = (*product((8, 16, 64), (64, 128)), (128, 128))  # rows, head_dim
KERNELS = (*HOPPER, *(segments_kernel(rows, head_dim) for rows, head_dim in SIZES))
OVER_E4M3 = (
    *KERNELS,
    *(segments_kernel(*size, q_dtype) for size, q_dtype in product(product((8, 16, 64), (64, 128)), ("bf16", "fp16"))),
)
# Of 8 query heads per KV head over e4m3 caches: head_dim, requests, query tokens, keys; the rows and CTAs of what was
# fastest on an H200, and its time in a sequence of layers in us (benchmarks/results/invariant_e4m3_h200.json).
MEASURED_OVER_E4M3 = (
    (64, 16, 1, 4096, 8, 256, 31.4),
    (64, 16, 1, 8192, 8, 256, 52.2),
    (64, 64, 1, 1024, 8, 256, 31.0),
    (64, 64, 1, 4096, 8, 256, 90.0),
    (64, 16, 2, 8192, 16, 256, 63.6),
    (64, 16, 8, 8192, 64, 128, 119.1),
    (128, 16, 1, 8192, 8, 256, 77.2),
    (128, 64, 1, 8192, 8, 256, 253.2),
    (128, 16, 2, 8192, 16, 256, 86.6),
    (128, 16, 4, 8192, 16, 256, 144.3),
    (128, 16, 8, 8192, 64, 128, 155.8),
)
# Medians of triton's do_bench on an H200 in us, of 64 requests with 16,384 keys and 4 query heads per KV head: query
# tokens, and what kernels of 64 and of 128 rows took (benchmarks/results/drafts.json, and before there were 128).
MEASURED = ((8, 1076.4, 1517.9), (16, 1214.2, 1592.9), (32, 2400.7, 1669.7), (48, 3486.0, 3186.8), (64, 4334.8, 3118.0))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_len", "rows"), [(1, 8), (2, 16), (8, 64)])
@pytest.mark.parametrize("ragged", [False, True])
def test_batch_invariant_takes_one_launch_of_segments(head_dim: int, q_len: int, rows: int, ragged: bool) -> None:
    shape = replace(SHAPE, head_dim=head_dim, q_len=q_len, tokens=64 * q_len, ragged=ragged, batch_invariant=True)
    (made,) = select_decode(KERNELS, shape, H200_DEVICE)
    assert (made.kernel.traits["arithmetic"], made.min_rows, made.max_rows) == ("segments", 0, ANY_ROWS)
    assert made.kernel.traits["rows"] == rows
    assert "segments of 512 keys, as in prefill" in made.reason


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_nothing_else_takes_segments(dtype: str) -> None:
    shape = replace(SHAPE, dtype=dtype, batch_invariant=dtype == "e4m3")
    (made,) = select_decode(KERNELS, shape, H200_DEVICE)
    assert made.kernel.traits["arithmetic"] != "segments"


@pytest.mark.parametrize(("max_seq_len", "window_left", "segments"), [(1, -1, 1), (8192, -1, 16), (8192, 1000, 3)])
def test_segments_of_a_request_are_bounded(max_seq_len: int, window_left: int, segments: int) -> None:
    assert replace(SHAPE, max_seq_len=max_seq_len, window_left=window_left).segments == segments


@pytest.mark.parametrize(("q_len", "us_of_64", "us_of_128"), MEASURED)
def test_the_rows_that_were_faster_are_chosen(q_len: int, us_of_64: float, us_of_128: float) -> None:
    shape = replace(SHAPE, group=4, kv_heads=8, batch=64, q_len=q_len, max_seq_len=16384, batch_invariant=True)
    (made,) = select_decode(KERNELS, shape, H200_DEVICE)
    assert made.kernel.traits["rows"] == (64 if us_of_64 < us_of_128 else 128)
    assert made.microseconds == pytest.approx(min(us_of_64, us_of_128), rel=0.15)


@pytest.mark.parametrize(
    ("head_dim", "batch", "q_len", "keys", "rows", "ctas", "measured_us"),
    MEASURED_OVER_E4M3,
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("q_dtype", ["bf16", "fp16"])
def test_the_grid_over_e4m3_that_was_faster_is_chosen(
    q_dtype: str, head_dim: int, batch: int, q_len: int, keys: int, rows: int, ctas: int, measured_us: float
) -> None:
    shape = replace(SHAPE, dtype="e4m3", q_dtype=q_dtype, head_dim=head_dim, batch=batch, q_len=q_len)
    (made,) = select_decode(OVER_E4M3, replace(shape, max_seq_len=keys, batch_invariant=True), H200_DEVICE)
    assert (made.kernel.traits["arithmetic"], made.kernel.traits["q_dtypes"]) == ("segments", q_dtype)
    assert (made.kernel.traits["rows"], made.ctas) == (rows, ctas)
    assert made.microseconds == pytest.approx(measured_us, rel=0.15)


def test_e4m3_queries_take_no_segments() -> None:
    shape = replace(SHAPE, dtype="e4m3", q_dtype="e4m3", batch_invariant=True)
    (made,) = select_decode(OVER_E4M3, shape, H200_DEVICE)
    assert made.kernel.traits["arithmetic"] == "warps"
