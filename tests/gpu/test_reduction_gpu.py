"""The kernels that follow a trtllm-gen launch, on a real device with made-up partials, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from decode_cases import DeviceArrays

from cubin_runtime.artifacts.own_kernels import OwnKernel
from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.attention.reference import bfloat16_bits, bfloat16_values
from cubin_runtime.launch.launcher import LaunchAttributes, LaunchPlan, PreparedLaunch

pytestmark = pytest.mark.gpu

LOG2_E = math.log2(math.e)
TILE_KV = 128
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class ReductionCase:
    """Lengths of each request and the geometry of a reduction; heads are query heads."""

    lengths: tuple[int, ...]
    ctas_kv: int
    heads: int = 16
    heads_per_cta: int = 16
    tokens_per_cta: int = 1
    max_q: int = 1
    tile_q: int = 64
    head_dim: int = 512
    value_ctas: int = 1
    ctas_per_tile: int = 2
    dtype_partial: str = "bf16"
    dtype_out: str = "bf16"
    sum_scale: float = 1.0
    with_sinks: bool = False
    scale_on_device: bool = False


def kernel_named(runtime: Runtime, operation: str, **traits: Any) -> OwnKernel:
    (found,) = [
        kernel
        for kernel in runtime.own_release().kernels
        if kernel.operation == operation
        and kernel.sm == "90a"
        and all(kernel.traits[name] == value for name, value in traits.items())
    ]
    return found


def launch(
    runtime: Runtime, kernel: OwnKernel, grid: tuple[int, int, int], threads: int, values: dict[str, Any]
) -> None:
    own = runtime.own_release()
    context = runtime.driver.ensure_context(0)
    loaded = runtime.load(kernel, context)
    plan = LaunchPlan(
        kernel=kernel.name,
        symbol=kernel.symbol,
        path=own.path_of(kernel),
        sha256=loaded.sha256,
        layout=own.layouts[kernel.struct],
        grid=grid,
        block=(threads, 1, 1),
        shared_bytes=0,
        attributes=LaunchAttributes(),
        values=values,
        reason="test",
    )
    PreparedLaunch(plan, loaded, runtime.driver).launch(0)
    runtime.driver.synchronize(0)


def narrow(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bits of a 2-byte type, and the values that they stand for."""
    if dtype == "bf16":
        bits = bfloat16_bits(values)
        return bits, bfloat16_values(bits)
    half = values.astype(np.float16)
    return half.view(np.uint16), half.astype(np.float64)


def e4m3_values(bits: np.ndarray) -> np.ndarray:
    """The numbers of e4m3 bytes (OCP FP8: bias 7, no infinity)."""
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    return sign * np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10))


def run_reduction(runtime: Runtime, case: ReductionCase, rng: np.random.Generator) -> None:
    """Make partials, launch, and compare output and statistics with float64."""
    batch, rows = len(case.lengths), case.tile_q
    ctas_q = -(-case.max_q // case.tokens_per_cta)
    head_ctas = case.heads // case.heads_per_cta
    shape = (batch, head_ctas * case.value_ctas, ctas_q, case.ctas_kv, rows)
    out_bits, out_values = narrow(rng.standard_normal((*shape, case.head_dim)), case.dtype_partial)
    statistics = np.empty((*shape, 2), dtype=np.float32)
    # Parts of one row agree between the CTAs of the value dimension.
    for value_cta in range(1, case.value_ctas):
        statistics[:, value_cta :: case.value_ctas] = 0
    statistics[..., 0] = np.repeat(
        rng.standard_normal((batch, head_ctas, ctas_q, case.ctas_kv, rows)) * 3, case.value_ctas, axis=1
    )
    statistics[..., 1] = np.repeat(
        rng.uniform(0.5, 50, (batch, head_ctas, ctas_q, case.ctas_kv, rows)), case.value_ctas, axis=1
    )
    if case.ctas_kv > 1:
        statistics[0, :, :, 1] = (LOWEST, 0.0)  # a split that saw no key
        out_bits[0, :, :, 1] = 0x7FC0 if case.dtype_partial == "bf16" else 0x7E00
    arrays = DeviceArrays(runtime.driver)
    runtime.driver.ensure_context(0)
    try:
        tokens, head_dim_v = batch * case.max_q, case.head_dim * case.value_ctas
        item = 1 if case.dtype_out == "e4m3" else 2
        dtype = {1: "uint8", 2: "uint16"}[item]
        out = TensorView.contiguous(
            arrays.empty(tokens * case.heads * head_dim_v * item), dtype, (tokens, case.heads, head_dim_v)
        )
        merged = TensorView.contiguous(arrays.empty(tokens * case.heads * 8), "float32", (tokens, case.heads, 2))
        scale = 0.7
        sinks = rng.standard_normal(case.heads).astype(np.float32) if case.with_sinks else None
        kernel = kernel_named(runtime, "kv_reduction", dtype_partial=case.dtype_partial, dtype_out=case.dtype_out)
        grid = (ctas_q * case.ctas_per_tile, head_ctas * case.value_ctas, batch)
        launch(
            runtime,
            kernel,
            grid,
            512,
            {
                "out": out.pointer,
                "partial_out": arrays.upload(out_bits),
                "partial_statistics": arrays.upload(statistics),
                "softmax_statistics": merged.pointer,
                "seq_lens": arrays.upload(np.asarray(case.lengths, dtype=np.int32)),
                "cum_seq_lens_q": 0,
                "top_k_lens": 0,
                "sinks": arrays.upload(sinks) if sinks is not None else 0,
                "device_softmax_scale_log2": (
                    arrays.upload(np.asarray([scale], dtype=np.float32)) if case.scale_on_device else 0
                ),
                "max_q": case.max_q,
                "ctas_q": ctas_q,
                "ctas_kv": case.ctas_kv,
                "ctas_per_tile": case.ctas_per_tile,
                "value_ctas": case.value_ctas,
                "heads_q": case.heads,
                "heads_per_cta": case.heads_per_cta,
                "tokens_per_cta": case.tokens_per_cta,
                "tile_q": rows,
                "tile_kv": TILE_KV,
                "head_dim": case.head_dim,
                "head_dim_v": head_dim_v,
                "top_k": 0,
                "softmax_scale_log2": 99.0 if case.scale_on_device else scale,
                "sum_scale": case.sum_scale,
            },
        )
        got = arrays.download(out, np.dtype(dtype))
        values = e4m3_values(got) if item == 1 else narrow_back(got, case.dtype_out)
        got_statistics = arrays.download(merged, np.float32)
    finally:
        arrays.close()
    limit = 0.07 if item == 1 else 1.2e-2
    for request, length in enumerate(case.lengths):
        for token in range(case.max_q):
            tile, row_token = divmod(token, case.tokens_per_cta)
            last = min((tile + 1) * case.tokens_per_cta, case.max_q) - 1
            keys = max(0, length - case.max_q + last + 1)
            splits = min(-(-keys // TILE_KV), case.ctas_kv)
            for head in range(case.heads):
                head_cta, in_cta = divmod(head, case.heads_per_cta)
                row = row_token * case.heads_per_cta + in_cta
                first = head_cta * case.value_ctas
                pairs = statistics[request, first, tile, :splits, row].astype(np.float64)
                visible = pairs[:, 0] > LOWEST
                exponents = pairs[visible, 0] * scale
                sink = float(sinks[head]) * LOG2_E if sinks is not None else -math.inf
                top = max([sink, *exponents])
                place = (request * case.max_q + token, head)
                if top == -math.inf:
                    assert not values[place].any()
                    assert np.isneginf(got_statistics[place][0])
                    assert got_statistics[place][1] == 0
                    continue
                weights = np.exp2(exponents - top)
                total = (weights * pairs[visible, 1]).sum() + case.sum_scale * 2.0 ** (sink - top)
                parts = out_values[request, first : first + case.value_ctas, tile, :splits, row][:, visible]
                expected = (weights[None, :, None] * parts).sum(axis=1).reshape(-1) * case.sum_scale / total
                assert np.abs(values[place] - expected).max() <= limit * max(0.02, np.abs(expected).max())
                assert got_statistics[place][0] == pytest.approx(top / LOG2_E, rel=1e-5, abs=1e-5)
                assert got_statistics[place][1] == pytest.approx(total / case.sum_scale, rel=1e-5)


def narrow_back(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_values(bits) if dtype == "bf16" else bits.view(np.float16).astype(np.float64)


CASES = {
    "one split": ReductionCase((100,), 1),
    "ragged": ReductionCase((1, 0, 127, 128, 129, 5000), 16),
    "more splits than work": ReductionCase((300,), 40),
    "head dim in two CTAs": ReductionCase((4000, 3), 8, head_dim=256, value_ctas=2),
    "2 CTAs, 128 heads": ReductionCase((2000,), 4, heads=128, heads_per_cta=64, head_dim=512),
    "head dim 128": ReductionCase((2000, 40), 5, head_dim=128, tile_q=16, heads_per_cta=8),
    "several tokens": ReductionCase((700, 6), 6, max_q=3),
    "tokens grouped with heads": ReductionCase((700, 6), 6, max_q=5, tokens_per_cta=4, heads_per_cta=16, heads=32),
    "sinks": ReductionCase((700, 0), 6, with_sinks=True),
    "scale on the device": ReductionCase((700, 9), 6, scale_on_device=True),
    "fp16": ReductionCase((700, 9), 6, dtype_partial="fp16", dtype_out="fp16"),
    "e4m3 output": ReductionCase((700, 9), 6, dtype_partial="fp16", dtype_out="e4m3", sum_scale=1 / 256),
    "sum scale with sinks": ReductionCase((700, 9), 6, sum_scale=448.0, with_sinks=True),
    "one CTA a tile": ReductionCase((700, 9), 6, ctas_per_tile=1),
    "more CTAs than slices": ReductionCase((700, 9), 6, ctas_per_tile=16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reduction_matches_float64(runtime: Runtime, name: str) -> None:
    run_reduction(runtime, CASES[name], np.random.default_rng(len(name)))


def run_lse(runtime: Runtime, tokens: int, heads: int) -> None:
    """Make statistics, launch with transposed strides, and compare with float64."""
    rng = np.random.default_rng(tokens)
    statistics = np.stack(
        [rng.standard_normal((tokens, heads)) * 20, rng.uniform(0.1, 1e4, (tokens, heads))], axis=-1
    ).astype(np.float32)
    statistics[0, 0] = (LOWEST, 0.0)
    arrays = DeviceArrays(runtime.driver)
    runtime.driver.ensure_context(0)
    try:
        out = TensorView.contiguous(arrays.empty(4 * tokens * heads), "float32", (heads, tokens))
        rows = tokens * heads
        threads = min(1024, 1 << max(0, rows - 1).bit_length())
        values = {
            "statistics": arrays.upload(statistics),
            "lse": out.pointer,
            "token_stride": 1,
            "head_stride": tokens,
            "rows": rows,
            "heads_q": heads,
        }
        launch(runtime, kernel_named(runtime, "lse_from_statistics"), (-(-rows // threads), 1, 1), threads, values)
        got = arrays.download(out, np.float32).T
    finally:
        arrays.close()
    with np.errstate(divide="ignore"):
        expected = LOG2_E * statistics[..., 0].astype(np.float64) + np.log2(statistics[..., 1].astype(np.float64))
    assert np.isneginf(got[0, 0])
    assert np.allclose(got.ravel()[1:], expected.ravel()[1:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 7), (64, 128), (1000, 8)])
def test_statistics_become_lse_at_any_strides(runtime: Runtime, tokens: int, heads: int) -> None:
    run_lse(runtime, tokens, heads)
