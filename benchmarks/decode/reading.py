"""Our streaming read: launches of it, its time over any number of bytes, and its checksum. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch
from cubin_runtime.kernels.native.reduction.select import choose_kernel
from cubin_runtime.launch.prepared import PreparedLaunches

OPERATION = "streaming_read"
UNIT = 16
# CTAs a multiprocessor; four of 512 threads fill it.
CTAS_PER_MULTIPROCESSOR = (1, 2, 3, 4, 8)
# Device time for one median of one grid.
BANDWIDTH_MS, ALONE_MS = 100, 20


def streaming_read(runtime: Runtime, data: int, nbytes: int, sums: int, ctas: int) -> PreparedLaunches:
    """A launch that reads ``nbytes`` at ``data`` and leaves one uint32 for each of ``ctas`` at ``sums``.

    Raises:
        UsageError: our release has no such kernel for the device.
    """
    context = runtime.driver.primary_context(0)
    major, minor = runtime.driver.device(0).capability
    own = runtime.native_release()
    kernel = choose_kernel(own.kernels, OPERATION, {}, major * 10 + minor)
    values = {"data": data, "sums": sums, "units": nbytes // UNIT}
    launch = OperationLaunch(OPERATION, {}, (ctas, 1, 1), (kernel.threads, 1, 1), values, False)
    plan = launch.launch_plan(kernel, own.file_of(kernel))
    return PreparedLaunches([plan], [runtime.load(kernel, context)], runtime.driver)


def checksum(data: np.ndarray) -> int:
    """The sum of the 32-bit words of an array, modulo 2^32, as the sums of all CTAs give it together."""
    return int(np.ascontiguousarray(data).view(np.uint32).sum(dtype=np.uint64)) % (1 << 32)


class StreamingReads:
    """Times of our streaming read on ``stream``, by ``median_us``, which gives a call's device time within so many ms.

    ``sums`` has room for 8 words a multiprocessor and outlives this.
    """

    def __init__(
        self, runtime: Runtime, sums: int, stream: int, median_us: Callable[[Callable[[], None], float], float]
    ) -> None:
        self._runtime, self._sums, self._stream, self._median_us = runtime, sums, stream, median_us
        self._alone: dict[int, float] = {}

    def bandwidth(self, data: int, nbytes: int) -> dict[str, object]:
        """TB/s of reading ``nbytes`` at ``data`` with each grid, and the best of them."""
        by_grid = {str(ctas): nbytes / us / 1e6 for ctas, us in self._by_grid(data, nbytes, BANDWIDTH_MS).items()}
        return {"bytes": nbytes, "tb_per_s": max(by_grid.values()), "tb_per_s_by_ctas": by_grid}

    def alone_us(self, data: int, nbytes: int) -> float:
        """Microseconds of one call that only reads ``nbytes``, with its best grid; measured once for each size."""
        if nbytes not in self._alone:
            self._alone[nbytes] = min(self._by_grid(data, nbytes, ALONE_MS).values())
        return self._alone[nbytes]

    def _by_grid(self, data: int, nbytes: int, rep_ms: float) -> dict[int, float]:
        found = {}
        for each in CTAS_PER_MULTIPROCESSOR:
            ctas = each * self._runtime.driver.device(0).multiprocessors
            launch = streaming_read(self._runtime, data, nbytes, self._sums, ctas)
            found[ctas] = self._median_us(partial(launch.run, self._stream), rep_ms)
        return found
