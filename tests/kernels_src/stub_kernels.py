"""A trivial kernel, its struct and its variants, for tests of the build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cubin_runtime.launch.structs import Field, StructLayout
from kernels_src.variants import Variant

LAYOUT = StructLayout.declare(
    "ScaleParams",
    (Field("values", "ptr", "fp32 [count]"), Field("count", "int32", "values"), Field("factor", "float", "")),
)
SOURCE = """
#include <cuda_bf16.h>
#include "factor.cuh"
#include "ScaleParams.h"
extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(const __grid_constant__ ScaleParams p) {
    __shared__ float first[64];
    float* values = static_cast<float*>(p.values);
    if (threadIdx.x < 64) first[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) values[i] *= p.factor * FACTOR * UNROLL + first[threadIdx.x % 64];
}
"""


def stub(**changes: object) -> Variant:
    """The stub's variant for sm_90a with some fields changed."""
    plain = Variant(
        source="stub/scale.cu",
        symbol="stub_scale",
        sm="90a",
        operation="scale",
        struct="ScaleParams",
        traits={"dtype": "fp32"},
        defines={"UNROLL": 1},
    )
    return replace(plain, **changes)


def write_source(folder: Path, text: str) -> None:
    """Write ``text`` as the stub's source below ``folder``, with the header that it includes."""
    (folder / "stub").mkdir(parents=True, exist_ok=True)
    (folder / "stub" / "scale.cu").write_text(text)
    (folder / "stub" / "factor.cuh").write_text("#pragma once\nconstexpr float FACTOR = 2.0f;\n")
