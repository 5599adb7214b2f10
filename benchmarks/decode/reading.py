"""Our streaming read: launches of it, the read bandwidth that it shows, and its checksum. No torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cubin_runtime.attention import Runtime
from cubin_runtime.launch.launcher import PreparedLaunch
from cubin_runtime.launch.trtllm_gen.after_main import AfterMain, choose_own, own_launch_plan

OPERATION = "streaming_read"
UNIT = 16
# CTAs a multiprocessor; four of 512 threads fill it.
CTAS_PER_MULTIPROCESSOR = (1, 2, 3, 4, 8)


def streaming_read(runtime: Runtime, data: int, nbytes: int, sums: int, ctas: int) -> PreparedLaunch:
    """A launch that reads ``nbytes`` at ``data`` and leaves one uint32 for each of ``ctas`` at ``sums``.

    Raises:
        UsageError: our release has no such kernel for the device.
    """
    context = runtime.driver.ensure_context(0)
    major, minor = runtime.driver.device(0).capability
    own = runtime.own_release()
    kernel = choose_own(own.kernels, OPERATION, {}, major * 10 + minor)
    path = own.path_of(kernel)
    values = {"data": data, "sums": sums, "units": nbytes // UNIT}
    launch = AfterMain(OPERATION, {}, (ctas, 1, 1), (kernel.threads, 1, 1), values, False)
    plan = own_launch_plan(launch, kernel, path, runtime.digest_of(path), own.layouts[kernel.struct])
    return PreparedLaunch(plan, runtime.load(kernel, context), runtime.driver)


def checksum(data: np.ndarray) -> int:
    """The sum of the 32-bit words of an array, modulo 2^32, as the sums of all CTAs give it together."""
    return int(np.ascontiguousarray(data).view(np.uint32).sum(dtype=np.uint64)) % (1 << 32)


def read_bandwidth(
    runtime: Runtime, data: int, nbytes: int, sums: int, stream: int, median_us: Callable[[Callable[[], None]], float]
) -> dict[str, object]:
    """TB/s of reading ``nbytes`` with each grid, and the best of them.

    ``sums`` has room for 8 words a multiprocessor; ``median_us`` gives the device time of a call.
    """
    by_grid = {}
    for each in CTAS_PER_MULTIPROCESSOR:
        ctas = each * runtime.driver.device(0).multiprocessors
        launch = streaming_read(runtime, data, nbytes, sums, ctas)

        def call(launch: PreparedLaunch = launch) -> None:
            launch.launch(stream)

        by_grid[str(ctas)] = nbytes / median_us(call) / 1e6
    return {"bytes": nbytes, "tb_per_s": max(by_grid.values()), "tb_per_s_by_ctas": by_grid}
