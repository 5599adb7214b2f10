"""KV append, planned as the operator does and compiled for the host: every byte of the caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import plan_append_kv
from cubin_runtime.kernels.native.constants import CONSTANTS, StatusBit
from tests.gpu.append_cases import UNTOUCHED, AppendArrays, AppendCase, random_case
from tests.kernels_src.host_operators import SMALL, HostOperators, aligned, view_on

RANDOM_CASES = 60
PLAIN = AppendCase((5, 0, 40, 1), (30, 7, 0, 64))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostOperators:
    return HostOperators(tmp_path_factory.mktemp("host"))


def make(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return aligned(shape, dtype, UNTOUCHED)


def append(host: HostOperators, arrays: AppendArrays) -> int:
    kept: list[np.ndarray] = []

    def place(array: np.ndarray, dtype: str | None) -> Any:
        kept.append(array)
        return view_on(array, dtype)

    tensors, options = arrays.arguments(place)
    plan = plan_append_kv(**tensors, **options, runtime=host.runtime, device_facts=SMALL)
    return host.run(plan, tensors, plan.numbers_of({name: tensors.get(name) for name in ("k_scale", "v_scale")}))


def check(host: HostOperators, case: AppendCase, rng: np.random.Generator) -> None:
    arrays = AppendArrays(case, rng, make)
    expected = arrays.expected()
    assert append(host, arrays) == 0
    assert np.array_equal(arrays.whole, expected), case
    assert (expected.view(np.uint8) != UNTOUCHED).any() == (sum(case.new) > 0)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_every_byte_of_the_caches_is_as_expected(host: HostOperators, index: int) -> None:
    rng = np.random.default_rng((7, index))
    check(host, random_case(rng), rng)


def test_many_chunks_and_many_requests(host: HostOperators) -> None:
    rng = np.random.default_rng(3)
    check(host, AppendCase((900, 3, 700), (0, 100, 5), page_size=64), rng)
    batch = CONSTANTS.append_shared_requests + 300
    new = tuple(int(n) for n in rng.integers(0, 3, batch))
    check(host, AppendCase(new, (9,) * batch, page_size=4, dims=(32, 32), kv_heads=1), rng)


def test_a_row_of_many_heads_and_one_token(host: HostOperators) -> None:
    check(host, AppendCase((1,), (0,), kv_heads=128, dims=(256, 256)), np.random.default_rng(4))


@pytest.mark.parametrize(
    ("name", "index", "value", "bit"),
    [
        ("page_table", (2, 1), 10**6, StatusBit.PAGE_OUTSIDE_POOL),
        ("page_table", (0, 2), -1, StatusBit.PAGE_OUTSIDE_POOL),
        ("seq_lens", 0, -3, StatusBit.LENGTH_NEGATIVE),
        ("seq_lens", 3, 81, StatusBit.POSITION_WITHOUT_PAGE),
        ("seq_lens", 3, 2**31 - 1, StatusBit.POSITION_WITHOUT_PAGE),
        ("q_cu_seq_lens", 2, 47, StatusBit.TOKEN_OF_NO_REQUEST),
        ("q_cu_seq_lens", 0, 2, StatusBit.TOKEN_OF_NO_REQUEST),
    ],
)
def test_what_is_outside_is_skipped_and_reported(
    host: HostOperators, name: str, index: Any, value: int, bit: StatusBit
) -> None:
    arrays = AppendArrays(PLAIN, np.random.default_rng(5), make)
    whole = arrays.expected()
    getattr(arrays, name)[index] = value
    assert append(host, arrays) & bit
    written = arrays.whole != np.frombuffer(bytes([UNTOUCHED] * 2), np.uint16)[0]
    wanted = whole != np.frombuffer(bytes([UNTOUCHED] * 2), np.uint16)[0]
    if name != "q_cu_seq_lens":  # else tokens change their requests
        assert not (written & ~wanted).any()
    assert written.sum() < wanted.sum()


def test_a_request_index_outside_the_batch_is_reported_and_a_negative_one_is_padding(host: HostOperators) -> None:
    case = replace(PLAIN, by="token")
    for request, bits in ((len(case.new), StatusBit.TOKEN_OF_NO_REQUEST), (-1, 0), (-(2**31), 0)):
        arrays = AppendArrays(case, np.random.default_rng(6), make)
        arrays.requests[0] = request
        expected = replace_token(arrays)
        assert append(host, arrays) == bits
        assert np.array_equal(arrays.whole, expected)


def replace_token(arrays: AppendArrays) -> np.ndarray:
    """What the caches hold without the first token."""
    kept, arrays.requests[0] = int(arrays.requests[0]), -1
    expected = arrays.expected()
    arrays.requests[0] = kept
    return expected


def test_a_ragged_table_that_leaves_the_page_ids_is_reported(host: HostOperators) -> None:
    arrays = AppendArrays(replace(PLAIN, ragged_table=True), np.random.default_rng(8), make)
    assert arrays.page_indptr is not None
    arrays.page_indptr[-2:] += 1000
    assert append(host, arrays) == StatusBit.POSITION_WITHOUT_PAGE
