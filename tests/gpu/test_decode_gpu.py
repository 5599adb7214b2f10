"""The decode kernels on a real device, against float64: edges, extremes, and what a plan refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.errors import FrozenError, WorkspaceError
from cubin_runtime.testing import GraphDriver
from tests.gpu.decode_cases import DecodeCase, edge_lengths, reference_of
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_device import on_device
from tests.gpu.decode_random import HEAD_DIMS, PAGE_SIZES, Q_DTYPES

pytestmark = pytest.mark.gpu

SMALL = DecodeCase((300, 17, 0, 128), 512)


def assert_case(runtime: Runtime, wanted: DecodeCase, rng: np.random.Generator) -> None:
    with on_device(runtime, wanted, rng) as case:
        workspace = case.dirty_workspace()
        case.run(workspace=workspace)
        case.assert_right()
        case.plan.check(workspace)
        case.assert_zeroed(workspace)


@pytest.mark.parametrize("kv_dtype", list(Q_DTYPES))
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_edge_lengths_match_float64(
    runtime: Runtime, rng: np.random.Generator, page_size: int, kv_layout: str, kv_dtype: str
) -> None:
    lengths = edge_lengths(page_size, 1024)
    wanted = DecodeCase(lengths, 1024, group=5, page_size=page_size, kv_layout=kv_layout, kv_dtype=kv_dtype)
    assert_case(runtime, wanted, rng)
    assert_case(runtime, replace(wanted, q_len=3, mask="tree", window_left=64), rng)


@pytest.mark.parametrize("group", range(1, 33))
def test_every_group_matches_float64(runtime: Runtime, rng: np.random.Generator, group: int) -> None:
    assert_case(runtime, replace(SMALL, group=group), rng)
    assert_case(runtime, replace(SMALL, group=group, sinks=True, q_len=3, kv_dtype="fp16"), rng)


@pytest.mark.parametrize("q_len", [*range(1, 18), 24, 31, 32, 33, 48, 63, 64])
def test_every_query_length_matches_float64(runtime: Runtime, rng: np.random.Generator, q_len: int) -> None:
    assert_case(runtime, replace(SMALL, q_len=q_len), rng)
    assert_case(runtime, replace(SMALL, q_len=q_len, mask="tree", group=7, sinks=True), rng)
    assert_case(runtime, replace(SMALL, q_len=q_len, mask="any", group=3, kv_dtype="e4m3"), rng)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("kv_dtype", "q_dtype"), [(kv, q) for kv, all_q in Q_DTYPES.items() for q in all_q])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "e4m3"])
def test_every_dtype_and_head_dimension_matches_float64(
    runtime: Runtime, rng: np.random.Generator, kv_dtype: str, q_dtype: str, out_dtype: str, head_dim: int
) -> None:
    wanted = replace(SMALL, kv_dtype=kv_dtype, q_dtype=q_dtype, out_dtype=out_dtype, head_dim=head_dim)
    assert_case(runtime, wanted, rng)
    assert_case(runtime, replace(wanted, q_len=5, group=4, mask="tree", device_scales=True, output_scale=1.7), rng)


@pytest.mark.parametrize("kv_dtype", list(Q_DTYPES))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_very_long_request_matches_float64(
    runtime: Runtime, rng: np.random.Generator, kv_dtype: str, batch_invariant: bool
) -> None:
    wanted = DecodeCase((131072,), 131072, kv_heads=1, kv_dtype=kv_dtype, batch_invariant=batch_invariant)
    assert_case(runtime, wanted, rng)


@pytest.mark.parametrize("keys", [0, 1, 300, 5_000, 9_000, 40_000])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
def test_a_single_request_below_a_model_s_bound_matches_float64(
    runtime: Runtime, rng: np.random.Generator, kv_heads: int, keys: int
) -> None:
    """Its length decides between clusters and all CTAs; row tiles of the same keys lie in one cluster, or cannot."""
    single = DecodeCase((keys,), 131_072, kv_heads=kv_heads)
    assert_case(runtime, single, rng)
    assert_case(runtime, replace(single, q_len=4), rng)
    assert_case(runtime, replace(single, q_len=4, head_dim=64, kv_dtype="e4m3", q_dtype="bf16"), rng)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_long_request_beside_short_ones_matches_float64(
    runtime: Runtime, rng: np.random.Generator, batch_invariant: bool
) -> None:
    lengths = (20_000, *(int(n) for n in rng.integers(1, 200, size=30)))
    assert_case(runtime, DecodeCase(lengths, 20_000, batch_invariant=batch_invariant, q_len=4), rng)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_requests_than_ctas_match_float64(
    runtime: Runtime, rng: np.random.Generator, batch_invariant: bool
) -> None:
    lengths = tuple(int(n) for n in rng.integers(0, 40, size=1000))
    wanted = DecodeCase(lengths, 64, kv_heads=1, group=4, page_size=16, batch_invariant=batch_invariant)
    assert_case(runtime, wanted, rng)
    q_lens = tuple(int(n) for n in rng.integers(0, 9, size=1000))
    assert_case(runtime, replace(wanted, q_lens=q_lens, max_q_len=12, mask="any"), rng)


def test_a_window_of_a_long_request_reads_what_it_needs(runtime: Runtime, rng: np.random.Generator) -> None:
    for window_left in (0, 100, 1000):
        wanted = DecodeCase((20_000, 3), 32_768, kv_heads=1, window_left=window_left, page_size=16)
        assert_case(runtime, wanted, rng)
        assert_case(runtime, replace(wanted, batch_invariant=True, q_len=4, mask="any"), rng)


@pytest.mark.parametrize("mask", ["none", "any"])
def test_the_widest_window_hides_nothing(runtime: Runtime, rng: np.random.Generator, mask: str) -> None:
    # Fewer keys than query tokens put positions below 0, from which such a window leaves the range of int32.
    wanted = replace(SMALL, lengths=(3, 0, 16, 300), q_len=16, mask=mask, window_left=2**31 - 1)
    assert_case(runtime, wanted, rng)


def test_an_fp8_output_saturates(runtime: Runtime, rng: np.random.Generator) -> None:
    wanted = replace(SMALL, kv_dtype="e4m3", out_dtype="e4m3", output_scale=5000.0)
    with on_device(runtime, wanted, rng) as case:
        case.run()
        out, lse = case.result()
        sizes = out & 0x7F
        assert (sizes <= 0x7E).all()
        assert (sizes == 0x7E).any()
        assert_close(wanted, (out, lse), case.expected)


def test_large_logits_stay_finite(runtime: Runtime, rng: np.random.Generator) -> None:
    assert_case(runtime, replace(SMALL, scale=20.0, sinks=True), rng)
    assert_case(runtime, replace(SMALL, scale=-20.0, kv_dtype="fp16"), rng)
    assert_case(runtime, replace(SMALL, scale=0.0, q_len=3), rng)


def test_a_smaller_bound_and_other_scales_for_one_step(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, SMALL, rng) as case:
        case.run(max_seq_len=300, softmax_scale=0.5, output_scale=2.0)
        wanted = replace(SMALL, scale=0.5, output_scale=2.0)
        assert_close(wanted, case.result(), reference_of(wanted, case.host))


def test_scales_on_the_device_are_read_at_each_launch(runtime: Runtime, rng: np.random.Generator) -> None:
    with on_device(runtime, replace(SMALL, device_scales=True), rng) as case:
        for scale, factor in ((0.1, 1.0), (0.5, -2.0)):
            case.driver.copy_to_device(case.options["softmax_scale"].pointer, np.array([scale], np.float32))
            case.driver.copy_to_device(case.options["output_scale"].pointer, np.array([factor], np.float32))
            case.poison()
            case.run()
            wanted = replace(case.case, scale=scale, output_scale=factor)
            assert_close(wanted, case.result(), reference_of(wanted, case.host))


def test_a_kernel_that_is_not_loaded_is_refused_while_capturing(runtime_config, rng: np.random.Generator) -> None:
    fresh = Runtime(runtime_config, driver=GraphDriver())
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
