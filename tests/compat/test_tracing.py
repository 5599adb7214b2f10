"""What a recorder of forms writes of calls under FlashInfer's and flash-attention's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_calls import native_ragged_arguments
from flash_attn_calls import cache_arguments, even_arguments, varlen_arguments
from tracing_files import definitions, workloads
from trtllm_calls import MadeUpMemory, context_arguments
from xqa_calls import mla_batch_arguments, trtllm_arguments, xqa_arguments, xqa_batch_arguments, xqa_mla_arguments

from cubin_runtime.attention.tracing import Recorder
from cubin_runtime.compat import flash_attn, flash_attn_interface, flashinfer

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
