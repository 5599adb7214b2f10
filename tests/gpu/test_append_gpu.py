"""KV append on a device: every byte of the caches and of what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import AppendKvPlan, ClampedInputError, Runtime, append_kv, plan_append_kv
from cubin_runtime.kernels.native.constants import CONSTANTS
from tests.gpu.append_cases import UNTOUCHED, AppendArrays, AppendCase, random_case
from tests.gpu.mirrored_arrays import MirroredArrays
from tests.gpu.seeds import SEED

pytestmark = pytest.mark.gpu

RANDOM_CASES = int(os.environ.get("CUBIN_RUNTIME_APPEND_CASES", "300"))
PLAIN = AppendCase((5, 0, 40, 1), (30, 7, 0, 64))


@pytest.fixture
def mirror(runtime: Runtime) -> Iterator[MirroredArrays]:
    runtime.driver.set_current(runtime.driver.primary_context(0))
    made = MirroredArrays(runtime.driver, UNTOUCHED)
    yield made
    made.close()


class Placed:
    """A case on the device, and its plan."""

    def __init__(
        self, runtime: Runtime, mirror: MirroredArrays, case: AppendCase, rng: np.random.Generator, **options: Any
    ) -> None:
        self.runtime, self.mirror = runtime, mirror
        self.arrays = AppendArrays(case, rng, mirror.make)
        self.expected = self.arrays.expected()
        self.tensors, own = self.arrays.arguments(mirror.place)
        self.options = {**own, **options}
        self.plan: AppendKvPlan = plan_append_kv(**self.tensors, **self.options, runtime=runtime)

    def check(self) -> None:
        self.mirror.download(self.arrays.whole)
        assert np.array_equal(self.arrays.whole, self.expected), self.arrays.case
        self.mirror.arrays.assert_guards()

    def run(self) -> None:
        self.plan.run(**self.tensors)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_every_byte_of_the_caches_is_as_expected(runtime: Runtime, mirror: MirroredArrays, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    placed = Placed(runtime, mirror, random_case(rng), rng, enable_pdl=bool(index % 2))
    append_kv(**placed.tensors, **placed.options, runtime=runtime)
    placed.check()
    placed.run()  # over itself: nothing changes
    placed.check()
    placed.plan.check(placed.plan.prepare(0))


def test_many_chunks_and_many_requests(runtime: Runtime, mirror: MirroredArrays, rng: np.random.Generator) -> None:
    long = AppendCase((30000, 3, 12000), (0, 100, 5), page_size=64, kv_heads=1, dims=(32, 32))
    batch = CONSTANTS.append_shared_requests + 300
    short = AppendCase((1,) * batch, (90,) * batch, page_size=4, kv_heads=1, dims=(32, 32))
    for case in (long, short, AppendCase((1,), (0,), kv_heads=128, dims=(256, 256))):
        placed = Placed(runtime, mirror, case, rng)
        placed.run()
        placed.check()


def test_pages_beyond_4_gib_are_reached(runtime: Runtime, mirror: MirroredArrays, rng: np.random.Generator) -> None:
    page_bytes, pages = 1 << 20, 5000
    key, value = (rng.integers(0, 1 << 16, (3, 1, 64)).astype(np.uint16) for _ in range(2))
    cache = runtime.driver.allocate(pages * page_bytes)
    try:
        from cubin_runtime.attention import TensorView

        view = TensorView(cache, "bfloat16", (pages, 16, 1, 64), (page_bytes // 2, 128, 64, 1))
        given = {
            "k": mirror.place(key, "bfloat16"),
            "v": mirror.place(value, "bfloat16"),
            "k_cache": view,
            "v_cache": replace(view, pointer=cache + 4096),
            "page_table": mirror.place(np.array([[pages - 1]], np.int32)),
            "seq_lens": mirror.place(np.array([16], np.int32)),
            "q_cu_seq_lens": mirror.place(np.array([0, 3], np.int32)),
        }
        append_kv(**given, runtime=runtime)
        runtime.driver.synchronize(0)
        for array, start in ((key, 0), (value, 4096)):
            at = cache + (pages - 1) * page_bytes + start + 13 * 256
            rows = [runtime.driver.read(at + 256 * token, 128) for token in range(3)]
            assert b"".join(rows) == array.tobytes()
    finally:
        runtime.driver.free(cache)


@pytest.mark.parametrize(
    ("name", "index", "value", "words"),
    [
        ("page_table", (2, 1), 10**6, "a page id outside the pool"),
        ("page_table", (0, 2), -1, "a page id outside the pool"),
        ("seq_lens", 0, -3, "a negative length"),
        ("seq_lens", 3, 2**31 - 1, "a position behind the pages of its request"),
        ("q_cu_seq_lens", 2, 2**31 - 1, "a token of no request"),
        ("q_cu_seq_lens", 0, -(2**31), "a token of no request"),
    ],
)
def test_what_is_outside_is_skipped_and_reported(
    runtime: Runtime, mirror: MirroredArrays, rng: np.random.Generator, name: str, index: Any, value: int, words: str
) -> None:
    placed = Placed(runtime, mirror, PLAIN, rng)
    array = getattr(placed.arrays, name)
    array[index] = value
    mirror.upload(array)
    placed.run()
    mirror.download(placed.arrays.whole)
    with pytest.raises(ClampedInputError, match=words):
        placed.plan.check(placed.plan.prepare(0))
    written = placed.arrays.whole.view(np.uint8) != UNTOUCHED
    if name != "q_cu_seq_lens":
        assert not (written & (placed.expected.view(np.uint8) == UNTOUCHED)).any()
    assert written.sum() < (placed.expected.view(np.uint8) != UNTOUCHED).sum()
    mirror.arrays.assert_guards()


def test_a_graph_replays_over_other_lengths_and_pages(
    runtime: Runtime, mirror: MirroredArrays, rng: np.random.Generator
) -> None:
    driver, placed = runtime.driver, Placed(runtime, mirror, PLAIN, rng, enable_pdl=True)
    arrays, stream = placed.arrays, driver.create_stream(blocking=True)
    placed.plan.preload()
    workspace = placed.plan.prepare(stream, graphs=1)
    driver.begin_capture(stream)
    placed.plan.run(**placed.tensors, workspace=workspace, stream=stream)
    graph = driver.instantiate(driver.end_capture(stream))
    for before in ((30, 7, 0, 64), (9, 0, 17, 3)):
        new = AppendArrays(replace(PLAIN, before=before), rng, mirror.make)
        expected = new.expected()
        for name in ("page_table", "seq_lens", "q_cu_seq_lens", "k", "v"):
            to, of = getattr(arrays, name), getattr(new, name)
            to[tuple(slice(0, size) for size in of.shape)] = of
            mirror.upload(to)
        arrays.whole[...] = np.frombuffer(bytes([UNTOUCHED] * 2), np.uint16)[0]
        mirror.upload(arrays.whole)
        driver.synchronize(0)
        driver.launch_graph(graph, stream)
        driver.synchronize(stream)
        mirror.download(arrays.whole)
        assert np.array_equal(arrays.whole[: len(expected)], expected)
        placed.plan.check(workspace, stream)
    driver.destroy_executable(graph)


def test_it_waits_for_the_kernel_that_makes_its_input(runtime: Runtime, mirror: MirroredArrays) -> None:
    """The second append reads what the first one writes: both are launched with PDL, many times."""
    rng = np.random.default_rng(SEED)
    case = AppendCase((512,), (0,), page_size=512, kv_heads=8, dims=(128, 128))
    placed = Placed(runtime, mirror, case, rng, enable_pdl=True)
    second = AppendArrays(case, rng, mirror.make)
    tensors, options = second.arguments(mirror.place)
    page = int(placed.arrays.page_table[0, 0])
    moved = {name: placed.tensors[cache] for name, cache in (("k", "k_cache"), ("v", "v_cache"))}
    for name, view in moved.items():
        at = view.pointer + page * view.strides[0] * 2
        tensors[name] = replace(view, pointer=at, shape=view.shape[1:], strides=view.strides[1:])
    after = plan_append_kv(**tensors, **options, enable_pdl=True, runtime=runtime)
    for _ in range(50):
        mirror.arrays.driver.fill(placed.tensors["k_cache"].pointer, UNTOUCHED, placed.arrays.whole.nbytes, 0)
        placed.run()
        after.run(**tensors)
    for arrays in (placed.arrays, second):
        mirror.download(arrays.whole)
    target = int(second.page_table[0, 0])
    assert np.array_equal(second.whole[target], placed.expected[page])
