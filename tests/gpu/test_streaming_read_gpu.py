"""The kernels that measure read bandwidth read every byte, once, as often as they are launched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.decode.reading import POLICIES, WAYS, Rows, Way, checksum, row_read, streaming_read
from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.constants import CONSTANTS
from cubin_runtime.testing.device import DeviceArrays

pytestmark = pytest.mark.gpu

CHUNK = CONSTANTS.streaming_threads * CONSTANTS.streaming_loads * 16


@pytest.fixture
def arrays(runtime: Runtime) -> Iterator[DeviceArrays]:
    runtime.driver.set_current(runtime.driver.primary_context(0))
    made = DeviceArrays(runtime.driver)
    yield made
    made.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way.ctas == 1], ids=str)
@pytest.mark.parametrize("ctas", [1, 132, 1000])
@pytest.mark.parametrize("nbytes", [0, 16, CHUNK - 16, CHUNK, 7 * CHUNK + 4096 + 16, 200 * CHUNK, 1000 * CHUNK + 48])
def test_the_sums_of_all_ctas_are_the_sum_of_all_words(
    runtime: Runtime, arrays: DeviceArrays, nbytes: int, ctas: int, way: Way
) -> None:
    # The words behind the end would show.
    data = np.random.default_rng(nbytes + ctas).integers(1, 1 << 32, nbytes // 4 + 64, dtype=np.uint32)
    sums = np.full(ctas + 1, 7, dtype=np.uint32)
    at = arrays.upload(sums)
    counters = np.zeros(2, dtype=np.uint32)
    counters_at = arrays.upload(counters)
    launch = streaming_read(runtime, arrays.upload(data), nbytes, at, counters_at, way, ctas)
    for _ in range(2):
        launch.run(0)
        runtime.driver.synchronize(0)
        runtime.driver.copy_to_host(sums, at)
        assert checksum(sums[:ctas]) == checksum(data[: nbytes // 4])
        assert sums[ctas] == 7
    runtime.driver.copy_to_host(counters, counters_at)
    assert not counters.any()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ctas", [1, 132, 500])
@pytest.mark.parametrize("row_bytes", [16, 656, 1152])
@pytest.mark.parametrize("count", [0, 1, 32, 33, 5000])
def test_the_sums_of_all_ctas_are_the_sum_of_the_listed_rows(
    runtime: Runtime, arrays: DeviceArrays, count: int, row_bytes: int, ctas: int, policy: str
) -> None:
    random = np.random.default_rng(count + row_bytes + ctas)
    data = random.integers(1, 1 << 32, (3000, row_bytes // 4), dtype=np.uint32)
    rows = random.integers(0, len(data), count + 1, dtype=np.int32)  # the last is not to be read
    sums = np.full(ctas + 1, 7, dtype=np.uint32)
    at, lists = arrays.upload(sums), arrays.upload(rows)
    launch = row_read(runtime, Rows(arrays.upload(data), row_bytes, count), lists, at, policy, ctas)
    for _ in range(2):
        launch.run(0)
        runtime.driver.synchronize(0)
        runtime.driver.copy_to_host(sums, at)
        assert checksum(sums[:ctas]) == checksum(data[rows[:count]])
        assert sums[ctas] == 7
