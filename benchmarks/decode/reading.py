"""Our read-only tests: launches of them, contestants of a sequence, their limits, and the checksum. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch
from cubin_runtime.kernels.native.reduction.select import choose_kernel
from cubin_runtime.launch.prepared import PreparedLaunches

OPERATION = "streaming_read"
UNIT = 16
COUNTERS_BYTES = 8
READ = "read: "  # what names of contestants that only read begin with


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read: a kernel by its traits, and how many CTAs a multiprocessor gets."""

    way: str
    l2_policy: str
    ctas: int

    def __str__(self) -> str:
        return f"{self.way}, {self.l2_policy}, {self.ctas} CTAs a multiprocessor"


POLICIES = ("evict_first", "evict_unchanged")
WAYS = tuple(
    Way(way, policy, ctas)
    for way, grids in (("streaming_read", (1, 2, 4, 8)), ("bulk_read", (1, 2)))
    for policy in POLICIES
    for ctas in grids
)


class Rows(NamedTuple):
    """Rows that lists name: where the first lies, the bytes of one, and how many a list names."""

    data: int
    nbytes: int
    count: int


def streaming_read(
    runtime: Runtime, data: int, nbytes: int, sums: int, counters: int, way: Way, ctas: int
) -> PreparedLaunches:
    """A launch that reads ``nbytes`` at ``data`` and leaves one uint32 for each of ``ctas`` at ``sums``.

    ``counters`` are two uint32, zero before and after.

    Raises:
        UsageError: our release has no such kernel for the device.
    """
    traits = {"way": way.way, "l2_policy": way.l2_policy}
    values = {"data": data, "sums": sums, "counters": counters, "units": nbytes // UNIT}
    return _launch(runtime, OPERATION, traits, ctas, values)


def row_read(runtime: Runtime, rows: Rows, indices: int, sums: int, l2_policy: str, ctas: int) -> PreparedLaunches:
    """As ``streaming_read``, of the rows that the int32 at ``indices`` name."""
    values = {
        "data": rows.data,
        "indices": indices,
        "sums": sums,
        "rows": rows.count,
        "row_bytes": rows.nbytes,
    }
    return _launch(runtime, "row_read", {"l2_policy": l2_policy}, ctas, values)


def _launch(
    runtime: Runtime, operation: str, traits: Mapping[str, str], ctas: int, values: Mapping[str, int]
) -> PreparedLaunches:
    context = runtime.driver.primary_context(0)
    major, minor = runtime.driver.device(0).capability
    own = runtime.native_release()
    kernel = choose_kernel(own.kernels, operation, traits, major * 10 + minor)
    launch = OperationLaunch(operation, traits, (ctas, 1, 1), (kernel.threads, 1, 1), values, False)
    plan = launch.launch_plan(kernel, own.file_of(kernel))
    return PreparedLaunches([plan], [runtime.load(kernel, context)], runtime.driver)


def checksum(data: np.ndarray) -> int:
    """The sum of the 32-bit words of an array, modulo 2^32, as the sums of all CTAs give it together."""
    return int(np.ascontiguousarray(data).view(np.uint32).sum(dtype=np.uint64)) % (1 << 32)


class StreamingReads:
    """Our read-only tests as contestants of a sequence.

    ``memory`` is zeroed, has room for two words and 8 more for each multiprocessor, and outlives this.
    """

    def __init__(self, runtime: Runtime, memory: int) -> None:
        self._runtime, self._memory = runtime, memory

    def makers(self, data: int, nbytes: int, layers: int) -> dict[str, Callable[[Any], list[Callable[[], None]]]]:
        """A contestant for each way: in each layer it reads the next ``nbytes`` from ``data`` on."""

        def of_way(way: Way, stream: Any) -> list[Callable[[], None]]:
            starts = [data + layer * (nbytes // UNIT * UNIT) for layer in range(layers)]
            return [partial(self._launch(at, nbytes, way).run, stream.cuda_stream) for at in starts]

        return {f"{READ}{way}": partial(of_way, way) for way in WAYS}

    def makers_of_rows(self, rows: Rows, lists: Sequence[int]) -> dict[str, Callable[[Any], list[Callable[[], None]]]]:
        """A contestant for each L2 policy: in each layer it reads the rows that one of ``lists`` names."""

        def of_policy(l2_policy: str, stream: Any) -> list[Callable[[], None]]:
            sums, ctas = self._memory + COUNTERS_BYTES, self._multiprocessors
            launches = [row_read(self._runtime, rows, at, sums, l2_policy, ctas) for at in lists]
            return [partial(launch.run, stream.cuda_stream) for launch in launches]

        return {f"{READ}rows, {policy}": partial(of_policy, policy) for policy in POLICIES}

    @property
    def _multiprocessors(self) -> int:
        return self._runtime.driver.device(0).multiprocessors

    def _launch(self, data: int, nbytes: int, way: Way) -> PreparedLaunches:
        ctas = way.ctas * self._multiprocessors
        return streaming_read(self._runtime, data, nbytes, self._memory + COUNTERS_BYTES, self._memory, way, ctas)


def bandwidth_of(times: Mapping[str, Mapping[str, Any]], nbytes: int) -> dict[str, object]:
    """TB/s of the read-only contestants of a sequence that read ``nbytes`` in a layer, and the best of them."""
    by_way = {name: nbytes / us / 1e6 for name, us in _reads_of(times).items()}
    return {"bytes": nbytes, "tb_per_s": max(by_way.values()), "tb_per_s_by_way": by_way}


def _reads_of(times: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds by way to read."""
    return {name.removeprefix(READ): one["us"] for name, one in times.items() if name.startswith(READ) and "us" in one}


def limit_of(times: Mapping[str, Mapping[str, Any]]) -> dict[str, object]:
    """The least time of the read-only contestants in a sequence's times, and whose it is."""
    found = _reads_of(times)
    best = min(found, key=found.__getitem__)
    return {"read_alone_us": found[best], "read_alone_way": best}


def enter_times(row: dict[str, Any], times: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill in the times of a sequence: ours, the peers', reading alone, nothing, and the default where it was timed."""
    for name, found in {"ours": row["ours"], **row["peers"]}.items():
        found |= times.get(name, {})
    row |= limit_of(times)
    row["nothing_us"] = times["nothing"]["us"]
    us = row["ours"].get("us")
    if us and "us" in times.get("default", {}):
        row["default_us"] = times["default"]["us"]
        row["over_default"] = us / row["default_us"]
