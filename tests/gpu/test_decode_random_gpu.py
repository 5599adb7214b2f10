"""Thousands of decodes drawn at random over every option, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_device import on_device
from tests.gpu.decode_random import random_case
from tests.gpu.device_checks import assert_all_pass, assert_right_twice
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 80, 50


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    assert_all_pass(range(chunk * CASES, (chunk + 1) * CASES), lambda index: run_case(runtime, index), drawn)


def run_case(runtime: Runtime, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    with on_device(runtime, random_case(rng), rng) as case:
        assert_right_twice(case)


def drawn(index: int) -> DecodeCase:
    return random_case(np.random.default_rng((SEED, index)))
