"""Code written for FlashInfer on our kernels: one import changes, the calls stay.

make install  # in a clone, then the line with which it ends
python examples/flashinfer_swap.py
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

import numpy as np

# Was:  import flashinfer.decode as attention
from cubin_runtime.compat import flashinfer as attention
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.testing import Device, assert_attention_close, on_first_device, paged_case

LENGTHS = (4096, 1, 0, 777, 2500, 64, 3333, 1024)
WORKSPACE_BYTES = 128 << 20


def serve(functions: ModuleType, tensors: dict[str, Any], workspace: Any, softmax_scale: float, bound: int) -> Any:
    """A decode step as a serving stack calls it; ``functions`` is FlashInfer's module or ours."""
    return functions.trtllm_batch_decode_with_kv_cache(
        query=tensors["q"],
        kv_cache=(tensors["k_cache"], tensors["v_cache"]),
        workspace_buffer=workspace,
        block_tables=tensors["page_table"],
        seq_lens=tensors["seq_lens"],
        max_seq_len=bound,
        bmm1_scale=softmax_scale,
        bmm2_scale=1.0,
        out=tensors["out"],
        kv_layout="NHD",
    )


def main(device: Device) -> None:
    """Decode through FlashInfer's function, and show what is stricter here."""
    case = paged_case(seed=0, lengths=LENGTHS, q_heads=64, kv_heads=8)
    tensors = case.on(device)
    workspace = device.array(np.zeros(WORKSPACE_BYTES, dtype=np.uint8))  # semaphores begin as zeros, as for FlashInfer
    out = serve(attention, tensors, workspace, case.softmax_scale, case.max_seq_len)
    assert out is tensors["out"]
    print(f"trtllm_batch_decode_with_kv_cache: {len(LENGTHS)} requests of up to {case.max_seq_len} keys")
    if device.computes:
        expected, _ = case.reference()
        error = assert_attention_close(device.numpy(out), expected)
        print(f"compared with float64: relative error {error:.1e}")

    small = device.array(np.zeros(1 << 20, dtype=np.uint8))
    try:
        serve(attention, tensors, small, case.softmax_scale, case.max_seq_len)
    except CubinRuntimeError as error:
        print(f"a workspace that is too small is an error: {error}")
    tensors["q"] = tensors["k_cache"]
    try:
        serve(attention, tensors, workspace, case.softmax_scale, case.max_seq_len)
    except CubinRuntimeError as error:
        print(f"so is a query of another shape: {error}")


if __name__ == "__main__":
    on_first_device(main)
