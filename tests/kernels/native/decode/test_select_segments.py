"""Kernels that give the bits of prefill: batch_invariant takes them for all requests, nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_kernels import HOPPER, segments_kernel
from select_cases import H200_DEVICE, SHAPE

from cubin_runtime.kernels.native.decode.grids import ANY_ROWS
from cubin_runtime.kernels.native.decode.select import select_decode

KERNELS = (*HOPPER, *(segments_kernel(rows, head_dim) for rows in (8, 16, 64) for head_dim in (64, 128)))


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
