"""Calls of FlashInfer's operators with every tensor that they take, on a device of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.compat import flashinfer
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)
from tests.attention.xqa_calls import (
    HEAD_DIM,
    HEADS,
    mla_batch_arguments,
    trtllm_arguments,
    xqa_arguments,
    xqa_batch_arguments,
    xqa_mla_arguments,
)

CONTEXTS = (0xC000, 0xC001)  # of the stand-in's devices 0 and 1
Make = Callable[[MadeUpMemory], dict[str, Any]]
Operator = tuple[Callable[..., Any], Make]


def _scales(memory: MadeUpMemory, first: str, second: str) -> dict[str, TensorView]:
    return {first: memory.tensor("float32", 1), second: memory.tensor("float32", 1)}


def _xqa(memory: MadeUpMemory) -> dict[str, Any]:
    shape = (4, 1, 3, HEADS, HEAD_DIM)
    return xqa_arguments(
        memory,
        q=memory.tensor("bfloat16", *shape),
        output=memory.tensor("bfloat16", *shape),
        q_seq_len=3,
        mask=memory.tensor("uint16", 4, 3, 2),
        sinks=memory.tensor("float32", HEADS),
        **_scales(memory, "q_scale", "kv_scale"),
    )


def _xqa_ragged(memory: MadeUpMemory) -> dict[str, Any]:
    shape = (7, HEADS, HEAD_DIM)
    return xqa_arguments(
        memory,
        q=memory.tensor("bfloat16", *shape),
        output=memory.tensor("bfloat16", *shape),
        q_seq_len=3,
        q_cu_seq_lens=memory.tensor("int32", 5),
    )


def _xqa_mla(memory: MadeUpMemory) -> dict[str, Any]:
    return xqa_mla_arguments(memory, **_scales(memory, "q_scale", "kv_scale"))


def _xqa_batch(memory: MadeUpMemory) -> dict[str, Any]:
    more = _scales(memory, "bmm1_scale", "bmm2_scale")
    return xqa_batch_arguments(
        memory, 12, q_len_per_req=3, mask=memory.tensor("uint16", 12, 2), sinks=memory.tensor("float32", HEADS), **more
    )


def _trtllm(memory: MadeUpMemory) -> dict[str, Any]:
    return trtllm_arguments(
        memory,
        7,
        q_len_per_req=None,
        max_q_len=3,
        cum_seq_lens_q=memory.tensor("int32", 5),
        out=memory.tensor("bfloat16", 7, HEADS, HEAD_DIM),
        lse=memory.tensor("float32", 7, HEADS),
    )


def _mla_batch(memory: MadeUpMemory) -> dict[str, Any]:
    return mla_batch_arguments(
        memory, sinks=memory.tensor("float32", 128), **_scales(memory, "bmm1_scale", "bmm2_scale")
    )


def _trtllm_mla(memory: MadeUpMemory) -> dict[str, Any]:
    out, lse = memory.tensor("bfloat16", 4, 2, 128, 512), memory.tensor("float32", 8, 128)
    return mla_arguments(memory, out=out, lse=lse)


def native_ragged_arguments(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Of ``trtllm_ragged_attention_deepseek``, with a head dimension that native kernels have."""
    shapes = {"query": (200, 16, 128), "key": (400, 4, 128), "value": (400, 4, 128)}
    tensors = {name: memory.tensor("bfloat16", *shape) for name, shape in shapes.items()}
    return ragged_arguments(memory, **{**tensors, **changes})


def _context(memory: MadeUpMemory) -> dict[str, Any]:
    return context_arguments(memory, lse=memory.tensor("float32", 300, 32), sinks=memory.tensor("float32", 32))


def _native_context(memory: MadeUpMemory) -> dict[str, Any]:
    out = memory.tensor("bfloat16", 300, 32, 128)
    return {**_context(memory), "out": out, **_scales(memory, "bmm1_scale", "bmm2_scale")}


def _native_ragged(memory: MadeUpMemory) -> dict[str, Any]:
    sinks, out = memory.tensor("float32", 16), memory.tensor("bfloat16", 200, 16, 128)
    return native_ragged_arguments(memory, attention_sinks=sinks, out=out)


ON_NATIVE_KERNELS: dict[str, Operator] = {
    "xqa": (flashinfer.xqa, _xqa),
    "xqa of ragged queries": (flashinfer.xqa, _xqa_ragged),
    "xqa_mla": (flashinfer.xqa_mla, _xqa_mla),
    "xqa_batch_decode": (flashinfer.xqa_batch_decode_with_kv_cache, _xqa_batch),
    "xqa_batch_decode_mla": (flashinfer.xqa_batch_decode_with_kv_cache_mla, _mla_batch),
    "trtllm_batch_decode": (flashinfer.trtllm_batch_decode_with_kv_cache, _trtllm),
    "trtllm_batch_decode_mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, _trtllm_mla),
    "trtllm_batch_context": (flashinfer.trtllm_batch_context_with_kv_cache, _native_context),
    "trtllm_ragged": (flashinfer.trtllm_ragged_attention_deepseek, _native_ragged),
}


def _counters(memory: MadeUpMemory) -> TensorView:
    return memory.tensor("int32", 1 << 20)


def _decode(memory: MadeUpMemory) -> dict[str, Any]:
    return decode_arguments(
        memory,
        out=memory.tensor("bfloat16", 4, 32, 128),
        lse=memory.tensor("float32", 4, 32),
        sinks=memory.tensor("float32", 32),
        multi_ctas_kv_counter_buffer=_counters(memory),
        **_scales(memory, "bmm1_scale", "bmm2_scale"),
    )


def _ragged_decode(memory: MadeUpMemory) -> dict[str, Any]:
    query, sums = memory.tensor("bfloat16", 7, 32, 128), memory.tensor("int32", 5)
    return decode_arguments(memory, query=query, cum_seq_lens_q=sums, max_q_len=3, q_len_per_req=None)


def _scale_in_base_2(memory: MadeUpMemory) -> dict[str, Any]:
    return decode_arguments(memory, bmm1_scale=1.0, bmm1_scale_log2=memory.tensor("float32", 1))


def _fp4(memory: MadeUpMemory) -> dict[str, Any]:
    data, scale = memory.tensor("uint8", 4, 32, 64), memory.tensor("float8_e4m3fn", 128, 256)
    return decode_arguments(
        memory,
        query=memory.tensor("float8_e4m3fn", 4, 32, 128),
        kv_cache=memory.tensor("uint8", 64, 2, 4, 32, 64),
        kv_cache_sf=memory.tensor("float8_e4m3fn", 64, 2, 4, 32, 8),
        out=flashinfer.FP4Tensor(data, scale),
        o_sf_scale=1.0,
    )


def _mla(memory: MadeUpMemory) -> dict[str, Any]:
    return mla_arguments(memory, multi_ctas_kv_counter_buffer=_counters(memory), sinks=memory.tensor("float32", 128))


def _sparse_mla(memory: MadeUpMemory) -> dict[str, Any]:
    return mla_arguments(
        memory,
        block_tables=memory.tensor("int32", 4, 2, 2048),
        sparse_mla_top_k=2048,
        sparse_mla_top_k_lens=memory.tensor("int32", 8),
    )


def _ragged(memory: MadeUpMemory) -> dict[str, Any]:
    sinks, out = memory.tensor("float32", 128), memory.tensor("bfloat16", 200, 128, 128)
    return ragged_arguments(memory, attention_sinks=sinks, out=out)


ON_TRTLLM_GEN_KERNELS: dict[str, Operator] = {
    "decode": (flashinfer.trtllm_batch_decode_with_kv_cache, _decode),
    "decode of ragged queries": (flashinfer.trtllm_batch_decode_with_kv_cache, _ragged_decode),
    "decode with a scale in base 2": (flashinfer.trtllm_batch_decode_with_kv_cache, _scale_in_base_2),
    "mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, _mla),
    "context": (flashinfer.trtllm_batch_context_with_kv_cache, _context),
    "ragged": (flashinfer.trtllm_ragged_attention_deepseek, _ragged),
}
# The made-up release has no kernels for these; their tensors are checked all the same.
CHECKED_ONLY: dict[str, Operator] = {
    "decode of fp4": (flashinfer.trtllm_batch_decode_with_kv_cache, _fp4),
    "sparse mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, _sparse_mla),
}


def on_device(value: Any, device: int) -> Any:
    """Tensors, and what holds tensors, on ``device``; anything else as it is."""
    if isinstance(value, TensorView):
        return replace(value, device=device)
    if isinstance(value, flashinfer.FP4Tensor):
        return replace(value, data=on_device(value.data, device), scale=on_device(value.scale, device))
    if isinstance(value, dict):
        return {name: on_device(part, device) for name, part in value.items()}
    return tuple(on_device(part, device) for part in value) if isinstance(value, tuple) else value


def tensors_of(operators: dict[str, Operator]) -> list[tuple[str, str]]:
    """Each tensor that each operator is given: the operator's name and the argument's."""
    pairs = []
    for operator, (_, make) in operators.items():
        given = make(MadeUpMemory())
        pairs += [(operator, name) for name, value in given.items() if on_device(value, 1) != value]
    return pairs


def with_two_devices(runtime: Runtime, standin: StandIn) -> Runtime:
    """The runtime with two devices and no context current."""
    standin.with_devices(2)
    for device in (0, 1):
        runtime.driver.primary_context(device)
    runtime.driver.set_current(None)
    return runtime


def stream_on(runtime: Runtime, device: int) -> int:
    """A new stream of a device."""
    with runtime.driver.using(CONTEXTS[device]):
        return runtime.driver.create_stream()


def at_once(call: Callable[[int], object], repeats: int = 50) -> None:
    """Let two threads make ``call(0)`` and ``call(1)`` over and over at the same time; what one raised is raised."""
    start, failures = threading.Barrier(2), []

    def work(device: int) -> None:
        start.wait()
        try:
            for _ in range(repeats):
                call(device)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
