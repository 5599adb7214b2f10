"""FlashMLA as a peer of the MLA decode: built from its sources, since no wheel of it is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import torch

from .mla_measuring import SCALE, MlaProblem
from .timing import Call

_BINDING = """#include <pybind11/pybind11.h>
#include <torch/extension.h>
#include "api/dense_decode.h"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("dense_decode_fwd", &dense_attn_decode_interface); }
"""
_SOURCES = (
    "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu",
    "smxx/decode/combine/combine.cu",
    "sm90/decode/dense/instantiations/bf16.cu",
)
_INCLUDES = ("csrc", "csrc/kerutils/include", "csrc/sm90", "cutlass/include", "cutlass/tools/util/include")
_TOOLKIT = ("{home}*/include/cccl", "/usr/local/cuda*/targets/x86_64-linux/include/cccl")
_UNDEFINED = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
_FLAGS = ("-O3", "-std=c++20", "-DNDEBUG", "-DFLASH_MLA_DISABLE_FP16")


def build(folder: Path) -> Any:
    """The extension, compiled from ``folder``: its ``csrc``, and ``cutlass`` with the headers of its submodule."""
    from torch.utils.cpp_extension import load

    binding = folder / "binding.cpp"
    if not binding.exists():
        binding.write_text(_BINDING)
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    toolkit = [found for pattern in _TOOLKIT for found in glob(pattern.format(home=home))]
    device = [f"-U__CUDA_NO_{name}__" for name in _UNDEFINED]
    device += ["-D_USE_MATH_DEFINES", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"]
    device += ["--ptxas-options=--register-usage-level=10", "-gencode", "arch=compute_90a,code=sm_90a"]
    return load(
        "flash_mla_peer",
        [str(binding), *(str(folder / "csrc" / source) for source in _SOURCES)],
        extra_include_paths=[*(str(folder / include) for include in _INCLUDES), *toolkit],
        extra_cflags=list(_FLAGS),
        extra_cuda_cflags=[*_FLAGS, *device],
    )


def maker(extension: Any) -> Callable[[MlaProblem], list[Call]]:
    """Its calls of a problem, one for each page table, planned before."""

    def calls(problem: MlaProblem) -> list[Call]:
        p, case = problem, problem.case
        q = p.q.view(case.batch, case.q_len, case.heads, case.width)
        cache = p.cache.unsqueeze(2)
        run = partial(extension.dense_decode_fwd, q, cache, case.latent, p.lens)
        options = (SCALE, case.q_len > 1)
        _, _, metadata, splits = run(p.tables[0], *options, None, None)

        def call_of(table: torch.Tensor) -> Call:
            return lambda: run(table, *options, metadata, splits)[0]

        return [call_of(table) for table in p.tables]

    return calls
