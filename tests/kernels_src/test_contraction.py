"""Kernels that give equal bits leave no sum of a product to the compiler, which might fuse it in one of them alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cubin_runtime.kernels.native.layouts import LAYOUTS
from kernels_src.build import SOURCES, write_headers
from kernels_src.compiling import compile_command
from kernels_src.toolchain import Toolchain
from kernels_src.variants import VARIANTS

# A soft cap is prefill's alone; its factor is computed once for all tokens.
SEGMENTS = [v.name for v in VARIANTS if "_bf16_" in v.name and "segments" in v.name and "soft_cap" not in v.name]
_ARITHMETIC = re.compile(r"^\s*((?:mul|add|sub)[\w.]*\.f32)\s+(%f\d+),\s*(.*);", re.MULTILINE)


def fusible(name: str, toolchain: Toolchain, folder: Path) -> list[str]:
    """The sums of a kernel's PTX that take a product, of which neither has its rounding written out."""
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    write_headers(folder, LAYOUTS)
    command = compile_command(variant, toolchain, SOURCES, folder, folder / "kernel.ptx")
    command = ["-ptx" if word == "-cubin" else word for word in command]
    subprocess.run(command, check=True, capture_output=True)
    found = _ARITHMETIC.findall((folder / "kernel.ptx").read_text())
    products = {to for operation, to, _ in found if operation == "mul.f32"}
    sums = [(to, taken) for operation, to, taken in found if operation in ("add.f32", "sub.f32")]
    return [to for to, taken in sums if products & {word.strip().lstrip("-") for word in taken.split(",")}]


@pytest.mark.parametrize("name", SEGMENTS)
def test_no_sum_can_be_fused_with_a_product(name: str, toolchain: Toolchain, tmp_path: Path) -> None:
    assert fusible(name, toolchain, tmp_path) == []


def test_such_sums_would_be_found(toolchain: Toolchain, tmp_path: Path) -> None:
    assert fusible("context_attention_bf16_d128_sm90a", toolchain, tmp_path)
