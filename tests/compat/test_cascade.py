"""FlashInfer's names for merging attention states: what reaches the kernel, what comes back, errors in its words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.merge.params import MERGE_STATES
from cubin_runtime.testing import StandIn
from tests.attention.copying_examples import DIM, KV_HEADS, TOKENS, view
from tests.attention.trtllm_calls import MadeUpMemory

V_A, V_B = (view("bfloat16", TOKENS, KV_HEADS, DIM, at=at) for at in (0x7F0000100000, 0x7F0000200000))
S_A, S_B = (view("float32", TOKENS, KV_HEADS, at=at) for at in (0x7F0000003000, 0x7F0000004000))


def sent(standin: StandIn) -> dict[str, Any]:
    return MERGE_STATES.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def test_two_states_give_a_new_one(hopper: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    v, s = flashinfer.merge_state(V_A, S_A, V_B, S_B)
    seen = sent(standin)
    assert (seen["v"], seen["s"], seen["v_other"], seen["s_other"]) == tuple(x.pointer for x in (V_A, S_A, V_B, S_B))
    assert (seen["out"], seen["lse"], seen["parts"], seen["lse_to_log2"]) == (v.pointer, s.pointer, 1, 1.0)
    assert (v.dtype, v.shape, s.dtype, s.shape) == ("bfloat16", V_A.shape, "float32", S_A.shape)


def test_several_states_give_a_new_one(hopper: Runtime, standin: StandIn) -> None:
    v, s = flashinfer.merge_states(view("float16", 5, 7, 4, 64), view("float32", 5, 7, 4))
    assert (v.dtype, v.shape, s.dtype, s.shape) == ("float16", (5, 4, 64), "float32", (5, 4))
    assert (sent(standin)["parts"], sent(standin)["v_other"], sent(standin)["out"]) == (7, 0, v.pointer)


def test_a_state_takes_another_one_in(hopper: Runtime, standin: StandIn) -> None:
    mask = view("uint8", TOKENS, at=0x7F0000005000)
    assert flashinfer.merge_state_in_place(V_A, S_A, V_B, S_B, mask) is None
    seen = sent(standin)
    assert (seen["out"], seen["lse"], seen["mask"]) == (V_A.pointer, S_A.pointer, mask.pointer)


def test_errors_name_the_argument_as_flashinfer_does(hopper: Runtime) -> None:
    with pytest.raises(UsageError, match=r"v_b: shape \(23, 8, 64\), expected \(23, 8, 128\)"):
        flashinfer.merge_state(V_A, S_A, view("bfloat16", TOKENS, KV_HEADS, 64), S_B)
    with pytest.raises(UsageError, match="s_a: dtype float16, expected float32"):
        flashinfer.merge_state(V_A, view("float16", TOKENS, KV_HEADS), V_B, S_B)
    with pytest.raises(UsageError, match=r"v_a: shape \(1, 23, 8, 128\), expected 3 dimensions"):
        flashinfer.merge_state(view("bfloat16", 1, TOKENS, KV_HEADS, DIM), S_A, V_B, S_B)
    with pytest.raises(UsageError, match=r"v: shape \(23, 8, 128\), expected 4 dimensions"):
        flashinfer.merge_states(V_A, S_A)
    with pytest.raises(UsageError, match=r"^v_b: got NoneType"):
        flashinfer.merge_state(V_A, S_A, None, None)


@pytest.mark.parametrize("name", ["v", "s", "v_other", "s_other"])
def test_a_merge_in_place_names_its_arguments(hopper: Runtime, standin: StandIn, name: str) -> None:
    states = {"v": V_A, "s": S_A, "v_other": V_B, "s_other": S_B}
    overlapping = replace(states[name], strides=(0, *states[name].strides[1:]))
    for wrong in (None, overlapping) if name in ("v", "s") else (None,):
        with pytest.raises(UsageError, match=f"^{name}: "):
            flashinfer.merge_state_in_place(**{**states, name: wrong})
    assert standin.calls("cuLaunchKernelEx") == []
