"""The GPU tests of recorded calls without a GPU, on the stand-in driver with launches computed on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cubin_runtime.testing import StandIn
from tests.gpu import test_recorded_gpu as real
from tests.gpu.rehearsed_decode import RehearsalRuntime
from tests.gpu.rehearsed_mla import mla_rehearsal


@pytest.fixture
def runtime(cubin_standin: StandIn, tmp_path: Path) -> Iterator[RehearsalRuntime]:
    with mla_rehearsal(cubin_standin.path, tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize("name", real.CASES)
def test_decodes_are_replayed(runtime: RehearsalRuntime, rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    real.test_a_decode_is_recorded_and_replayed(runtime, rng, tmp_path, name)


@pytest.mark.parametrize("name", real.LATENT)
def test_mla_decodes_are_replayed(
    runtime: RehearsalRuntime, rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    real.test_an_mla_decode_is_recorded_and_replayed(runtime, rng, tmp_path, name)


def test_wrong_results_are_found(runtime: RehearsalRuntime, rng: np.random.Generator, tmp_path: Path) -> None:
    real.test_a_wrong_result_is_found_and_not_seen_again(runtime, rng, tmp_path)
