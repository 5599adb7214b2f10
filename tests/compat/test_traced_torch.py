"""FlashInfer's functions where torch traces them: ops get what the functions take. Its CPU build serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import UsageError
from tests.attention.device_calls import native_ragged_arguments
from tests.attention.host_tensors import memory_of_host_tensors
from tests.attention.trtllm_calls import MadeUpMemory, context_arguments, ragged_arguments
from tests.attention.xqa_calls import HEADS, mla_batch_arguments, trtllm_arguments, xqa_batch_arguments

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
Arguments = Callable[[MadeUpMemory], dict[str, Any]]
# Each function with sinks -> its arguments, the name of its sinks, and its query heads.
WITH_SINKS: Mapping[str, tuple[Arguments, str, int]] = {
    "trtllm_batch_decode_with_kv_cache": (trtllm_arguments, "sinks", HEADS),
    "xqa_batch_decode_with_kv_cache": (xqa_batch_arguments, "sinks", HEADS),
    "trtllm_batch_decode_with_kv_cache_mla": (mla_batch_arguments, "sinks", 128),
    "trtllm_batch_context_with_kv_cache": (context_arguments, "sinks", 32),
    "trtllm_ragged_attention_deepseek": (native_ragged_arguments, "attention_sinks", 16),
}


@pytest.fixture(autouse=True)
def _host_tensors(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper.memory = memory_of_host_tensors(monkeypatch)


@pytest.fixture
def traced() -> Iterator[None]:
    """Tensors without memory, whose calls torch traces."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def of_torch(value: Any) -> Any:
    """Tensors of torch in the place of views."""
    if isinstance(value, TensorView):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype))
    return [of_torch(part) for part in value] if isinstance(value, (tuple, list)) else value


def torch_arguments(arguments: Arguments) -> dict[str, Any]:
    return {name: of_torch(value) for name, value in arguments(MadeUpMemory()).items()}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", WITH_SINKS)
def test_sinks_may_come_in_a_list(name: str) -> None:
    arguments, sinks, heads = WITH_SINKS[name]
    call = getattr(flashinfer, name)
    call(**{**torch_arguments(arguments), sinks: [torch.empty(heads)]})
    with pytest.raises(UsageError, match=f"^{sinks}: 2 tensors, expected one, or a list of one"):
        call(**{**torch_arguments(arguments), sinks: [torch.empty(heads)] * 2})


def test_sinks_in_a_list_and_a_dtype_by_its_word_are_compiled() -> None:
    compiled = []

    def backend(module: Any, _: Any) -> Any:
        compiled.extend(str(node.target) for node in module.graph.nodes if "cubin_runtime" in str(node.target))
        return lambda *inputs: [torch.zeros(1)] * 8

    arguments = {**torch_arguments(trtllm_arguments), "sinks": [torch.zeros(HEADS)], "out_dtype": "float16"}
    torch._dynamo.reset()
    torch.compile(lambda: flashinfer.trtllm_batch_decode_with_kv_cache(**arguments), backend=backend, fullgraph=True)()
    assert compiled == ["cubin_runtime.flashinfer_trtllm_batch_decode_with_kv_cache"]


FP16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("out_dtype", "dtype"), [(None, BF16), (FP16, FP16), ("float16", FP16), ("float8_e4m3fn", E4M3)]
)
def test_an_output_has_the_dtype_that_a_call_says(out_dtype: Any, dtype: torch.dtype) -> None:
    out = flashinfer.trtllm_batch_decode_with_kv_cache(**torch_arguments(trtllm_arguments), out_dtype=out_dtype)
    assert out.dtype == dtype


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_dtype": "nvfp4"}, "out_dtype='nvfp4': expected None or a dtype of torch"),
        ({"out_dtype": "empty"}, "out_dtype='empty': expected None or a dtype of torch"),
        ({"out_dtype": 7}, "out_dtype=7: expected None or a dtype of torch"),
        ({"out_dtype": FP16, "out": BF16}, "out: dtype bfloat16, out_dtype says float16"),
        ({"out_dtype": "float16", "out": BF16}, "out: dtype bfloat16, out_dtype says float16"),
    ],
)
def test_an_output_of_another_dtype_is_refused(changes: dict[str, Any], words: str) -> None:
    arguments = {**torch_arguments(trtllm_arguments), **changes}
    if "out" in changes:
        arguments["out"] = torch.empty(arguments["query"].shape, dtype=changes["out"])
    with pytest.raises(UsageError, match=f"^{words}"):
        flashinfer.trtllm_batch_decode_with_kv_cache(**arguments)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, torch.int8])
def test_ragged_queries_of_8_bits_have_an_output_of_bf16(dtype: torch.dtype) -> None:
    arguments = torch_arguments(ragged_arguments)
    arguments |= {name: arguments[name].to(dtype) for name in ("query", "key", "value")}
    out = flashinfer.trtllm_ragged_attention_deepseek(**arguments)
    assert out.dtype == (FP16 if dtype == FP16 else BF16)
