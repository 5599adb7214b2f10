"""Context attention over e4m3 keys and values: the bits of the 16-bit kernels on the dequantised cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, TensorView, context_attention
from cubin_runtime.attention.checks import ScaleProduct
from cubin_runtime.kernels.native.prefill import select
from cubin_runtime.launch.workspace import SemaphoreWorkspace
from tests.gpu.context_cases import ContextCase, ContextHost, context_host
from tests.gpu.context_device import context_on_device
from tests.gpu.decode_values import bits_of, e4m3_table, values_of
from tests.gpu.graph_replays import replay_over
from tests.gpu.kv_scales import FORMS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

BASE = ContextCase(e4m3=True, q_lens=(300, 1, 0, 77), kv_lens=(1000, 129, 5, 77), sinks=True, kv_scales="one")


def convert(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """Plan for a conversion before, wherever there can be one, or for none; only then keys may be split."""
    if before:
        monkeypatch.setattr(select, "MOST_SPLITS", 1)
    monkeypatch.setattr(select, "_CONVERSION_US", -math.inf if before else math.inf)


@pytest.fixture
def converted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(monkeypatch, before=request.param == "before")


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
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    head_dim: int,
    form: str,
    page_size: int,
    options: dict[str, Any],
) -> None:
    more = {"q_lens": (77,) * 4} if form == "even" else {}
    case = replace(BASE, dtype=dtype, head_dim=head_dim, form=form, page_size=page_size, **more, **options)
    host = context_host(case, np.random.default_rng(3))
    firsts = set()
    for before in (False, True):
        convert(monkeypatch, before=before)
        expected, expected_lse = bits_over_16_bits(runtime, case, host)
        with context_on_device(runtime, case, np.random.default_rng(4), host) as device:
            firsts.add(device.plan.selections[0].kernel.operation)
            device.run()
            out, lse = device.result()
            device.arrays.assert_guards()
        assert np.array_equal(out, expected)
        assert np.array_equal(lse.view(np.uint32), expected_lse.view(np.uint32))
    assert firsts == {"context_attention", *(["cache_conversion"] if case.window_left < 0 else [])}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("converted", ["before", "by the kernel"], indirect=True)
@pytest.mark.usefixtures("converted")
def test_every_form_of_scales_matches_float64(runtime: Runtime, dtype: str, head_dim: int, form: str) -> None:
    case = replace(BASE, dtype=dtype, head_dim=head_dim, form="paged", kv_scales=form, sinks=False)
    with context_on_device(runtime, case, np.random.default_rng(5)) as device:
        device.run()
        device.assert_right()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("converted", ["before", "by the kernel"], indirect=True)
@pytest.mark.usefixtures("converted")
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


def torch_prompt(torch: Any, tokens: int, kv_heads: int = 4) -> dict[str, Any]:
    """A prompt over an e4m3 cache in torch tensors, converted before; with all that is the same for its twin."""
    q = torch.randn(tokens, 4 * kv_heads, 128, device="cuda").to(torch.bfloat16)
    k, v = (torch.randn(tokens // 64, 64, kv_heads, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    pages = torch.randperm(tokens // 64, device="cuda", dtype=torch.int32)[None]
    sums = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "page_table": pages, "seq_lens": sums[1:], "q_cu_seq_lens": sums}


def test_calls_with_torch_tensors_take_the_copy_from_torch(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(1)
    convert(monkeypatch, before=True)
    semaphores = torch.zeros(4096, device="cuda", dtype=torch.uint8)
    small = SemaphoreWorkspace((semaphores.data_ptr(), 4096), (0, 0), owner=semaphores)
    for workspace in (None, small):
        for tokens in (1024, 1024, 1024, 2048, 1024, 4096, 1024):  # on fast paths too
            given = torch_prompt(torch, tokens)
            wide = {name: given[name].to(torch.bfloat16) for name in ("k", "v")}
            expected = context_attention(**{**given, **wide}, max_seq_len=tokens, runtime=runtime)
            out = torch.full_like(given["q"], torch.nan)
            context_attention(**given, out=out, max_seq_len=tokens, workspace=workspace, runtime=runtime)
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_a_graph_of_torch_has_a_copy_of_its_own(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(2)
    convert(monkeypatch, before=True)
    given, out = torch_prompt(torch, 1024), None
    context_attention(**given, max_seq_len=1024, runtime=runtime)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = context_attention(**given, max_seq_len=1024, runtime=runtime)
    for _ in range(2):
        for name in ("k", "v"):
            given[name].copy_(torch.randn(given[name].shape, device="cuda").to(torch.float8_e4m3fn))
        graph.replay()
        wide = {name: given[name].to(torch.bfloat16) for name in ("k", "v")}
        expected = context_attention(**{**given, **wide}, max_seq_len=1024, runtime=runtime)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
