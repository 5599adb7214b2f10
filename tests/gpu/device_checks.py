"""What tests ask of a case on the device, whichever operator it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cubin_runtime.attention import ClampedInputError
from tests.gpu.decode_device import DeviceCase
from tests.gpu.seeds import SEED

MOST_NAMED = 5


def assert_reported(case: DeviceCase, words: str) -> None:
    """One run reports ``words``, once, writes nothing out of its place, and leaves the workspace clean."""
    workspace = case.dirty_workspace()
    case.run(workspace=workspace)
    with pytest.raises(ClampedInputError, match=words):
        case.plan.check(workspace)
    case.plan.check(workspace)
    case.assert_zeroed(workspace)
    case.arrays.assert_guards()


def assert_right_twice(case: DeviceCase) -> None:
    """A run matches float64, reports nothing, writes nothing out of its place, and a second one gives the same bits."""
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


def assert_all_pass(indices: Sequence[int], run: Callable[[int], None], case_of: Callable[[int], Any]) -> None:
    """Run random cases; those that fail are named together at the end."""
    failures = []
    for index in indices:
        try:
            run(index)
        except AssertionError as error:
            failures.append(f"case {index}: {error}\n  {case_of(index)!r}")
        except Exception as error:
            # A fault ends the context: nothing after it would mean anything.
            raise RuntimeError(f"seed {SEED}, case {index}: {case_of(index)!r}") from error
    assert not failures, "\n".join([f"seed {SEED}: {len(failures)} of {len(indices)} fail", *failures[:MOST_NAMED]])
