"""Context attentions drawn at random over every option, against float64; some with keys in many parts."""

from __future__ import annotations

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.prefill import select
from tests.gpu.context_cases import ContextCase, random_context_case, splits_up_to
from tests.gpu.context_device import context_on_device
from tests.gpu.device_checks import assert_all_pass, assert_right_twice
from tests.gpu.seeds import SEED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 50, 40


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_context_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    assert_all_pass(range(chunk * CASES, (chunk + 1) * CASES), lambda index: run_case(runtime, index), drawn)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(12))
@pytest.mark.parametrize("parts", [2, 7, 64])
def test_random_cases_with_split_keys_match_float64(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, parts: int, chunk: int
) -> None:
    monkeypatch.setattr(select, "_splits", splits_up_to(parts))
    first = CASES * (CHUNKS + chunk)
    assert_all_pass(range(first, first + CASES), lambda index: run_case(runtime, index), drawn)


def run_case(runtime: Runtime, index: int) -> None:
    with context_on_device(runtime, drawn(index), np.random.default_rng((SEED, index, 1))) as device:
        assert_right_twice(device)


def drawn(index: int) -> ContextCase:
    return random_context_case(np.random.default_rng((SEED, index)))
