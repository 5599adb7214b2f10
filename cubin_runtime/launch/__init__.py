"""Everything about the CUDA driver: structs, descriptors, the ABI gate, modules and launches; no network."""

import sys

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "cubin_runtime launches kernels from parameter blocks whose safety between threads rests on the interpreter "
        "lock, which this process runs without: start a free-threaded Python with -X gil=1 or PYTHON_GIL=1"
    )
