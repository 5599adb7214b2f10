"""The merge of split keys' outputs, compiled for the host, against float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.gpu.decode_values import values_of
from tests.kernels_src.host_kernels import BLOCK_EMULATOR, HostArrays, HostKernel

WARPS = 8


class Merge(NamedTuple):
    """The sizes of a merge; warps of a block run equally often, so that ``splits`` is a multiple of ``warps``."""

    splits: int
    warps: int
    columns: int = 128
    tokens: int = 4
    heads: int = 6
    dtype: str = "bf16"
    sinks: bool = False
    natural: bool = False


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HostKernel]:
    folder = tmp_path_factory.mktemp("host")
    return {
        dtype: HostKernel(
            "prefill/merge_parts.cu", "MergePartsParams", {"TO_FP16": int(dtype == "fp16")}, folder, BLOCK_EMULATOR
        )
        for dtype in ("bf16", "fp16")
    }


def check(
    kernels: dict[str, HostKernel],
    case: Merge,
    parts: np.ndarray,
    lses: np.ndarray,
    sums: tuple[int, ...] | None = None,
) -> None:
    """Merge, and compare with float64; ``sums`` are the requests' prefix sums of tokens, None: they have all."""
    arrays, rng = HostArrays(), np.random.default_rng(1)
    sinks = rng.standard_normal(case.heads).astype(np.float32) * 3
    out = np.full((case.tokens, case.heads, case.columns), 0xFFFF, np.uint16)
    lse = np.full((case.tokens, case.heads), np.nan, np.float32)
    addresses = {"out": arrays.upload(out), "lse": arrays.upload(lse)}
    values: dict[str, Any] = {
        **addresses,
        "parts": arrays.upload(parts),
        "part_lses": arrays.upload(lses),
        "sinks": arrays.upload(sinks) if case.sinks else 0,
        "q_cu_seq_lens": 0 if sums is None else arrays.upload(np.array(sums, np.int32)),
        "batch": 1 if sums is None else len(sums) - 1,
        "out_token_stride": case.heads * case.columns,
        "out_head_stride": case.columns,
        "lse_token_stride": case.heads,
        "lse_head_stride": 1,
        "tokens": case.tokens,
        "heads": case.heads,
        "columns": case.columns,
        "splits": case.splits,
        "warps_log2": case.warps.bit_length() - 1,
        "lse_scale": math.log(2) if case.natural else 1.0,
    }
    grid = (case.tokens * case.heads * case.warps // WARPS, 1, 1)
    kernels[case.dtype].launch(SimpleNamespace(values=values, grid=grid, block=(32 * WARPS, 1, 1)))  # type: ignore[arg-type]
    arrays.download(addresses["out"], out)
    arrays.download(addresses["lse"], lse)
    first, last = (0, case.tokens) if sums is None else (sums[0], sums[-1])
    for beside in (slice(first), slice(last, None)):
        assert (out[beside] == 0xFFFF).all(), "written for a token of no request"
        assert np.isnan(lse[beside]).all()
    out, lse, lses, parts = (array[first:last] for array in (out, lse, lses, parts))
    exponents = lses.astype(np.float64)
    if case.sinks:
        own = np.broadcast_to(sinks * math.log2(math.e), (len(lses), 1, case.heads))
        exponents = np.concatenate([exponents, own], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp2(exponents - np.maximum(exponents.max(1, keepdims=True), -1e300))
        total = weights.sum(1)
        expected = np.nan_to_num((weights[:, : case.splits, :, None] * parts).sum(1) / total[..., None])
        expected_lse = (exponents.max(1) + np.log2(total)) * values["lse_scale"]
    np.testing.assert_allclose(values_of(case.dtype, out), expected, rtol=2.0**-7, atol=2e-5)
    np.testing.assert_allclose(lse, np.where(total == 0, -np.inf, expected_lse), rtol=2e-6, atol=2e-6)


def drawn(case: Merge, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Parts and their log-sum-exps, a third of which saw no key."""
    rng = np.random.default_rng(seed)
    lses = rng.standard_normal((case.tokens, case.splits, case.heads)).astype(np.float32) * 4
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    parts = rng.standard_normal((case.tokens, case.splits, case.heads, case.columns)).astype(np.float32)
    parts[np.isneginf(lses)] = 0
    return parts, lses


@pytest.mark.parametrize(
    ("splits", "warps"),
    [(2, 1), (2, 2), (4, 1), (4, 4), (7, 1), (8, 1), (8, 2), (8, 4), (8, 8), (16, 2), (16, 8), (32, 4), (64, 8)],
)
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_parts_merge_to_float64(kernels: dict[str, HostKernel], splits: int, warps: int, columns: int) -> None:
    case = Merge(splits, warps, columns)
    check(kernels, case, *drawn(case))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("natural", [False, True])
def test_every_option_merges_to_float64(kernels: dict[str, HostKernel], dtype: str, sinks: bool, natural: bool) -> None:
    case = Merge(8, 4, dtype=dtype, sinks=sinks, natural=natural)
    check(kernels, case, *drawn(case, 2))


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_saw_no_key_are_0(kernels: dict[str, HostKernel], sinks: bool) -> None:
    case = Merge(8, 2, sinks=sinks)
    parts, lses = drawn(case)
    lses[1], parts[1] = -np.inf, 0
    check(kernels, case, parts, lses)


@pytest.mark.parametrize("sums", [(0, 4), (0, 2, 3), (1, 4), (1, 1, 2), (2, 2)])
def test_tokens_of_no_request_are_left_alone(kernels: dict[str, HostKernel], sums: tuple[int, ...]) -> None:
    # A warp for each row, 8 heads: all warps of a block have rows of one token, and run equally often.
    case = Merge(4, 1, heads=8)
    check(kernels, case, *drawn(case), sums=sums)
