"""Scales of keys and values in paged decode over e4m3 caches, on a GPU: by head, by request, and as numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_cases import DecodeCase, make_host
from tests.gpu.decode_device import on_device
from tests.gpu.graph_replays import replay_over
from tests.gpu.kv_scales import FORMS

pytestmark = pytest.mark.gpu
BASE = DecodeCase(
    lengths=(1000, 1, 0, 6000, 77), max_seq_len=6000, kv_heads=4, kv_dtype="e4m3", q_dtype="bf16", sinks=True
)


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("rows", [8, 16, 64, 128])
@pytest.mark.parametrize("q_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_matches_float64(runtime: Runtime, form: str, q_dtype: str, rows: int, clusters: bool) -> None:
    q_len = max(1, rows // 8)
    case = replace(BASE, kv_scales=form, q_dtype=q_dtype, rows=rows, q_len=q_len, clusters=clusters)
    with on_device(runtime, case, np.random.default_rng(1)) as device:
        device.run()
        device.assert_right()
        device.arrays.assert_guards()


@pytest.mark.parametrize("head_dim", [32, 64, 256, 512])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_head_dimension_has_them(runtime: Runtime, head_dim: int, invariant: bool) -> None:
    case = replace(BASE, kv_scales="requests", head_dim=head_dim, batch_invariant=invariant)
    with on_device(runtime, case, np.random.default_rng(2)) as device:
        device.run()
        device.assert_right()


@pytest.mark.parametrize("rows", [8, 64])
def test_one_scale_of_all_is_a_factor_of_the_other_scales(runtime: Runtime, rows: int) -> None:
    case = replace(BASE, kv_scales="requests", rows=rows, q_len=max(1, rows // 8), device_scales=True)
    host = make_host(case, np.random.default_rng(3))
    ones = np.ones((case.batch, case.kv_heads), np.float32)
    results = []
    for kv_scales, factors in (((ones * 0.5, ones * 4), (1, 1)), (None, (0.5, 4))):
        own = replace(
            case,
            kv_scales="requests" if kv_scales else "",
            scale=case.softmax_scale * factors[0],
            output_scale=case.output_scale * factors[1],
        )
        with on_device(runtime, own, np.random.default_rng(4), replace(host, kv_scales=kv_scales)) as device:
            device.run()
            results.append(device.result_bytes())
    assert results[0] == results[1]


def test_a_graph_reads_the_scales_that_are_then_in_memory(runtime: Runtime) -> None:
    case = replace(BASE, kv_scales="requests")
    hosts = [make_host(case, np.random.default_rng(seed)) for seed in (5, 6)]
    with on_device(runtime, case, np.random.default_rng(5), hosts[0]) as device:
        replay_over(runtime.driver, device, [hosts[1], hosts[0]])
