from __future__ import annotations

import pytest

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.kernels.native.launches import KernelFile
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch, lse_from_statistics
from tests.kernels.reduction_kernel import KERNEL

FILE = KernelFile(ArtifactPath("release/lse.cubin"), "ab" * 32, LAYOUTS["LseFromStatisticsParams"])


def launch(*, pdl: bool = False) -> OperationLaunch:
    return lse_from_statistics(33, 64, (640, 2), 0x10, 0x20, pdl=pdl)


def test_a_launch_takes_grid_block_and_values_along() -> None:
    plan = launch().launch_plan(KERNEL, FILE)
    assert (plan.grid, plan.block, dict(plan.values)) == ((3, 1, 1), (1024, 1, 1), launch().values)
    assert (plan.path, plan.sha256, plan.layout) == (FILE.path, FILE.sha256, FILE.layout)


def test_a_launch_has_the_name_symbol_and_shared_memory_of_its_kernel() -> None:
    plan = launch().launch_plan(KERNEL, FILE)
    assert (plan.kernel, plan.symbol, plan.shared_bytes) == (KERNEL.name, KERNEL.symbol, 4096)


@pytest.mark.parametrize("pdl", [True, False])
def test_programmatic_launch_is_as_asked(pdl: bool) -> None:
    plan = launch(pdl=pdl).launch_plan(KERNEL, FILE)
    assert plan.attributes.programmatic_serialization is pdl
