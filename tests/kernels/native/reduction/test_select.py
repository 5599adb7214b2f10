from __future__ import annotations

from dataclasses import replace

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.reduction.plan import KV_REDUCTION, LSE_FROM_STATISTICS
from cubin_runtime.kernels.native.reduction.select import choose_kernel
from tests.kernels.reduction_kernel import KERNEL

BF16 = {"dtype_partial": "bf16", "dtype_out": "bf16"}


def test_the_kernel_of_the_device_itself_is_preferred() -> None:
    own = replace(KERNEL, name="own", sm="103")
    assert choose_kernel((KERNEL, own), KV_REDUCTION, BF16, 103) is own
    assert choose_kernel((KERNEL, own), KV_REDUCTION, BF16, 100) is KERNEL


def test_a_kernel_of_the_same_generation_serves() -> None:
    assert choose_kernel((KERNEL,), KV_REDUCTION, BF16, 103) is KERNEL


@pytest.mark.parametrize(
    ("operation", "traits", "sm"),
    [
        (LSE_FROM_STATISTICS, {}, 100),
        (KV_REDUCTION, {"dtype_partial": "fp16", "dtype_out": "fp16"}, 100),
        (KV_REDUCTION, BF16, 90),
    ],
)
def test_a_kernel_that_there_is_not_is_named(operation: str, traits: dict[str, str], sm: int) -> None:
    with pytest.raises(UsageError, match=rf"the native release has no {operation} kernel.* on SM {sm}"):
        choose_kernel((KERNEL,), operation, traits, sm)
