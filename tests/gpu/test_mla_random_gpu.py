"""More than a thousand MLA decodes drawn at random over every option, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from mla_cases import MlaCase
from mla_device import mla_on_device, mla_types
from mla_random import random_mla_case
from seeds import SEED

from cubin_runtime.attention import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

# Case ``index`` is drawn from (seed, index) alone.
CHUNKS, CASES = 36, 40
MOST_NAMED = 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_mla_cases_match_float64(runtime: Runtime, chunk: int) -> None:
    failures = []
    for index in range(chunk * CASES, (chunk + 1) * CASES):
        try:
            run_case(runtime, index)
        except AssertionError as error:
            failures.append(f"case {index}: {error}\n  {named(runtime, index)}")
        except Exception as error:
            # A fault ends the context: nothing after it would mean anything.
            raise RuntimeError(f"seed {SEED}, case {index}: {named(runtime, index)}") from error
    assert not failures, "\n".join([f"seed {SEED}: {len(failures)} of {CASES} fail", *failures[:MOST_NAMED]])


def run_case(runtime: Runtime, index: int) -> None:
    case, rng = drawn(runtime, index)
    with mla_on_device(runtime, case, rng) as device:
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


def drawn(runtime: Runtime, index: int) -> tuple[MlaCase, np.random.Generator]:
    """A case and what is left of its randomness."""
    rng = np.random.default_rng((SEED, index))
    return random_mla_case(rng, mla_types(runtime)), rng


def named(runtime: Runtime, index: int) -> str:
    return repr(drawn(runtime, index)[0])
