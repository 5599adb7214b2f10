from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.kernels.trtllm_gen.errors import WorkspaceRefused
from cubin_runtime.kernels.trtllm_gen.grid import Geometry
from cubin_runtime.kernels.trtllm_gen.traits import MultiCtasMode
from cubin_runtime.kernels.trtllm_gen.workspace_layout import (
    COUNTER_BYTES,
    Regions,
    partial_offset,
    place_regions,
    scratch_bytes,
)
from tests.kernels.trtllm_examples import PROBLEM, ROW

SPLIT = Geometry((16, 8, 1), 1, 1, 16, 4, None)
STATS = 8 * 32 * 2 * 256 + (1 << 20)


def test_counters_come_first_and_scratch_behind_them() -> None:
    carved = place_regions(0x1000, COUNTER_BYTES + 100, counters=True, stats_rows=None, scratch=True)
    assert carved == Regions(0x1000, 0, 0x1000 + COUNTER_BYTES)


def test_statistics_lie_between_counters_and_scratch() -> None:
    carved = place_regions(0, COUNTER_BYTES + STATS, counters=True, stats_rows=(32, 2, 17), scratch=True)
    assert carved == Regions(0, COUNTER_BYTES, COUNTER_BYTES + STATS)


def test_the_begin_is_rounded_up_to_sixteen() -> None:
    assert place_regions(0x1001, COUNTER_BYTES + 15, counters=True, stats_rows=None, scratch=False).counters == 0x1010


def test_context_without_an_lse_takes_nothing() -> None:
    assert place_regions(0x1000, 0, counters=False, stats_rows=None, scratch=False) == Regions(0, 0, 0)


@pytest.mark.parametrize("nbytes", [0, COUNTER_BYTES - 1])
def test_counters_that_do_not_fit_are_refused_with_the_bytes_needed(nbytes: int) -> None:
    with pytest.raises(WorkspaceRefused, match="counters") as caught:
        place_regions(0, nbytes, counters=True, stats_rows=None, scratch=True)
    assert caught.value.needed_bytes == COUNTER_BYTES


def test_statistics_that_do_not_fit_are_refused_with_the_bytes_needed() -> None:
    with pytest.raises(WorkspaceRefused, match="statistics") as caught:
        place_regions(0, COUNTER_BYTES + STATS - 1, counters=True, stats_rows=(32, 2, 256), scratch=True)
    assert caught.value.needed_bytes == COUNTER_BYTES + STATS


def test_a_misaligned_begin_costs_what_it_skips() -> None:
    with pytest.raises(WorkspaceRefused):
        place_regions(8, COUNTER_BYTES, counters=True, stats_rows=None, scratch=True)


def test_partial_outputs_begin_behind_a_row_of_statistics_a_step() -> None:
    assert partial_offset(PROBLEM, replace(ROW, step_q=64)) == 8 * 148 * 64


@pytest.mark.parametrize("mode", [MultiCtasMode.GMEM, MultiCtasMode.SEPARATE_KERNEL])
def test_merging_through_global_memory_takes_a_partial_output_a_cta(mode: MultiCtasMode) -> None:
    assert scratch_bytes(PROBLEM, ROW, SPLIT, mode) == 8 * 148 * 16 + 128 * 16 * 128 * 2


@pytest.mark.parametrize("mode", [MultiCtasMode.DISABLED, MultiCtasMode.CGA])
def test_other_launches_take_no_scratch(mode: MultiCtasMode) -> None:
    assert scratch_bytes(PROBLEM, ROW, SPLIT, mode) == 0
