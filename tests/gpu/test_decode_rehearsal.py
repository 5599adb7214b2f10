"""The GPU tests' device side without a GPU, on the stand-in driver with decodes computed from the launch's struct."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.attention import ClampedInputError
from cubin_runtime.testing import StandIn
from tests.gpu import sanitizer_cases
from tests.gpu import test_decode_clamping_gpu as clamping
from tests.gpu import test_decode_gpu as plain
from tests.gpu import test_decode_invariant_gpu as invariant
from tests.gpu import test_decode_mask_gpu as masks
from tests.gpu import test_decode_random_gpu as matrix
from tests.gpu import test_decode_streams_gpu as streams
from tests.gpu.decode_device import on_device
from tests.gpu.rehearsed_decode import KERNELS, RehearsalRuntime, rehearsal


@pytest.fixture
def runtime(cubin_standin: StandIn, tmp_path: Path) -> Iterator[RehearsalRuntime]:
    with rehearsal(cubin_standin.path, tmp_path) as made:
        yield made


@pytest.mark.parametrize("chunk", range(4))
def test_random_cases_run(runtime: RehearsalRuntime, chunk: int) -> None:
    for index in range(10 * chunk, 10 * chunk + 10):
        matrix.run_case(runtime, index)


def test_a_failing_case_is_named(runtime: RehearsalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CASES", 3)
    monkeypatch.setattr(
        "tests.gpu.rehearsed_decode.attend", lambda q, k, v, scale, sinks: (q * 0 + 100, q[:, 0] * np.nan)
    )
    with pytest.raises(AssertionError, match=rf"(?s)seed {matrix.SEED}: 3 of 3 fail.*case 3: .*DecodeCase\(lengths"):
        matrix.test_random_cases_match_float64(runtime, 1)


@pytest.mark.parametrize("mask", ["none", "tree", "any"])
def test_means_come_out(runtime: RehearsalRuntime, rng: np.random.Generator, mask: str) -> None:
    masks.test_rows_see_what_their_mask_says(runtime, rng, "e4m3", 4, 5, mask)
    masks.test_windows_end_where_they_should(runtime, rng, 17, mask, True)


def test_every_kernel_is_asked_for(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    masks.test_every_kernel_takes_masks_windows_and_ragged_queries(runtime, rng, "fp16", 128, 64)


@pytest.mark.parametrize("steps", list(streams.STEPS))
def test_replays_are_fed(runtime: RehearsalRuntime, rng: np.random.Generator, steps: str) -> None:
    streams.test_replays_follow_lengths_tables_and_masks(runtime, rng, steps, "clusters")


def test_replays_of_ragged_queries_and_windows_are_fed(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    streams.test_replays_follow_query_lengths(runtime, rng, "invariant")
    streams.test_replays_follow_windows_whose_pages_are_freed(runtime, rng)


def test_repeats_are_kept_and_compared(
    runtime: RehearsalRuntime, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "REPEATS", 3)
    streams.test_200_repeats_under_load_on_streams_and_in_graphs_give_the_same_bits(runtime, rng)
    streams.test_pdl_waits_for_the_tensors_that_come_before_it(runtime, rng)


def test_a_repeat_with_other_bits_is_found(
    runtime: RehearsalRuntime, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "REPEATS", 3)
    with on_device(runtime, plain.SMALL, rng) as device:
        repeated = streams.Repeated(device, graph=False)
        for index in range(3):
            repeated.step(index)
        runtime.driver.fill(repeated.kept + device.out_bytes + 5, 1, 1, 0)
        with pytest.raises(AssertionError, match=r"repeats \[1\] of 3 differ"):
            repeated.assert_one_answer()


@pytest.mark.parametrize("name", ["bf16", "bf16 tree, window, sinks", "fewer keys than queries", "no key"])
def test_a_request_is_found_in_every_batch(runtime: RehearsalRuntime, name: str) -> None:
    target = invariant.Target(runtime, name)
    invariant.test_every_position_of_a_batch_gives_the_same_bits(target, 3)
    invariant.test_bounds_tables_and_pages_do_not_matter(target)
    invariant.test_ragged_queries_and_their_bound_do_not_matter(target)
    invariant.test_streams_graphs_and_pdl_do_not_matter(target)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.rehearsed_decode.show_arithmetic", True)


@pytest.mark.parametrize("name", ["bf16", "bf16 tree, window, sinks", "fp16 many heads"])
def test_bounds_do_not_choose_among_kernels_of_other_arithmetic(
    runtime: RehearsalRuntime, arithmetic: None, name: str
) -> None:
    target = invariant.Target(runtime, name)
    invariant.test_every_kernel_that_may_be_chosen_gives_the_same_bits(target)
    invariant.test_a_request_has_one_arithmetic_in_every_batch(target)
    invariant.test_bounds_tables_and_pages_do_not_matter(target)
    invariant.test_ragged_queries_and_their_bound_do_not_matter(target)
    invariant.test_two_launches_do_not_matter_to_streams_graphs_and_pdl(target)


@pytest.mark.parametrize("name", ["bf16 512 rows", "bf16 head 256", "e4m3 and bf16"])
def test_kernels_of_one_arithmetic_may_be_chosen_by_bounds(
    runtime: RehearsalRuntime, arithmetic: None, name: str
) -> None:
    target = invariant.Target(runtime, name)
    invariant.test_every_kernel_that_may_be_chosen_gives_the_same_bits(target)
    invariant.test_bounds_tables_and_pages_do_not_matter(target)


def test_the_default_shows_its_batch(runtime: RehearsalRuntime, arithmetic: None) -> None:
    invariant.test_without_it_the_batch_can_be_seen(runtime)


def test_other_bits_in_a_batch_are_found(runtime: RehearsalRuntime) -> None:
    target = invariant.Target(runtime, "bf16")
    target.alone = (target.alone[0][:-1] + b"\x00", target.alone[1])
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        target.assert_same(target.case, [target.request])


def test_clamping_is_reported(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    clamping.test_lengths_are_clamped_and_reported(runtime, rng, (513, -1, 0, 128), "over max_seq_len.* and", "default")
    clamping.test_page_ids_outside_the_pool_are_never_followed(runtime, rng, -7, "invariant")
    clamping.test_query_sums_are_clamped_and_reported(runtime, rng, (0, 5, 5, 6, 8), "default")
    clamping.test_good_input_is_not_reported(runtime, rng)


def test_a_page_that_should_not_be_read_is_found(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    wanted = plain.replace(plain.SMALL, window_left=20, page_size=16)
    with on_device(runtime, wanted, rng) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        case.plan.check(workspace)
        table = case.host.page_table.copy()
        table[0, 17] = -1
        case.driver.copy_to_device(case.tensors[3].pointer, table)
        case.run(workspace=workspace)
        with pytest.raises(ClampedInputError, match="page id"):
            case.plan.check(workspace)


def test_sanitizer_cases_run_every_kernel(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    wrong = sanitizer_cases.WrongResults()
    count, used = sanitizer_cases.decode_all(runtime, rng, wrong)
    assert not wrong.words
    assert used == {kernel.name for kernel in KERNELS}
    assert count + len(sanitizer_cases.CASES) + len(sanitizer_cases.LSES) <= sanitizer_cases.MOST_CASES


@pytest.mark.parametrize(("q_dtype", "rows", "allowed"), [("e4m3", 64, True), ("e4m3", 8, False), ("bf16", 64, False)])
def test_scores_may_be_off_only_where_e4m3_meets_e4m3(
    runtime: RehearsalRuntime,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    q_dtype: str,
    rows: int,
    allowed: bool,
) -> None:
    told: list[float] = []
    monkeypatch.setattr("tests.gpu.decode_device.assert_close", lambda *given: told.append(given[3]) or 0.0)
    wanted = plain.replace(plain.SMALL, kv_dtype="e4m3", q_dtype=q_dtype, rows=rows, head_dim=128)
    with on_device(runtime, wanted, rng) as case:
        case.run()
        case.assert_right()
    assert [of_scores > 0 for of_scores in told] == [allowed]


def test_a_wrong_result_ends_the_sanitizers_cases_only_after_all(
    runtime: RehearsalRuntime, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_wrong(*args: object) -> None:
        raise AssertionError("off\nby much")

    monkeypatch.setattr("tests.gpu.decode_device.assert_close", always_wrong)
    wrong = sanitizer_cases.WrongResults()
    count, used = sanitizer_cases.decode_all(runtime, rng, wrong)
    assert used == {kernel.name for kernel in KERNELS}
    assert wrong.words == ["off"] * count


@pytest.mark.parametrize(
    "run",
    [
        lambda r, g: plain.test_edge_lengths_match_float64(r, g, 16, "HND", "e4m3"),
        lambda r, g: plain.test_every_group_matches_float64(r, g, 7),
        lambda r, g: plain.test_every_query_length_matches_float64(r, g, 5),
        lambda r, g: plain.test_every_dtype_and_head_dimension_matches_float64(r, g, "e4m3", "fp16", "e4m3", 64),
        lambda r, g: plain.test_the_widest_window_hides_nothing(r, g, "any"),
        plain.test_an_fp8_output_saturates,
        plain.test_large_logits_stay_finite,
        plain.test_a_smaller_bound_and_other_scales_for_one_step,
        plain.test_scales_on_the_device_are_read_at_each_launch,
        plain.test_a_workspace_of_another_stream_is_refused,
        lambda r, g: plain.test_one_long_request_beside_short_ones_matches_float64(r, g, True),
        plain.test_a_window_of_a_long_request_reads_what_it_needs,
    ],
)
def test_plain_cases_run(runtime: RehearsalRuntime, rng: np.random.Generator, run) -> None:
    run(runtime, rng)
