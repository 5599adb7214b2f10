"""The decode kernels on a real device, against float64."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from decode_cases import (
    POISON,
    DecodeCase,
    assert_close,
    edge_lengths,
    make_host,
    on_device,
    random_case,
    reference_of,
)

from cubin_runtime.attention import ClampedInputError, Runtime, TensorView, plan_paged_decode
from cubin_runtime.attention.reference import bfloat16_values
from cubin_runtime.errors import FrozenError, WorkspaceError

pytestmark = pytest.mark.gpu

SEED = int(os.environ.get("CUBIN_RUNTIME_SEED", np.random.SeedSequence().entropy % (1 << 32)))
RANDOM_CASES = 400
SMALL = DecodeCase(lengths=(300, 17, 0, 128), max_seq_len=512, kv_heads=2, group=8, page_size=64)
LARGE = DecodeCase(lengths=(4096,) * 16, max_seq_len=4096, kv_heads=8, group=8, page_size=64, with_lse=False)


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_case_matches_float64(runtime: Runtime, index: int) -> None:
    rng = np.random.default_rng((SEED, index))
    with on_device(runtime, random_case(rng), rng) as case:
        case.run()
        assert_close(case.result(), case.expected)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_edge_lengths_match_float64(runtime: Runtime, rng: np.random.Generator, page_size: int, kv_layout: str) -> None:
    lengths = edge_lengths(page_size, 1024)
    wanted = DecodeCase(lengths, 1024, kv_heads=2, group=5, page_size=page_size, kv_layout=kv_layout)
    with on_device(runtime, wanted, rng) as case:
        case.run()
        assert_close(case.result(), case.expected)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_matches_float64(runtime: Runtime, rng: np.random.Generator, group: int) -> None:
    with on_device(runtime, replace(SMALL, group=group), rng) as case:
        case.run()
        assert_close(case.result(), case.expected)


def test_one_very_long_request_matches_float64(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, DecodeCase((131072,), 131072, kv_heads=1, group=8, page_size=64), rng) as case:
        case.run()
        assert_close(case.result(), case.expected)


def test_more_requests_than_ctas_match_float64(runtime: Runtime, rng: np.random.Generator) -> None:
    lengths = tuple(int(n) for n in rng.integers(0, 40, size=1000))
    with on_device(runtime, DecodeCase(lengths, 64, kv_heads=1, group=4, page_size=16), rng) as case:
        case.run()
        assert_close(case.result(), case.expected)


def test_200_repeats_give_the_same_bits(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, replace(SMALL, lengths=(4000, 3, 999), max_seq_len=4096), rng) as case:
        case.run()
        first = case.output_bits()
        for _ in range(200):
            case.poison()
            case.run()
            assert np.array_equal(case.output_bits(), first)


def test_graph_replay_follows_lengths_and_tables(runtime: Runtime, rng: np.random.Generator) -> None:
    driver = runtime.driver
    with on_device(runtime, SMALL, rng) as case:
        stream = driver.create_stream(blocking=True)
        workspace = case.plan.prepare(stream)
        case.run(stream, workspace)
        driver.synchronize(stream)
        driver.begin_capture(stream)
        case.run(stream, workspace)
        graph = driver.instantiate(driver.end_capture(stream))
        table, lens = case.tensors[3], case.tensors[4]
        for lengths in ((300, 17, 0, 128), (1, 300, 128, 0), (0, 0, 0, 0), (65, 64, 63, 17)):
            host = replace(case.host, seq_lens=np.asarray(lengths, dtype=np.int32), page_table=_table(case, lengths))
            driver.copy_to_device(lens.pointer, host.seq_lens)
            driver.copy_to_device(table.pointer, host.page_table)
            _clean(case, host)
            case.poison()
            driver.launch_graph(graph, stream)
            driver.synchronize(stream)
            assert_close(case.result(), reference_of(host, case.case.scale))


def _table(case, lengths):
    pages = case.host.k.shape[0]
    table = np.full_like(case.host.page_table, -1)
    free = iter(range(pages))
    for b, length in enumerate(lengths):
        for column in range(-(-length // case.case.page_size)):
            table[b, column] = next(free)
    return table


def _clean(case, host) -> None:
    # Other lengths make rows visible that were NaN before.
    pool = case.host.pool[0]
    pool[pool == 0x7FC0] = 0x3F80
    case.arrays.driver.copy_to_device(case.tensors[1].pointer, np.ascontiguousarray(pool))


def test_two_streams_with_their_own_workspaces_do_not_disturb_each_other(
    runtime: Runtime, rng: np.random.Generator
) -> None:
    driver = runtime.driver
    with on_device(runtime, LARGE, rng) as one, on_device(runtime, replace(LARGE, group=4), rng) as other:
        streams = [driver.create_stream(blocking=True), driver.create_stream(blocking=True)]
        for _ in range(20):
            one.run(streams[0])
            other.run(streams[1])
        for stream in streams:
            driver.synchronize(stream)
        assert_close(one.result(), one.expected)
        assert_close(other.result(), other.expected)


def test_a_chain_of_dependent_launches_with_pdl_is_right(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, replace(LARGE, pdl=True), rng) as case:
        for _ in range(50):
            case.run()
        assert_close(case.result(), case.expected)


def test_a_smaller_bound_and_another_scale_for_one_step(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        case.run(max_seq_len=300, softmax_scale=0.5)
        assert_close(case.result(), reference_of(case.host, 0.5))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [((513, 17, 0, 128), "over max_seq_len"), ((300, -5, 0, 128), "negative")],
)
def test_lengths_outside_their_bounds_are_clamped_and_reported(
    runtime: Runtime, rng: np.random.Generator, lengths: tuple[int, ...], words: str
) -> None:
    clamped = tuple(min(max(n, 0), SMALL.max_seq_len) for n in lengths)
    host = make_host(replace(SMALL, lengths=clamped), rng)
    with on_device(runtime, replace(SMALL, lengths=clamped), rng, host) as case:
        case.arrays.driver.copy_to_device(case.tensors[4].pointer, np.asarray(lengths, dtype=np.int32))
        workspace = case.plan.prepare(0)
        case.run(workspace=workspace)
        assert_close(case.result(), case.expected)
        with pytest.raises(ClampedInputError, match=words):
            case.plan.check(workspace)
        case.plan.check(workspace)


def test_page_ids_outside_the_pool_are_never_followed(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        table = case.host.page_table.copy()
        table[0, 1], table[1, 0] = 1 << 30, -7
        case.arrays.driver.copy_to_device(case.tensors[3].pointer, table)
        workspace = case.plan.prepare(0)
        case.run(workspace=workspace)
        with pytest.raises(ClampedInputError, match="page id"):
            case.plan.check(workspace)


def test_a_kernel_that_is_not_loaded_is_refused_while_capturing(runtime_config, rng: np.random.Generator) -> None:
    fresh = Runtime(runtime_config)
    with on_device(fresh, SMALL, rng) as case:
        stream = fresh.driver.create_stream(blocking=True)
        workspace = case.plan.prepare(stream)
        fresh.driver.begin_capture(stream)
        try:
            with pytest.raises(FrozenError, match="preload"):
                case.run(stream, workspace)
        finally:
            fresh.driver.end_capture(stream)


def test_a_workspace_of_another_stream_is_refused(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        first, second = runtime.driver.create_stream(blocking=True), runtime.driver.create_stream(blocking=True)
        workspace = case.plan.prepare(first)
        with pytest.raises(WorkspaceError, match="belongs to"):
            case.run(second, workspace)


def test_strided_queries_outputs_and_lse_are_followed(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        batch, heads, dim = case.host.q.shape
        wide = np.full((batch, 3, heads, dim), 0x7FC0, dtype=np.uint16)
        wide[:, 1] = case.host.q
        strides = (3 * heads * dim, dim, 1)
        q = TensorView(case.arrays.upload(wide) + 2 * heads * dim, "bfloat16", (batch, heads, dim), strides)
        wide_out = TensorView.contiguous(case.arrays.empty(wide.nbytes), "bfloat16", wide.shape)
        out = TensorView(wide_out.pointer, "bfloat16", (batch, heads, dim), strides)
        columns = TensorView.contiguous(case.arrays.empty(4 * batch * heads), "float32", (heads, batch))
        lse = TensorView(columns.pointer, "float32", (batch, heads), (1, batch))
        tensors = (q, *case.tensors[1:5], out, lse)
        plan = plan_paged_decode(*tensors, max_seq_len=SMALL.max_seq_len, softmax_scale=SMALL.scale, runtime=runtime)
        plan.run(*tensors, workspace=plan.prepare(0))
        got = case.arrays.download(wide_out, np.uint16)
        assert_close((bfloat16_values(got[:, 0]), case.arrays.download(columns, np.float32).T), case.expected)
        untouched = np.frombuffer(bytes([POISON]) * 2, dtype=np.uint16)[0]
        assert (got[:, 1:] == untouched).all()
