"""The sparse MLA GPU tests' device side without a GPU, on the stand-in driver with launches computed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.testing import StandIn
from tests.gpu import test_sparse_mla_gpu as plain
from tests.gpu.rehearsed_decode import RehearsalRuntime
from tests.gpu.rehearsed_sparse_mla import KERNELS, sparse_mla_rehearsal
from tests.gpu.sanitizer_sparse_mla import sparse_mla_all


@pytest.fixture
def runtime(cubin_standin: StandIn, tmp_path: Path) -> Iterator[RehearsalRuntime]:
    with sparse_mla_rehearsal(cubin_standin.path, tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    "run",
    [
        lambda r, g: plain.test_every_head_count_matches_float64(r, g, "scaled_e4m3", 17, False),
        lambda r, g: plain.test_holes_anywhere_are_left_out(r, g, "bf16_nope", 16, "most", True),
        lambda r, g: plain.test_every_width_matches_float64(r, g, 65),
        lambda r, g: plain.test_every_form_of_the_cache_matches_float64(r, g, "e4m3", "one head before", 64, 32),
        lambda r, g: plain.test_every_form_of_the_cache_matches_float64(r, g, "fp16", "rows", 48, 16),
        lambda r, g: plain.test_scales_of_any_size(r, g, 12, False, 64),
        lambda r, g: plain.test_one_row_of_other_magnitude(r, g, 30, 64),
        lambda r, g: plain.test_large_logits_stay_finite(r, g, -2.0, "bf16", 16),
        lambda r, g: plain.test_slots_outside_the_cache_are_holes_and_reported(r, g, "scaled_e4m3", 32),
        lambda r, g: plain.test_lengths_are_clamped_and_reported(r, g, 301, "over"),
        plain.test_a_slot_that_occurs_twice_counts_twice,
        lambda r, g: plain.test_neighbouring_lists_of_draft_tokens(r, g, 32),
        lambda r, g: plain.test_replays_follow_lists_lengths_and_rows(r, g, "scaled_e4m3", 64, False),
        lambda r, g: plain.test_a_query_token_has_the_same_bits_in_every_batch(r, g, "bf16", 8),
        plain.test_a_wider_list_with_the_same_length_has_the_same_bits,
        plain.test_ranks_that_have_parts_of_the_rows_merge,
    ],
)
def test_plain_cases_run(runtime: RehearsalRuntime, rng: np.random.Generator, run) -> None:
    run(runtime, rng)


@pytest.mark.parametrize("chunk", range(3))
def test_random_cases_run(runtime: RehearsalRuntime, chunk: int) -> None:
    for index in range(8 * chunk, 8 * chunk + 8):
        plain.run_random(runtime, index)


def test_sanitizer_cases_run_every_kernel(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    assert sparse_mla_all(runtime, rng) == {kernel.name for kernel in KERNELS}
