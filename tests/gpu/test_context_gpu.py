"""Context attention on the device: stated cases against float64, and what changes no bit of a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import ClampedInputError, Runtime
from cubin_runtime.kernels.native.prefill import select
from tests.gpu.context_cases import ContextCase, ContextHost, context_host
from tests.gpu.context_device import context_on_device
from tests.gpu.graph_replays import replay_over

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("context_backend")]

BASE = ContextCase(q_lens=(300, 1, 0, 77), kv_lens=(1000, 129, 5, 77), sinks=True)
CUTS = ((0, 700), (0, 1, 2, 130, 641, 700), (0, 37, 64, 512, 699, 700))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("form", ["ragged", "paged"])
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
    ],
)
def test_stated_cases_match_float64(
    runtime: Runtime, dtype: str, head_dim: int, form: str, options: dict[str, Any]
) -> None:
    case = replace(BASE, dtype=dtype, head_dim=head_dim, form=form, **options)
    with context_on_device(runtime, case, np.random.default_rng(3)) as device:
        device.run()
        device.assert_right()
        device.arrays.assert_guards()


@pytest.fixture(params=["batch_invariant", "one part"])
def invariant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether to ask for batch invariance; else keys are not split, so that rows have the same bits too."""
    if request.param == "one part":
        monkeypatch.setattr(select, "MOST_SPLITS", 1)
    return bool(request.param == "batch_invariant")


def bits(runtime: Runtime, case: ContextCase, host: ContextHost) -> np.ndarray:
    with context_on_device(runtime, case, np.random.default_rng(4), host) as device:
        device.run()
        return device.result()[0]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize("cuts", CUTS)
def test_chunks_of_a_prompt_give_the_bits_of_the_whole(
    runtime: Runtime, invariant: bool, head_dim: int, window_left: int, cuts: tuple[int, ...]
) -> None:
    whole = ContextCase(q_lens=(700,), kv_lens=(900,), head_dim=head_dim, window_left=window_left, form="paged")
    whole = replace(whole, batch_invariant=invariant)
    host = context_host(whole, np.random.default_rng(5))
    expected = bits(runtime, whole, host)
    for begin, end in pairwise(cuts):
        chunk = replace(whole, q_lens=(end - begin,), kv_lens=(200 + end,), page_size=16, spare=200)
        own = ContextHost(host.q[begin:end], (host.k[0][: 200 + end],), (host.v[0][: 200 + end],), None)
        assert np.array_equal(bits(runtime, chunk, own), expected[begin:end]), f"tokens {begin} to {end}"


def test_neighbours_pages_bounds_and_forms_change_no_bit(runtime: Runtime, invariant: bool) -> None:
    alone = ContextCase(q_lens=(150,), kv_lens=(555,), batch_invariant=invariant)
    host = context_host(alone, np.random.default_rng(6))
    expected = bits(runtime, alone, host)
    others = context_host(BASE, np.random.default_rng(7))
    for form in ("paged", "ragged"):
        for page_size in (16, 256):
            case = replace(
                alone,
                form=form,
                page_size=page_size,
                spare=200,
                q_lens=(300, 150, 1, 0, 77),
                kv_lens=(1000, 555, 129, 5, 77),
            )
            q = np.concatenate([others.q[:300], host.q, others.q[300:]])
            k, v = ((a[0], b[0], *a[1:]) for a, b in ((others.k, host.k), (others.v, host.v)))
            assert np.array_equal(bits(runtime, case, ContextHost(q, k, v, None))[300:450], expected), (form, page_size)


def test_a_graph_follows_lengths_that_change_on_the_device(runtime: Runtime) -> None:
    case = ContextCase(form="even", q_lens=(64, 64), kv_lens=(400, 400), causal=False)
    with context_on_device(runtime, case, np.random.default_rng(8)) as device:
        replay_over(runtime.driver, device, [(400, 400), (1, 128), (0, 399)])


def test_lengths_out_of_bounds_are_clamped_and_reported(runtime: Runtime) -> None:
    case = ContextCase(form="paged", q_lens=(64, 64), kv_lens=(400, 400))
    with context_on_device(runtime, case, np.random.default_rng(9)) as device:
        workspace = device.plan.prepare(0)
        device.driver.copy_to_device(device.given["seq_lens"].pointer, np.array([401, -3], np.int32))
        device.run(workspace=workspace)
        with pytest.raises(ClampedInputError, match="a length over max_seq_len and a negative length"):
            device.plan.check(workspace)
        device.arrays.assert_guards()


@pytest.mark.parametrize("most", [1, 64])
def test_tokens_of_no_request_are_left_alone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(select, "MOST_SPLITS", most)
    case = ContextCase(form="paged", q_lens=(20, 12), kv_lens=(3000, 2000))
    with context_on_device(runtime, case, np.random.default_rng(10)) as device:
        assert (device.plan.selections[0].splits > 1) == (most > 1)
        device.driver.copy_to_device(device.given["q_cu_seq_lens"].pointer, np.array([2, 20, 25], np.int32))
        device.poison()
        device.run()
        out, lse = device.result()
        for beside in (slice(2), slice(25, None)):
            assert (out[beside] == 0xFFFF).all()
            assert np.isnan(lse[beside]).all()
        assert not np.isnan(lse[2:25]).any()
