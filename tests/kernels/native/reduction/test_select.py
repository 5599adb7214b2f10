from __future__ import annotations

from dataclasses import replace

import pytest
from reduction_kernel import KERNEL

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.reduction.plan import KV_REDUCTION, LSE_FROM_STATISTICS, lse_from_statistics
from cubin_runtime.kernels.native.reduction.select import choose_kernel

BF16 = {"dtype_partial": "bf16", "dtype_out": "bf16"}


def test_the_kernel_of_the_device_itself_is_preferred() -> None:
    own = replace(KERNEL, name="own", sm="103")
    assert choose_kernel((KERNEL, own), KV_REDUCTION, BF16, 103) is own
    assert choose_kernel((KERNEL, own), KV_REDUCTION, BF16, 100) is KERNEL


def test_a_launch_has_the_shared_memory_of_its_kernel() -> None:
    launch = lse_from_statistics(4, 8, (8, 1), 0x1000, 0x2000)
    kernel = replace(KERNEL, dynamic_shared_bytes=4096)
    plan = launch.launch_plan(kernel, ArtifactPath("release/a.cubin"), "0" * 64, LAYOUTS["LseFromStatisticsParams"])
    assert plan.shared_bytes == 4096


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
    with pytest.raises(UsageError, match=rf"our release has no {operation} kernel.* on SM {sm}"):
        choose_kernel((KERNEL,), operation, traits, sm)
