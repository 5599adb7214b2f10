"""What a recorder of forms writes of calls under FlashInfer's and flash-attention's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracing_files import definitions, workloads
from trtllm_calls import MadeUpMemory
from xqa_calls import mla_batch_arguments, trtllm_arguments, xqa_arguments, xqa_batch_arguments, xqa_mla_arguments

from cubin_runtime.attention.tracing import Recorder
from cubin_runtime.compat import flashinfer

DECODES = {
    "xqa": xqa_arguments,
    "xqa_batch_decode_with_kv_cache": xqa_batch_arguments,
    "trtllm_batch_decode_with_kv_cache": trtllm_arguments,
    "xqa_mla": xqa_mla_arguments,
    "xqa_batch_decode_with_kv_cache_mla": mla_batch_arguments,
    "trtllm_batch_decode_with_kv_cache_mla": mla_batch_arguments,
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", DECODES)
def test_decodes_on_native_kernels_are_written(name: str, memory: MadeUpMemory, tmp_path: Path) -> None:
    arguments: Callable[..., dict[str, Any]] = DECODES[name]
    with Recorder(tmp_path) as recorder:
        getattr(flashinfer, name)(**arguments(memory))
    (found,) = definitions(tmp_path)
    assert found["op_type"] == ("mla_paged" if "mla" in name else "gqa_paged")
    assert len(workloads(tmp_path)) == 1
    assert recorder.untraced == {}
