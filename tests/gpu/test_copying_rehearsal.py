"""The GPU tests of copying operators without a GPU: on the stand-in driver, by their kernels compiled for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubin_runtime.kernels.native.draft_mask.params import DRAFT_MASK
from cubin_runtime.testing import StandIn
from tests.gpu import mirrored_arrays, rehearsed_decode, sanitizer_copying
from tests.gpu import test_append_gpu as append
from tests.gpu import test_merge_gpu as merge
from tests.gpu.rehearsed_decode import RehearsalRuntime, rehearsal
from tests.kernels.copying_kernels import COPYING_VARIANTS, KERNELS
from tests.kernels_src.host_kernels import BLOCK_EMULATOR, HostKernel

CTAS = 5  # whatever a plan says: but for draft masks, the kernels take any grid


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HostKernel]:
    folder = tmp_path_factory.mktemp("host")
    return {
        repr(dict(v.traits)): HostKernel(v.source, v.struct, v.defines, folder / v.name, BLOCK_EMULATOR)
        for v in COPYING_VARIANTS
    }


@pytest.fixture
def runtime(
    cubin_standin: StandIn, kernels: dict[str, HostKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RehearsalRuntime]:
    def compute(p: Mapping[str, Any], traits: Mapping[str, Any], grid: Sequence[int]) -> None:
        kernel = kernels[repr(dict(traits))]
        own_grid = grid if kernel.layout.name == DRAFT_MASK.name else (CTAS, 1, 1)
        kernel._run(ctypes.create_string_buffer(kernel.layout.pack(p)), (ctypes.c_int * 3)(*own_grid), 256)

    for operation in {variant.operation for variant in COPYING_VARIANTS}:
        monkeypatch.setitem(rehearsed_decode.COMPUTED, operation, compute)
    with rehearsal(cubin_standin.path, tmp_path) as made:
        made._native = replace(made.native_release(), kernels=KERNELS)
        yield made


@pytest.fixture
def appended(runtime: RehearsalRuntime) -> Iterator[mirrored_arrays.MirroredArrays]:
    made = mirrored_arrays.MirroredArrays(runtime.driver, append.UNTOUCHED)
    yield made
    made.close()


@pytest.fixture
def merged(runtime: RehearsalRuntime) -> Iterator[mirrored_arrays.MirroredArrays]:
    made = mirrored_arrays.MirroredArrays(runtime.driver, 0xFF)
    yield made
    made.close()


@pytest.mark.parametrize("index", range(8))
def test_random_appends_run(runtime: RehearsalRuntime, appended: Any, index: int) -> None:
    append.test_every_byte_of_the_caches_is_as_expected(runtime, appended, index)


def test_a_wrong_byte_is_seen(runtime: RehearsalRuntime, appended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append.Placed, "run", lambda placed: None)
    placed = append.Placed(runtime, appended, append.PLAIN, np.random.default_rng(1))
    placed.run()
    with pytest.raises(AssertionError, match="AppendCase"):
        placed.check()


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [("seq_lens", 0, -3, "a negative length"), ("q_cu_seq_lens", 2, 2**31 - 1, "a token of no request")],
)
def test_reports_are_read(
    runtime: RehearsalRuntime, appended: Any, rng: np.random.Generator, name: str, index: int, value: int, words: str
) -> None:
    append.test_what_is_outside_is_skipped_and_reported(runtime, appended, rng, name, index, value, words)


def test_replays_and_chains_run(runtime: RehearsalRuntime, appended: Any, rng: np.random.Generator) -> None:
    append.test_a_graph_replays_over_other_lengths_and_pages(runtime, appended, rng)
    append.test_it_waits_for_the_kernel_that_makes_its_input(runtime, appended)


@pytest.mark.parametrize("index", range(8))
def test_random_merges_run(runtime: RehearsalRuntime, merged: Any, index: int) -> None:
    merge.test_random_parts_merge_to_float64(runtime, merged, index)


def test_other_merges_run(runtime: RehearsalRuntime, merged: Any) -> None:
    merge.test_rows_wider_than_a_warp_merge_in_place(runtime, merged)
    merge.test_the_same_parts_give_the_same_bits(runtime, merged)


def test_the_sanitizer_s_cases_run(runtime: RehearsalRuntime) -> None:
    used = sanitizer_copying.copying_all(runtime)
    assert used <= {kernel.name for kernel in KERNELS}
    assert "pack_draft_mask_sm90a" in used
