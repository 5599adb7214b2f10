"""FlashMLA's dense and sparse decodes as a shared library, from its sources; needs nvcc and neither torch nor a GPU.

Run: ``python benchmarks/decode/flash_mla_build.py SOURCES LIBRARY``. SOURCES is a clone with its submodule, or an
extracted copy that says its commit in a file COMMIT and has the headers of CUTLASS in ``csrc/cutlass``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

LAUNCHER = Path(__file__).with_name("flash_mla.cu")
_SOURCES = (
    "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu",
    "smxx/decode/combine/combine.cu",
    "sm90/decode/dense/instantiations/bf16.cu",
    "sm90/decode/sparse_fp8/instantiations/v32_persistent_h64.cu",
    "sm90/decode/sparse_fp8/instantiations/v32_persistent_h128.cu",
)
_INCLUDES = ("", "kerutils/include", "sm90", "cutlass/include", "cutlass/tools/util/include")
_FLAGS = (
    *("-shared", "-O3", "-std=c++20", "-Xcompiler", "-fPIC", "-Xlinker", "-s", "-DNDEBUG", "-D_USE_MATH_DEFINES"),
    *("-DFLASH_MLA_DISABLE_FP16", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"),
    *("--ptxas-options=--register-usage-level=10", "-gencode", "arch=compute_90a,code=sm_90a", "--threads", "4"),
)


def command(sources: Path, library: Path, nvcc: str, commit: str) -> list[str]:
    """What compiles the library; its own flags are those of FlashMLA's ``setup.py``."""
    csrc = sources / "csrc"
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    includes = [*(csrc / name for name in _INCLUDES), toolkit / "targets/x86_64-linux/include/cccl"]
    files = [LAUNCHER, *(csrc / name for name in _SOURCES)]
    given = [*(f"-I{folder}" for folder in includes), f'-DFLASH_MLA_COMMIT="{commit}"']
    return [nvcc, *_FLAGS, *given, *map(str, files), "-o", str(library)]


def commit_of(sources: Path) -> str:
    """The commit of the sources."""
    stated = sources / "COMMIT"
    if stated.is_file():
        return stated.read_text().strip()
    asked = ["git", "-C", str(sources), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Compile; 1 without nvcc, else the exit code of nvcc."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("library", type=Path)
    chosen = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("nvcc is not on PATH")
        return 1
    made = command(chosen.sources, chosen.library, nvcc, commit_of(chosen.sources))
    return subprocess.run(made, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
