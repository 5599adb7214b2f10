"""The MLA GPU tests' device side without a GPU, on the stand-in driver with launches computed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.testing import StandIn
from tests.gpu import sanitizer_cases
from tests.gpu import test_mla_gpu as plain
from tests.gpu import test_mla_invariant_gpu as invariant
from tests.gpu import test_mla_random_gpu as matrix
from tests.gpu.rehearsed_decode import RehearsalRuntime
from tests.gpu.rehearsed_mla import KERNELS, mla_rehearsal


@pytest.fixture
def runtime(cubin_standin: StandIn, tmp_path: Path) -> Iterator[RehearsalRuntime]:
    with mla_rehearsal(cubin_standin.path, tmp_path) as made:
        yield made


@pytest.mark.parametrize("chunk", range(3))
def test_random_cases_run(runtime: RehearsalRuntime, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("tests.gpu.mla_random.MOST_PRODUCTS", 30_000_000)
    for index in range(8 * chunk, 8 * chunk + 8):
        matrix.run_case(runtime, index)


def test_a_failing_case_is_named(runtime: RehearsalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "CASES", 2)
    monkeypatch.setattr("tests.gpu.mla_random.MOST_PRODUCTS", 30_000_000)
    monkeypatch.setattr(
        "tests.gpu.rehearsed_mla.attend", lambda q, k, v, scale, sinks: (q[:, : v.shape[2]] * 0 + 100, q[:, 0])
    )
    with pytest.raises(AssertionError, match=rf"(?s)seed {matrix.SEED}: 2 of 2 fail.*case 2: .*MlaCase\(lengths"):
        matrix.test_random_mla_cases_match_float64(runtime, 1)


@pytest.mark.parametrize("mask", ["none", "tree", "any"])
def test_means_come_out(runtime: RehearsalRuntime, rng: np.random.Generator, mask: str) -> None:
    plain.test_rows_see_what_their_mask_says(runtime, rng, "e4m3", 3, 5, mask)
    plain.test_ragged_rows_see_what_their_mask_says(runtime, rng, "e4m3", mask, False)


@pytest.mark.parametrize(
    "run",
    [
        lambda r, g: plain.test_edge_lengths_match_float64(r, g, 32, "e4m3"),
        lambda r, g: plain.test_every_head_count_matches_float64(r, g, 5, (256, 32), "bf16"),
        lambda r, g: plain.test_every_query_length_matches_float64(r, g, 2),
        lambda r, g: plain.test_every_dtype_matches_float64(r, g, "e4m3", "fp16", True),
        lambda r, g: plain.test_an_fp8_output_saturates(r, g, "e4m3, portable"),
        lambda r, g: plain.assert_case(r, replace(plain.SMALL, q_len=2, strided=True, **plain.SEPARATE), g),
        lambda r, g: plain.assert_case(r, replace(plain.SMALL, q_len=2, strided=True, separate_rope=True), g),
        lambda r, g: plain.assert_case(r, replace(plain.RAGGED, separate_rope=True, **plain.SEPARATE), g),
        lambda r, g: plain.test_rope_columns_give_the_same_bits_wherever_they_lie(r, g, "bf16", True),
        lambda r, g: plain.test_queries_of_any_magnitude_beside_an_e4m3_cache(r, g, 3e4),
        lambda r, g: plain.test_values_of_any_magnitude_in_parts(r, g, 16, False, 2.0**100),
        lambda r, g: plain.test_large_logits_stay_finite(r, g, -2.0, "bf16"),
        lambda r, g: plain.test_scales_on_the_device_are_read_at_each_launch(r, g, "e4m3, portable"),
        plain.test_a_smaller_bound_and_other_scales_for_one_step,
        lambda r, g: plain.test_lengths_are_clamped_and_reported(r, g, (513, 17, 0, 128), "over", "default"),
        lambda r, g: plain.test_page_ids_outside_the_pool_are_never_followed(r, g, -7, "invariant"),
        lambda r, g: plain.test_query_sums_are_clamped_and_reported(r, g, (0, 5, 5, 6, 8), "default"),
    ],
)
def test_plain_cases_run(runtime: RehearsalRuntime, rng: np.random.Generator, run) -> None:
    run(runtime, rng)


@pytest.mark.parametrize("name", ["16 heads", "5 heads, tree, sinks", "portable", "fewer keys than queries", "no key"])
def test_a_request_is_found_in_every_batch(runtime: RehearsalRuntime, name: str) -> None:
    target = invariant.Target(runtime, name)
    invariant.test_every_position_of_a_batch_gives_the_same_bits(target, 3)
    invariant.test_bounds_tables_and_pages_do_not_matter(target)
    invariant.test_ragged_queries_and_their_bound_do_not_matter(target)
    invariant.test_streams_graphs_and_pdl_do_not_matter(target)


def test_other_bits_in_a_batch_are_found(runtime: RehearsalRuntime) -> None:
    target = invariant.Target(runtime, "16 heads")
    target.alone = (target.alone[0][:-1] + b"\x00", target.alone[1])
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        target.assert_same(target.case, [target.request])


@pytest.mark.parametrize("steps", list(invariant.STEPS))
def test_replays_are_fed(runtime: RehearsalRuntime, rng: np.random.Generator, steps: str) -> None:
    invariant.test_replays_follow_lengths_tables_and_masks(runtime, rng, steps, False, False)
    invariant.test_replays_follow_query_lengths(runtime, rng, True, True)


def test_sanitizer_cases_run_every_kernel(runtime: RehearsalRuntime, rng: np.random.Generator) -> None:
    wrong = sanitizer_cases.WrongResults()
    count, used = sanitizer_cases.mla_all(runtime, rng, wrong)
    assert not wrong.words
    assert used == {kernel.name for kernel in KERNELS}
    assert 0 < count <= sanitizer_cases.MLA_CASES


def test_sanitizers_get_the_mla_cases(
    runtime: RehearsalRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizer_cases, "Runtime", lambda config: runtime)
    monkeypatch.setattr(sanitizer_cases, "decode_all", lambda runtime, rng, wrong: (0, set()))
    monkeypatch.setattr(sanitizer_cases, "reduce_all", lambda runtime, rng: set())
    monkeypatch.setattr(sanitizer_cases, "mla_all", lambda runtime, rng, wrong: (3, {"an_mla_kernel"}))
    sanitizer_cases.main([])
    others = len(sanitizer_cases.CASES) + len(sanitizer_cases.LSES)
    assert capsys.readouterr().out == f"{3 + others} cases over an_mla_kernel\n"
    sanitizer_cases.main(["mla"])
    assert capsys.readouterr().out == "3 cases over an_mla_kernel\n"
    sanitizer_cases.main(["decode", "reduction"])
    assert capsys.readouterr().out == f"{others} cases over \n"


def test_sanitizer_cases_stay_few(runtime: RehearsalRuntime) -> None:
    kernels = sanitizer_cases.decode_kernels_of(runtime)
    decodes = sanitizer_cases.cases_of(kernels, runtime.driver.device(0))
    latent = sanitizer_cases.mla_cases_of(list(KERNELS), runtime.driver.device(0))
    others = len(sanitizer_cases.CASES) + len(sanitizer_cases.LSES)
    assert len(decodes) + len(latent) + others <= sanitizer_cases.MOST_CASES


def test_without_it_the_batch_can_be_seen(runtime: RehearsalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.rehearsed_decode.show_arithmetic", True)
    invariant.test_without_it_the_batch_can_be_seen(runtime)
