from __future__ import annotations

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.device_models import describe_device


def test_a_hopper_is_described_as_the_driver_does() -> None:
    made = describe_device(90)
    assert (made.name, made.capability, made.multiprocessors) == ("H200", (9, 0), 132)
    assert (made.shared_bytes_per_block_optin, made.shared_bytes_per_multiprocessor) == (232448, 233472)


def test_what_is_given_replaces_what_is_known() -> None:
    made = describe_device(103, 160, "of mine")
    assert (made.name, made.capability, made.multiprocessors) == ("of mine", (10, 3), 160)


@pytest.mark.parametrize(("sm", "count", "said"), [(75, None, "--sm 75: expected one of 80"), (90, 0, "--sms 0")])
def test_what_cannot_be_described_is_named(sm: int, count: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        describe_device(sm, count)
