"""Merging of partial results on a device, against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, merge_states, plan_merge_states
from tests.gpu.merge_cases import MergeArrays, MergeCase, random_case
from tests.gpu.mirrored_arrays import MirroredArrays
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

RANDOM_CASES = int(os.environ.get("CUBIN_RUNTIME_MERGE_CASES", "200"))


@pytest.fixture
def mirror(runtime: Runtime) -> Iterator[MirroredArrays]:
    print(f"seed {SEED}")
    runtime.driver.set_current(runtime.driver.primary_context(0))
    made = MirroredArrays(runtime.driver, 0xFF)  # NaN
    yield made
    made.close()


def merge(runtime: Runtime, mirror: MirroredArrays, case: MergeCase, seed: Any, **options: Any) -> MergeArrays:
    arrays = MergeArrays(case, np.random.default_rng(seed), mirror.make)
    tensors, own = arrays.arguments(mirror.place)
    merge_states(**tensors, **own, **options, runtime=runtime)
    for array in (arrays.out, arrays.lse):
        mirror.place(array, "float32")  # an lse that was not wanted has a copy now, which is as it was
        mirror.download(array)
    arrays.check()
    mirror.arrays.assert_guards()
    return arrays


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_parts_merge_to_float64(runtime: Runtime, mirror: MirroredArrays, index: int) -> None:
    case = random_case(np.random.default_rng((SEED, index)))
    merge(runtime, mirror, case, (SEED, index, 1), enable_pdl=bool(index % 2))


@pytest.mark.parametrize("in_place", [False, True])
def test_more_rows_than_the_grid_has_lanes(runtime: Runtime, mirror: MirroredArrays, in_place: bool) -> None:
    case = MergeCase(tokens=5000, heads=33, parts=2, dim=64, other=True, in_place=in_place, mask=True)
    merge(runtime, mirror, case, SEED)


def test_rows_wider_than_a_warp_merge_in_place(runtime: Runtime, mirror: MirroredArrays) -> None:
    case = MergeCase(tokens=700, heads=16, parts=2, dim=512, other=True, in_place=True, sinks=True)
    merge(runtime, mirror, case, SEED)


def test_the_same_parts_give_the_same_bits(runtime: Runtime, mirror: MirroredArrays) -> None:
    """Alone, among others, with and without neighbours that are masked, as a tensor or as the last part of one."""
    whole = MergeCase(tokens=300, heads=8, parts=4, out="float32")
    arrays = MergeArrays(whole, np.random.default_rng(SEED), mirror.make)
    tensors, options = arrays.arguments(mirror.place)
    plan_merge_states(**tensors, **options, runtime=runtime).run(**tensors)
    mirror.download(arrays.out)
    mirror.download(arrays.lse)
    for token in (0, 171, 299):
        out, lse = mirror.make((1, 8, 128), np.float32), mirror.make((1, 8), np.float32)
        own = slice(token, token + 1)
        given = {
            "parts": mirror.place(arrays.v[own, :3], "bfloat16"),
            "part_lses": mirror.place(arrays.s[own, :3]),
            "other": mirror.place(arrays.v[own, 3], "bfloat16"),
            "other_lse": mirror.place(arrays.s[own, 3]),
            "out": mirror.place(out),
            "lse": mirror.place(lse),
        }
        merge_states(**given, runtime=runtime)
        mirror.download(out)
        mirror.download(lse)
        assert out.tobytes() == arrays.out[own].tobytes()
        assert lse.tobytes() == np.ascontiguousarray(arrays.lse[own]).tobytes()


@pytest.mark.parametrize(("parts", "other"), [(2, False), (2, True), (4, False), (5, True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mask_changes_no_bit_of_what_it_leaves(
    runtime: Runtime, mirror: MirroredArrays, parts: int, other: bool, dtype: str
) -> None:
    results = []
    for masked in (False, True):
        case = MergeCase(tokens=777, parts=parts, dtype=dtype, other=other, out="float32", sinks=True, base="e")
        arrays = MergeArrays(case, np.random.default_rng(SEED), mirror.make)
        arrays.mask = np.ones(case.tokens, bool) if masked else None
        tensors, options = arrays.arguments(mirror.place)
        plan_merge_states(**tensors, **options, runtime=runtime).run(**tensors)
        mirror.download(arrays.out)
        mirror.download(arrays.lse)
        results.append((arrays.out.tobytes(), np.ascontiguousarray(arrays.lse).tobytes()))
    assert results[0] == results[1]
