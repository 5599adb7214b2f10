"""Which keys each row sees, held exactly: queries and keys of zero make the output the mean of the visible values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_compare import assert_lse_close, assert_rounded
from tests.gpu.decode_device import on_device
from tests.gpu.decode_means import make_means, means_of
from tests.gpu.decode_random import HEAD_DIMS, random_case
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

LENGTHS = (300, 5, 0, 64, 1, 16, 129, 65)
# q_len x group: whole tiles of 8, 16, 32 and 64 rows, parts of them, many of them.
ROWS = (
    (1, 1),
    (1, 8),
    (2, 4),
    (3, 5),
    (4, 4),
    (16, 1),
    (8, 4),
    (7, 9),
    (4, 16),
    (16, 8),
    (5, 31),
    (16, 32),
    (33, 1),
    (32, 4),
    (64, 4),
)


def assert_means(runtime: Runtime, wanted: DecodeCase, rng: np.random.Generator) -> None:
    """Run on zero queries and keys, and compare the output with the means, except for its rounding."""
    with on_device(runtime, wanted, rng, make_means(wanted, rng)) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        out, lse = case.result()
        want, want_lse = means_of(wanted, case.host)
        assert_rounded(wanted, out[: len(want)], want)
        if lse is not None:
            assert_lse_close(lse[: len(want)], want_lse)
        case.plan.check(workspace)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize(("q_len", "group"), ROWS)
@pytest.mark.parametrize("mask", ["none", "chain", "tree", "any"])
def test_rows_see_what_their_mask_says(
    runtime: Runtime, rng: np.random.Generator, kv_dtype: str, q_len: int, group: int, mask: str
) -> None:
    wanted = DecodeCase(LENGTHS, 300, group=group, q_len=q_len, mask=mask, kv_dtype=kv_dtype, out_dtype="fp16")
    assert_means(runtime, wanted, rng)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_every_kernel_takes_masks_windows_and_ragged_queries(
    runtime: Runtime, rng: np.random.Generator, kv_dtype: str, head_dim: int, rows: int
) -> None:
    wanted = DecodeCase(
        LENGTHS,
        400,
        kv_heads=1,
        group=5,
        page_size=16,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        out_dtype="fp16",
        rows=rows,
    )
    ragged = replace(wanted, q_lens=(4, 0, 3, 7, 16, 16, 1, 9), max_q_len=16)
    long = replace(wanted, q_lens=(40, 0, 33, 7, 64, 32, 1, 9), max_q_len=64)
    for mask in ("none", "tree", "any"):
        assert_means(runtime, replace(long, mask=mask, window_left=17), rng)
        assert_means(runtime, replace(long, mask=mask, window_left=300, batch_invariant=True), rng)
        assert_means(runtime, replace(wanted, q_len=6, mask=mask), rng)
        assert_means(runtime, replace(ragged, mask=mask, sinks=True), rng)
        assert_means(runtime, replace(ragged, mask=mask, window_left=17), rng)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("mask", ["none", "tree", "any"])
@pytest.mark.parametrize("window_left", [0, 1, 16, 17, 63, 64, 65, 128, 1000])
def test_windows_end_where_they_should(
    runtime: Runtime, rng: np.random.Generator, window_left: int, mask: str, batch_invariant: bool
) -> None:
    wanted = DecodeCase(
        (700, 64, 65, 3, 300, 1), 700, page_size=16, q_len=5, mask=mask, window_left=window_left, out_dtype="fp16"
    )
    assert_means(runtime, replace(wanted, batch_invariant=batch_invariant), rng)


@pytest.mark.parametrize("out_dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("mask_itemsize", [2, 4])
def test_masks_hold_for_every_output(
    runtime: Runtime, rng: np.random.Generator, out_dtype: str, mask_itemsize: int
) -> None:
    wanted = DecodeCase(LENGTHS, 300, q_len=6, mask="any", mask_itemsize=mask_itemsize, out_dtype=out_dtype)
    for kv_dtype in ("bf16", "fp16", "e4m3"):
        assert_means(runtime, replace(wanted, kv_dtype=kv_dtype), rng)


@pytest.mark.parametrize("index", range(100))
def test_random_cases_give_means(runtime: Runtime, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    wanted = random_case(rng)
    print(f"seed {SEED}: {wanted}")
    assert_means(runtime, wanted, rng)
