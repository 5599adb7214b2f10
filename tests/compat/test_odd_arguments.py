"""Whatever is passed, the answer is one of our errors, and nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.compat import flashinfer
from cubin_runtime.dtypes import ITEM_BYTES
from cubin_runtime.errors import CubinRuntimeError, MissingError
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)
from tests.attention.xqa_calls import xqa_arguments, xqa_batch_arguments

OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "decode": (flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments),
    "mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_arguments),
    "context": (flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "ragged": (flashinfer.trtllm_ragged_attention_deepseek, ragged_arguments),
}
OWN: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "xqa": (flashinfer.xqa, xqa_arguments),
    "xqa batch": (flashinfer.xqa_batch_decode_with_kv_cache, xqa_batch_arguments),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_release_that_is_not_at_hand_is_named(runtime: Runtime, memory: MadeUpMemory, name: str) -> None:
    operator, arguments = OPERATORS[name]
    with pytest.raises(MissingError, match=r"trtllm-gen-0\.6\.13"):
        operator(**arguments(memory))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:paged_decode. backend 'native' was built")
def test_a_release_of_ours_that_is_not_at_hand_is_named(runtime: Runtime, memory: MadeUpMemory, name: str) -> None:
    operator, arguments = OWN[name]
    with pytest.raises(MissingError, match="hopper-"):
        operator(**arguments(memory))


@st.composite
def odd_tensors(draw: st.DrawFn, model: TensorView) -> TensorView:
    """A tensor that differs from ``model`` in one way."""
    what = draw(st.sampled_from(["shape", "dtype", "strides", "rank", "device"]))
    sizes = st.integers(0, 3) | st.sampled_from([16, 32, 64, 128, 192, 512, 576])
    if what == "dtype":
        return replace(model, dtype=draw(st.sampled_from(sorted(ITEM_BYTES))))
    if what == "device":
        return replace(model, device=draw(st.integers(0, 2)))
    if what == "strides":
        strides = draw(st.tuples(*(st.integers(-4, 1 << 20) for _ in model.shape)))
        return replace(model, strides=strides)
    rank = len(model.shape) if what == "shape" else draw(st.integers(0, 6))
    shape = list(model.shape[:rank]) + [draw(sizes) for _ in range(rank - len(model.shape))]
    if what == "shape" and shape:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(sizes)
    return TensorView.contiguous(model.pointer, model.dtype, tuple(shape))


NUMBERS = st.sampled_from([-(1 << 40), -2, -1, 0, 1, 2, 3, 7, 64, 1 << 31, 1 << 62, None, 1.5, "1", 10**400])


@pytest.mark.parametrize("name", [*OPERATORS, *OWN])
@pytest.mark.filterwarnings("ignore:paged_decode. backend 'native' was built")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_tensors_and_numbers_give_our_errors(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, data: st.DataObject
) -> None:
    operator, arguments = {**OPERATORS, **OWN}[name]
    good = arguments(memory)
    tensors = sorted(key for key, value in good.items() if isinstance(value, TensorView))
    numbers = sorted(key for key, value in good.items() if type(value) in (int, float))
    odd = data.draw(st.sampled_from([*tensors, *numbers]))
    value = data.draw(odd_tensors(good[odd]) if odd in tensors else NUMBERS)
    with pytest.raises(CubinRuntimeError):
        operator(**{**good, odd: value})
    assert "cuLaunchKernelEx" not in standin.names()
