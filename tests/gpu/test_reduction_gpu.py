"""The kernels behind trtllm-gen launches on a real device, over made-up partials, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch
from cubin_runtime.kernels.native.reduction.select import choose_kernel
from cubin_runtime.launch.prepared import PreparedLaunches
from cubin_runtime.testing.device import DeviceArrays
from tests.gpu.reduction_cases import (
    CASES,
    ReductionCase,
    assert_lse,
    assert_merged,
    lse_case,
    lse_of,
    make_partials,
    random_case,
    reduction_of,
    run_reduction,
)
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

RANDOM_CASES = 60


class Device:
    """Launches our kernels over arrays copied to the device."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.context = runtime.driver.primary_context(0)
        runtime.driver.set_current(self.context)
        self.arrays = DeviceArrays(runtime.driver)
        major, minor = runtime.driver.device(0).capability
        self.sm = major * 10 + minor

    def launch(self, after: OperationLaunch) -> None:
        own = self.runtime.native_release()
        kernel = choose_kernel(own.kernels, after.operation, after.traits, self.sm)
        plan = after.launch_plan(kernel, own.file_of(kernel))
        PreparedLaunches([plan], [self.runtime.load(kernel, self.context)], self.runtime.driver).run(0)

    def download(self, address: int, array: np.ndarray) -> None:
        self.runtime.driver.synchronize(0)
        self.runtime.driver.copy_to_host(array, address)

    def reduce(self, case: ReductionCase, rng: np.random.Generator) -> None:
        partials = make_partials(case, rng)
        got = run_reduction(case, partials, self.arrays.upload, self.launch, self.download)
        assert_merged(case, partials, got)


@pytest.fixture
def device(runtime: Runtime) -> Iterator[Device]:
    made = Device(runtime)
    yield made
    made.arrays.close()


@pytest.mark.parametrize("name", CASES)
def test_partials_merge_to_float64(device: Device, rng: np.random.Generator, name: str) -> None:
    device.reduce(CASES[name], rng)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_partials_merge_to_float64(device: Device, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    device.reduce(random_case(rng), rng)


def test_the_same_partials_give_the_same_bits_however_ctas_share_the_tile(
    device: Device, rng: np.random.Generator
) -> None:
    wide, narrow = (ReductionCase((9000, 700), ctas_kv=19, ctas_per_tile=n) for n in (8, 1))
    partials = make_partials(wide, rng)
    runs = [
        run_reduction(case, partials, device.arrays.upload, device.launch, device.download) for case in (wide, narrow)
    ]
    assert np.array_equal(runs[0][0], runs[1][0])
    assert np.array_equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [(1, 1), (3, 5), (16, 64), (33, 128), (1000, 7)])
def test_statistics_become_an_lse(device: Device, rng: np.random.Generator, rows: tuple[int, int], pdl: bool) -> None:
    statistics, want = lse_case(rows, rng)
    # Heads in front of tokens, with gaps: strides of the caller's choice.
    lse = np.full((rows[1], rows[0] + 3), 7.0, dtype=np.float32)
    at = device.arrays.upload(lse)
    device.launch(lse_of(rows, (1, rows[0] + 3), device.arrays.upload(statistics), at, pdl=pdl))
    device.download(at, lse)
    assert_lse(lse[:, : rows[0]].T, want)
    assert (lse[:, rows[0] :] == 7.0).all()


@pytest.mark.parametrize("pdl", [False, True])
def test_the_lse_of_a_reduction_waits_for_its_statistics(device: Device, rng: np.random.Generator, pdl: bool) -> None:
    case = ReductionCase((9000, 0, 700), ctas_kv=19, pdl=pdl)
    partials = make_partials(case, rng)
    upload = device.arrays.upload
    addresses = {name: upload(array) for name, array in partials.arrays().items() if array is not None}
    addresses["out"] = device.arrays.empty(2 * case.tokens * case.heads_q * 512)
    addresses["softmax_statistics"] = device.arrays.empty(8 * case.tokens * case.heads_q)
    lse = np.empty((case.tokens, case.heads_q), dtype=np.float32)
    at = device.arrays.empty(lse.nbytes)
    device.launch(reduction_of(case, addresses))
    device.launch(lse_of(lse.shape, (case.heads_q, 1), addresses["softmax_statistics"], at, pdl=pdl))
    statistics = np.empty((case.tokens, case.heads_q, 2), dtype=np.float32)
    device.download(addresses["softmax_statistics"], statistics)
    device.download(at, lse)
    with np.errstate(divide="ignore"):
        want = statistics[..., 0].astype(np.float64) * np.log2(np.e) + np.log2(statistics[..., 1].astype(np.float64))
    assert_lse(lse, want)
    assert np.isneginf(lse[1]).all()
