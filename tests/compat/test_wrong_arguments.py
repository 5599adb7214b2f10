"""Other libraries' functions with wrong values for every argument: one of our errors, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flash_attn, flash_attn_interface, flashinfer
from cubin_runtime.testing import StandIn
from tests.attention.copying_examples import view
from tests.attention.flash_attn_calls import cache_arguments, even_arguments, paged_varlen_arguments, varlen_arguments
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    mla_arguments,
    ragged_arguments,
)
from tests.attention.wrong_values import VALUES, untyped
from tests.attention.xqa_calls import (
    mla_batch_arguments,
    trtllm_arguments,
    xqa_arguments,
    xqa_batch_arguments,
    xqa_mla_arguments,
)

Arguments = Callable[[MadeUpMemory], dict[str, Any]]


def _appended(memory: MadeUpMemory) -> dict[str, Any]:
    pool = view("bfloat16", 100, 2, 64, 8, 128, at=0x7F0010000000)
    tokens = {"append_key": view("bfloat16", 23, 8, 128), "append_value": view("bfloat16", 23, 8, 128)}
    return {**tokens, "paged_kv_cache": pool, **_places()}


def _appended_latent(memory: MadeUpMemory) -> dict[str, Any]:
    widths = {"ckv": 512, "kpe": 64}
    tokens = {f"append_{name}": view("bfloat16", 23, width) for name, width in widths.items()}
    return {
        **tokens,
        **{f"{name}_cache": view("bfloat16", 100, 64, width) for name, width in widths.items()},
        **_places(),
    }


def _places() -> dict[str, Any]:
    tokens = {name: view("int32", 23) for name in ("batch_indices", "positions")}
    return {
        **tokens,
        "kv_indices": view("int32", 61),
        "kv_indptr": view("int32", 5),
        "kv_last_page_len": view("int32", 4),
    }


def _states(v: str, s: str, *names: str, parts: tuple[int, ...] = ()) -> Arguments:
    values, sums = view("bfloat16", 8, *parts, 4, 128), view("float32", 8, *parts, 4)
    return lambda _: {f"{v}{name}": values for name in names} | {f"{s}{name}": sums for name in names}


FLASHINFER: dict[str, Arguments] = {
    "trtllm_batch_decode_with_kv_cache": trtllm_arguments,
    "trtllm_batch_decode_with_kv_cache_mla": mla_batch_arguments,
    "xqa": xqa_arguments,
    "xqa_mla": xqa_mla_arguments,
    "xqa_batch_decode_with_kv_cache": xqa_batch_arguments,
    "xqa_batch_decode_with_kv_cache_mla": mla_batch_arguments,
    "trtllm_batch_context_with_kv_cache": context_arguments,
    "trtllm_ragged_attention_deepseek": ragged_arguments,
    "append_paged_kv_cache": _appended,
    "append_paged_mla_kv_cache": _appended_latent,
    "merge_state": _states("v", "s", "_a", "_b"),
    "merge_state_in_place": _states("v", "s", "", "_other"),
    "merge_states": _states("v", "s", "", parts=(2,)),
}
PUBLISHED: dict[str, Arguments] = {
    "trtllm_batch_decode_with_kv_cache": decode_arguments,
    "trtllm_batch_decode_with_kv_cache_mla": mla_arguments,
    "trtllm_batch_context_with_kv_cache": context_arguments,
    "trtllm_ragged_attention_deepseek": ragged_arguments,
}
FLASH_ATTN: dict[str, tuple[str, Arguments]] = {
    "func": ("flash_attn_func", even_arguments),
    "varlen": ("flash_attn_varlen_func", varlen_arguments),
    "varlen over pages": ("flash_attn_varlen_func", paged_varlen_arguments),
    "a decode": ("flash_attn_with_kvcache", cache_arguments),
    "a chunk": ("flash_attn_with_kvcache", lambda memory: cache_arguments(memory, 9, causal=True)),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", FLASHINFER)
def test_a_wrong_argument_of_flashinfer_s_is_our_error(
    hopper: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, kind: str
) -> None:
    assert untyped(getattr(flashinfer, name), FLASHINFER[name](memory), VALUES[kind], standin) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_wrong_argument_of_published_kernels_is_our_error(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    values = [value for values in VALUES.values() for value in values]
    assert untyped(getattr(flashinfer, name), PUBLISHED[name](memory), values, standin) == []


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["version 2", "version 3"])
@pytest.mark.parametrize("call", FLASH_ATTN)
def test_a_wrong_argument_of_flash_attention_s_is_our_error(
    hopper: Runtime, standin: StandIn, memory: MadeUpMemory, module: Any, call: str
) -> None:
    name, arguments = FLASH_ATTN[call]
    values = [value for values in VALUES.values() for value in values]
    assert untyped(getattr(module, name), arguments(memory), values, standin) == []


def test_every_function_is_called() -> None:
    public = {name for name in flashinfer.__all__ if name not in ("FP4Tensor", "Installed", "install")}
    assert public - {"trtllm_prefill_with_kv_cache_mla"} == FLASHINFER.keys()
    assert {name for name, _ in FLASH_ATTN.values()} == set(flash_attn.__all__) == set(flash_attn_interface.__all__)
