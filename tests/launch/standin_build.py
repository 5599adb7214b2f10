"""The package's stand-in for libcuda, by the name that tests know it by."""

from __future__ import annotations

from cubin_runtime.testing.standin import SOURCE, Call, StandIn, build_standin, compile_c, cuda_include

__all__ = ["SOURCE", "Call", "StandIn", "build_standin", "compile_c", "cuda_include"]
