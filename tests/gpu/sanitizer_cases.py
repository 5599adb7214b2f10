"""Small cases for compute-sanitizer: every sm_90a cubin; for decodes page sizes, layouts, whole and split pairs.

Run: ``compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py``. Prints the number of cases; a wrong
result ends it with an error.
"""

from __future__ import annotations

import os
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from decode_cases import DecodeCase, assert_close, on_device
from test_reduction_gpu import CASES, run_lse, run_reduction

from cubin_runtime import Config
from cubin_runtime.attention import Runtime

BUILT = Path(__file__).resolve().parents[2] / "build" / "artifacts"
GROUPS = (1, 8, 9, 16)
PAGE_SIZES = (16, 64, 256)
# Whole pairs, split pairs with a ragged end, empty requests, a length of one.
LENGTHS = ((1,), (700,), (0, 65, 64, 129), (300, 0, 1, 17, 512))


def cases() -> list[DecodeCase]:
    """96 cases: groups x page sizes x layouts x lengths; LSE, combined caches and PDL alternate."""
    crossed = product(GROUPS, PAGE_SIZES, ("NHD", "HND"), LENGTHS)
    return [
        DecodeCase(
            lengths=lengths,
            max_seq_len=max(lengths),
            kv_heads=1 + index % 2,
            group=group,
            page_size=page_size,
            kv_layout=layout,
            combined=index % 3 > 0,
            with_lse=index % 2 == 0,
            pdl=index % 5 == 0,
        )
        for index, (group, page_size, layout, lengths) in enumerate(crossed)
    ]


def main() -> None:
    """Run all cases on device 0."""
    sources = tuple(os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT)).split())
    with tempfile.TemporaryDirectory() as store:
        runtime = Runtime(Config(store=Path(store), sources=sources, offline=True))
        rng = np.random.default_rng(20)
        used = set()
        for wanted in cases():
            with on_device(runtime, wanted, rng) as case:
                case.run()
                assert_close(case.result(), case.expected)
                used.add(case.plan.selection.kernel.name)
        for reduction in CASES.values():
            run_reduction(runtime, reduction, rng)
        run_lse(runtime, 3, 7)
        used |= {
            kernel.name for kernel in runtime.own_release().kernels if kernel.sm == "90a" and kernel.family != "fmha"
        }
        runtime.modules.close()
    print(f"{len(cases()) + len(CASES) + 1} cases over {', '.join(sorted(used))}")


if __name__ == "__main__":
    main()
