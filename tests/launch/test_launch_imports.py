from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "abi",
    "driver",
    "history",
    "prepared",
    "modules",
    "plan",
    "streams",
    "structs",
    "tensormap",
    "workspace",
]
HEAVY = {"numpy", "torch", "cuda", "requests", "hypothesis"}


@pytest.mark.parametrize("module", MODULES)
def test_importing_needs_neither_numpy_nor_torch_nor_cuda(module: str) -> None:
    program = f"import sys, cubin_runtime.launch.{module}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not HEAVY & set(loaded.split())
