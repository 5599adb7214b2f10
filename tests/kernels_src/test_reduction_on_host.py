"""The kernels behind trtllm-gen launches, compiled for the host, over made-up partials, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gpu.reduction_cases import (
    CASES,
    ReductionCase,
    assert_lse,
    assert_merged,
    lse_case,
    lse_of,
    make_partials,
    run_reduction,
)
from tests.gpu.reduction_cases import random_case as draw
from tests.kernels_src.host_kernels import HostArrays, HostKernel

SEED = 8
RANDOM_CASES = 12


@pytest.fixture(scope="session")
def reductions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], HostKernel]:
    """By partials and output."""
    folder = tmp_path_factory.mktemp("host")
    return {
        (partial, out): HostKernel(
            "trtllm_gen/kv_reduction.cu",
            "KvReductionParams",
            {"PARTIAL_FP16": int(partial == "fp16"), "OUT_E4M3": int(out == "e4m3")},
            folder,
        )
        for partial, out in (("bf16", "bf16"), ("fp16", "fp16"), ("fp16", "e4m3"))
    }


def check(reductions: dict[tuple[str, str], HostKernel], case: ReductionCase, rng: np.random.Generator) -> None:
    arrays, partials = HostArrays(), make_partials(case, rng)
    launch = reductions[(case.partial, case.out)].launch
    assert_merged(case, partials, run_reduction(case, partials, arrays.upload, launch, arrays.download))


@pytest.mark.parametrize("name", CASES)
def test_partials_merge_to_float64(reductions: dict[tuple[str, str], HostKernel], name: str) -> None:
    check(reductions, CASES[name], np.random.default_rng(SEED))


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_partials_merge_to_float64(reductions: dict[tuple[str, str], HostKernel], index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    check(reductions, draw(rng), rng)


@pytest.mark.parametrize("rows", [(1, 1), (3, 5), (33, 128)])
def test_statistics_become_an_lse(tmp_path: Path, rows: tuple[int, int]) -> None:
    kernel = HostKernel("trtllm_gen/lse_from_statistics.cu", "LseFromStatisticsParams", {}, tmp_path)
    arrays = HostArrays()
    statistics, want = lse_case(rows, np.random.default_rng(SEED))
    lse = np.full((rows[1], rows[0] + 3), 7.0, dtype=np.float32)
    at = arrays.upload(lse)
    kernel.launch(lse_of(rows, (1, rows[0] + 3), arrays.upload(statistics), at))
    arrays.download(at, lse)
    assert_lse(lse[:, : rows[0]].T, want)
    assert (lse[:, rows[0] :] == 7.0).all()
