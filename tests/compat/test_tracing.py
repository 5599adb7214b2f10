"""What a recorder of forms writes of calls under FlashInfer's and flash-attention's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.compat import flash_attn, flash_attn_interface, flashinfer
from cubin_runtime.debug.tracing import Recorder
from tests.attention.copying_examples import BATCH, TOKENS, token_call, view
from tests.attention.device_calls import native_ragged_arguments
from tests.attention.flash_attn_calls import cache_arguments, even_arguments, varlen_arguments
from tests.attention.tracing_files import definitions, workloads
from tests.attention.trtllm_calls import MadeUpMemory, context_arguments
from tests.attention.xqa_calls import (
    mla_batch_arguments,
    trtllm_arguments,
    xqa_arguments,
    xqa_batch_arguments,
    xqa_mla_arguments,
)


def append_arguments(_: MadeUpMemory) -> dict[str, Any]:
    """Of ``append_paged_kv_cache``."""
    given = token_call()
    names = {"append_key": "k", "append_value": "v", "kv_indices": "page_table", "kv_indptr": "page_indptr"}
    return {
        **{name: given[of] for name, of in names.items()},
        **{name: given[name] for name in ("batch_indices", "positions")},
        "paged_kv_cache": (given["k_cache"], given["v_cache"]),
        "kv_last_page_len": view("int32", BATCH),
    }


def latent_arguments(memory: MadeUpMemory) -> dict[str, Any]:
    """Of ``append_paged_mla_kv_cache``."""
    given = {name: value for name, value in append_arguments(memory).items() if "append" not in name}
    del given["paged_kv_cache"]
    new = {"append_ckv": memory.tensor("bfloat16", TOKENS, 512), "append_kpe": memory.tensor("bfloat16", TOKENS, 64)}
    caches = {name: memory.tensor("bfloat16", 100, 64, dim) for name, dim in (("ckv_cache", 512), ("kpe_cache", 64))}
    return {**given, **new, **caches}


Arguments = Callable[[MadeUpMemory], dict[str, Any]]
# Each public name -> its arguments, and what its definition is of.
OF_FLASHINFER: dict[str, tuple[Arguments, str]] = {
    "xqa": (xqa_arguments, "paged_decode_"),
    "xqa_batch_decode_with_kv_cache": (xqa_batch_arguments, "paged_decode_"),
    "trtllm_batch_decode_with_kv_cache": (trtllm_arguments, "paged_decode_"),
    "xqa_mla": (xqa_mla_arguments, "mla_decode_"),
    "xqa_batch_decode_with_kv_cache_mla": (mla_batch_arguments, "mla_decode_"),
    "trtllm_batch_decode_with_kv_cache_mla": (mla_batch_arguments, "mla_decode_"),
    "trtllm_batch_context_with_kv_cache": (context_arguments, "context_attention_ragged_paged_"),
    "append_paged_kv_cache": (append_arguments, "append_kv_positions_"),
    "append_paged_mla_kv_cache": (latent_arguments, "append_kv_positions_"),
    "trtllm_ragged_attention_deepseek": (native_ragged_arguments, "context_attention_ragged_ragged_"),
}
OF_FLASH_ATTENTION: dict[str, tuple[Arguments, str]] = {
    "flash_attn_func": (even_arguments, "context_attention_dense_dense_"),
    "flash_attn_varlen_func": (varlen_arguments, "context_attention_ragged_ragged_"),
    "flash_attn_with_kvcache": (cache_arguments, "paged_decode_dense_"),
}
pytestmark = pytest.mark.usefixtures("hopper")


def check_written(call: Callable[..., Any], arguments: dict[str, Any], begin: str, folder: Path) -> None:
    """Check that a call is one workload of one definition whose name begins so."""
    with Recorder(folder) as recorder:
        call(**arguments)
    (definition,), (workload,) = definitions(folder), workloads(folder)
    assert definition["name"].startswith(begin)
    assert workload["workload"]["inputs"].keys() == definition["inputs"].keys()
    assert recorder.untraced == {}


@pytest.mark.parametrize("name", OF_FLASHINFER)
def test_calls_of_flashinfers_functions_are_written(name: str, memory: MadeUpMemory, tmp_path: Path) -> None:
    arguments, begin = OF_FLASHINFER[name]
    check_written(getattr(flashinfer, name), arguments(memory), begin, tmp_path)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["flash_attn", "interface"])
@pytest.mark.parametrize("name", OF_FLASH_ATTENTION)
def test_calls_of_flash_attentions_functions_are_written(
    module: Any, name: str, memory: MadeUpMemory, tmp_path: Path
) -> None:
    arguments, begin = OF_FLASH_ATTENTION[name]
    check_written(getattr(module, name), arguments(memory), begin, tmp_path)


def test_merges_are_counted(memory: MadeUpMemory, tmp_path: Path) -> None:
    v, s = memory.tensor("bfloat16", TOKENS, 8, 128), memory.tensor("float32", TOKENS, 8)
    with Recorder(tmp_path) as recorder:
        flashinfer.merge_state(v, s, v, s)
    assert recorder.untraced == {"merge_states: no definition": 1}
