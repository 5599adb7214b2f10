"""The layer on the CUDA driver: structs, descriptors, the ABI gate, modules and launches; no network."""

import sys

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "cubin_runtime launches kernels from parameter blocks that are thread-safe only with the global interpreter "
        "lock, which is disabled in this process: start a free-threaded Python with -X gil=1 or PYTHON_GIL=1"
    )
