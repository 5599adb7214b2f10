"""Context attention over e4m3 keys and values: the bits of the 16-bit kernels on the dequantised cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.attention.checks import ScaleProduct
from tests.gpu.context_cases import ContextCase, ContextHost, context_host
from tests.gpu.context_device import context_on_device
from tests.gpu.decode_values import bits_of, e4m3_table, values_of
from tests.gpu.graph_replays import replay_over
from tests.gpu.kv_scales import FORMS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

BASE = ContextCase(e4m3=True, q_lens=(300, 1, 0, 77), kv_lens=(1000, 129, 5, 77), sinks=True, kv_scales="one")


def dequantised(case: ContextCase, host: ContextHost) -> ContextHost:
    """The same keys and values in the queries' type, exactly, without their scales."""
    k, v = (tuple(bits_of(case.dtype, values_of("e4m3", own)) for own in side) for side in (host.k, host.v))
    return replace(host, k=k, v=v, kv_scales=None)


def bits_over_16_bits(runtime: Runtime, case: ContextCase, host: ContextHost) -> tuple[np.ndarray, Any]:
    """What the 16-bit kernel gives; one scale of keys and of values comes as a factor on the device."""
    own = replace(case, e4m3=False, kv_scales="", device_scales=host.kv_scales is not None)
    with context_on_device(runtime, own, np.random.default_rng(4), dequantised(case, host)) as device:
        scales = {}
        if host.kv_scales is not None:
            arrays = [TensorView.contiguous(device.arrays.upload(x), "float32", (1,)) for x in host.kv_scales]
            numbers = (("softmax_scale", case.softmax_scale), ("output_scale", case.output_scale))
            scales = {n: ScaleProduct(number, x) for (n, number), x in zip(numbers, arrays, strict=True)}
        device.run(**scales)
        return device.result()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(
    ("form", "page_size"), [("ragged", 64), ("even", 64), ("paged", 16), ("paged", 64), ("paged", 256)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_left": 100},
        {"causal": False, "window_left": 100, "window_right": 30},
        {"logit_soft_cap": 20.0},
        {"batch_invariant": True},
        {"batch_invariant": True, "logit_soft_cap": 20.0, "window_left": 100},
        {"kv_layout": "HND", "joined": True},
        {"kv_scales": "", "amplitude": 6.0, "sinks": False},
    ],
)
def test_the_bits_are_those_of_the_dequantised_cache(
    runtime: Runtime, dtype: str, head_dim: int, form: str, page_size: int, options: dict[str, Any]
) -> None:
    more = {"q_lens": (77,) * 4} if form == "even" else {}
    case = replace(BASE, dtype=dtype, head_dim=head_dim, form=form, page_size=page_size, **more, **options)
    host = context_host(case, np.random.default_rng(3))
    expected, expected_lse = bits_over_16_bits(runtime, case, host)
    with context_on_device(runtime, case, np.random.default_rng(4), host) as device:
        device.run()
        out, lse = device.result()
        device.arrays.assert_guards()
    assert np.array_equal(out, expected)
    assert np.array_equal(lse.view(np.uint32), expected_lse.view(np.uint32))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_scales_matches_float64(runtime: Runtime, dtype: str, head_dim: int, form: str) -> None:
    case = replace(BASE, dtype=dtype, head_dim=head_dim, form="paged", kv_scales=form, sinks=False)
    with context_on_device(runtime, case, np.random.default_rng(5)) as device:
        device.run()
        device.assert_right()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_code_of_a_value_is_exact_but_bf16_has_480_for_nan(runtime: Runtime, dtype: str, head_dim: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    lens = (1,) * 256
    case = replace(BASE, dtype=dtype, head_dim=head_dim, q_lens=lens, kv_lens=lens, sinks=False, kv_scales="")
    host = context_host(case, np.random.default_rng(6))
    host = replace(host, v=tuple(np.full_like(own, code) for own, code in zip(host.v, codes, strict=True)))
    table = e4m3_table().copy()
    if dtype == "bf16":
        table[[0x7F, 0xFF]] = 480.0, -480.0
    with context_on_device(runtime, case, np.random.default_rng(7), host) as device:
        device.run()
        out = values_of(dtype, device.result()[0])
    np.testing.assert_array_equal(out, np.broadcast_to(table[codes, None, None], out.shape))


def test_a_graph_reads_the_scales_that_are_then_in_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(BASE, form="paged", kv_scales="requests", sinks=False)
    with context_on_device(runtime, case, np.random.default_rng(8)) as device:
        planned = device.host.kv_scales

        def load(factor: float) -> None:
            scales = tuple(own * np.float32(factor) for own in planned)
            for name, values in zip(("k_scale", "v_scale"), scales, strict=True):
                device.driver.copy_to_device(device.given[name].pointer, values)
            device.host = replace(device.host, kv_scales=scales)
            device.__dict__.pop("expected", None)

        monkeypatch.setattr(device, "load", load)
        replay_over(runtime.driver, device, [1.0, -0.5, 2.0])
