"""The MLA operators on compute capability 12.0 and 12.1, whose kernels take e4m3 and were built but not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import BackendError
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from cubin_runtime.testing import StandIn
from tests.attention.latent_examples import PARAMS
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.xqa_calls import mla_batch_arguments, xqa_mla_arguments

pytestmark = pytest.mark.usefixtures("hopper")

E4M3 = "float8_e4m3fn"
PAGES, PAGE, HEADS = 1024, 64, 128


def batch_call(memory: MadeUpMemory, q: str = E4M3, kv: str = E4M3, **changes: Any) -> dict[str, Any]:
    query, cache = memory.tensor(q, 4, 1, HEADS, 576), memory.tensor(kv, PAGES, PAGE, 576)
    return mla_batch_arguments(memory, query=query, kv_cache=cache, **changes)


def lowest_call(memory: MadeUpMemory, q: str = E4M3, kv: str = E4M3) -> dict[str, Any]:
    cache = memory.tensor(kv, PAGES, PAGE, 576)
    return xqa_mla_arguments(memory, q=memory.tensor(q, 4, 1, HEADS, 576), k_cache=cache, v_cache=replace(cache))


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "xqa_mla": lowest_call,
    "xqa_batch_decode_with_kv_cache_mla": batch_call,
    "trtllm_batch_decode_with_kv_cache_mla": batch_call,
}


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("operator", CALLS)
def test_e4m3_runs_with_a_warning(standin: StandIn, memory: MadeUpMemory, operator: str, minor: int) -> None:
    standin.pose_as(12, minor)
    with pytest.warns(UserWarning, match=rf"backend 'native' was built for .*12\.{minor}.* but never run there"):
        getattr(flashinfer, operator)(**CALLS[operator](memory))
    launch = standin.calls("cuLaunchKernelEx")[-1]
    seen = PARAMS.unpack(bytes.fromhex(launch.seen["parameter0"]))
    assert (seen["batch"], seen["tokens"], seen["q_len"], seen["heads"]) == (4, 4, 1, HEADS)


@pytest.mark.filterwarnings("ignore:.*was built for")
@pytest.mark.parametrize("operator", CALLS)
@pytest.mark.parametrize(("kv", "why"), [("bfloat16", "dtype is e4m3"), (E4M3, "queries are e4m3")])
def test_bf16_is_refused_by_what_the_kernels_take(
    standin: StandIn, memory: MadeUpMemory, operator: str, kv: str, why: str
) -> None:
    standin.pose_as(12, 0)
    with pytest.raises(UsageError, match=f"latent512_sm120: {why}"):
        getattr(flashinfer, operator)(**CALLS[operator](memory, "bfloat16", kv))
    assert "cuModuleLoadData" not in standin.names()


def test_the_published_kernels_do_not_run_there(standin: StandIn, memory: MadeUpMemory) -> None:
    standin.pose_as(12, 0)
    with pytest.raises(BackendError, match=r"\(trtllm-gen: published for 10\.0, 10\.3\)"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**batch_call(memory, backend="trtllm-gen"))
