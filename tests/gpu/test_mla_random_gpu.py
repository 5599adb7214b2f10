"""More than a thousand MLA decodes drawn at random over every option, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.device_checks import assert_all_pass, assert_right_twice
from tests.gpu.mla_cases import MlaCase
from tests.gpu.mla_device import mla_on_device, mla_types
from tests.gpu.mla_random import random_mla_case
from tests.gpu.seeds import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 36, 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_mla_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    indices = range(chunk * CASES, (chunk + 1) * CASES)
    assert_all_pass(indices, lambda index: run_case(runtime, index), lambda index: drawn(runtime, index)[0])


def run_case(runtime: Runtime, index: int) -> None:
    case, rng = drawn(runtime, index)
    with mla_on_device(runtime, case, rng) as device:
        assert_right_twice(device)


def drawn(runtime: Runtime, index: int) -> tuple[MlaCase, np.random.Generator]:
    """A case and what is left of its randomness."""
    rng = np.random.default_rng((SEED, index))
    return random_mla_case(rng, mla_types(runtime)), rng
