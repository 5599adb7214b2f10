"""Two thousand context attentions drawn at random over every option, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from context_cases import random_context_case
from context_device import context_on_device
from seeds import SEED

from cubin_runtime.attention import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 50, 40
MOST_NAMED = 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_context_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    failures = []
    for index in range(chunk * CASES, (chunk + 1) * CASES):
        case = random_context_case(np.random.default_rng((SEED, index)))
        try:
            with context_on_device(runtime, case, np.random.default_rng((SEED, index, 1))) as device:
                workspace = device.dirty_workspace()
                device.run(workspace=workspace)
                device.assert_right()
                device.plan.check(workspace)
                device.assert_zeroed(workspace)
                first = device.result_bytes()
                device.poison()
                device.run(workspace=workspace)
                assert device.result_bytes() == first, "a second run gives other bits"
                device.arrays.assert_guards()
        except AssertionError as error:
            failures.append(f"case {index}: {error}\n  {case}")
        except Exception as error:
            # A fault ends the context: nothing after it would mean anything.
            raise RuntimeError(f"seed {SEED}, case {index}: {case}") from error
    assert not failures, "\n".join([f"seed {SEED}: {len(failures)} of {CASES} fail", *failures[:MOST_NAMED]])
