"""The one kernel of a family that fits a problem: its architecture counts, not only its traits."""

from __future__ import annotations

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.selection import only_kernel
from tests.kernels.copying_kernels import KERNELS
from tests.launch.examples import device


@pytest.mark.parametrize(("major", "minor"), [(8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ("operation", "traits"), [("append_kv", {"quantise": ""}), ("merge_states", {"dtype": "bf16"})]
)
def test_a_kernel_for_another_gpu_generation_does_not_fit(
    major: int, minor: int, operation: str, traits: dict[str, str]
) -> None:
    words = rf"no {operation} kernel for .* on compute capability {major}\.{minor}: .*: built for sm_90a"
    with pytest.raises(UsageError, match=words):
        only_kernel(KERNELS, operation, traits, device(major, minor))
