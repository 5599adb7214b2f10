"""Thousands of decodes drawn at random over every option, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from decode_device import on_device
from decode_random import random_case
from seeds import SEED

from cubin_runtime.attention import Runtime

pytestmark = pytest.mark.gpu

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 80, 50
MOST_NAMED = 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    failures = []
    for index in range(chunk * CASES, (chunk + 1) * CASES):
        try:
            run_case(runtime, index)
        except AssertionError as error:
            failures.append(f"case {index}: {error}\n  {named(index)}")
        except Exception as error:
            # A fault ends the context: nothing after it would mean anything.
            raise RuntimeError(f"seed {SEED}, case {index}: {named(index)}") from error
    assert not failures, "\n".join([f"seed {SEED}: {len(failures)} of {CASES} fail", *failures[:MOST_NAMED]])


def run_case(runtime: Runtime, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    with on_device(runtime, random_case(rng), rng) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        case.assert_right()
        # No status: no page that may be freed was followed.
        case.plan.check(workspace)
        case.assert_zeroed(workspace)
        first = case.result_bytes()
        case.poison()
        case.run(workspace=workspace)
        assert case.result_bytes() == first, "a second run gives other bits"
        case.arrays.assert_guards()


def named(index: int) -> str:
    return repr(random_case(np.random.default_rng((SEED, index))))
