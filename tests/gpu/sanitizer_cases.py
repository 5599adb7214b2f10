"""Small launches for compute-sanitizer: every sm_90a cubin, every page size, both layouts, whole and split pairs;
merged partials and their LSE.

Run: ``compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py``. Prints the number of cases; a wrong
result ends it with an error.
"""

from __future__ import annotations

import os
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
from decode_cases import DecodeCase, DeviceArrays, assert_close, on_device
from reduction_cases import CASES, assert_lse, assert_merged, lse_case, lse_of, make_partials, run_reduction

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.launch.launcher import PreparedLaunch
from cubin_runtime.launch.trtllm_gen.after_main import AfterMain, choose_own, own_launch_plan

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


def reduce_all(runtime: Runtime, rng: np.random.Generator) -> set[str]:
    """Every reduction case and two LSEs; the names of the kernels that ran."""
    driver, own, arrays = runtime.driver, runtime.own_release(), DeviceArrays(runtime.driver)
    context = driver.ensure_context(0)
    major, minor = driver.device(0).capability
    used = set()

    def launch(after: AfterMain) -> None:
        kernel = choose_own(own.kernels, after.operation, after.traits, major * 10 + minor)
        path = own.path_of(kernel)
        plan = own_launch_plan(after, kernel, path, runtime.digest_of(path), own.layouts[kernel.struct])
        PreparedLaunch(plan, runtime.load(kernel, context), driver).launch(0)
        used.add(kernel.name)

    def download(address: int, array: np.ndarray) -> None:
        driver.synchronize(0)
        driver.copy_to_host(array, address)

    for wanted in CASES.values():
        partials = make_partials(wanted, rng)
        assert_merged(wanted, partials, run_reduction(wanted, partials, arrays.upload, launch, download))
    for rows in ((3, 5), (33, 64)):
        statistics, want = lse_case(rows, rng)
        lse = np.empty(rows, dtype=np.float32)
        at = arrays.empty(lse.nbytes)
        launch(lse_of(rows, (rows[1], 1), arrays.upload(statistics), at))
        download(at, lse)
        assert_lse(lse, want)
    arrays.close()
    return used


def main() -> None:
    """Run all cases on device 0."""
    sources = tuple(os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT)).split())
    with tempfile.TemporaryDirectory() as store:
        runtime = Runtime(Config(store=Path(store), sources=sources, offline=True))
        rng = np.random.default_rng(20)
        used: set[str] = set()
        for wanted in cases():
            with on_device(runtime, wanted, rng) as case:
                case.run()
                assert_close(case.result(), case.expected)
                used.add(case.plan.selection.kernel.name)
        used |= reduce_all(runtime, rng)
        runtime.modules.close()
    print(f"{len(cases()) + len(CASES) + 2} cases over {', '.join(sorted(used))}")


if __name__ == "__main__":
    main()
