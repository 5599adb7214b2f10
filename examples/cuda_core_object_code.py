"""A verified cubin as object code of cuda.core: planned and fetched here, loaded and launched by NVIDIA's library.

    make install                      # in a clone, then the line with which it ends
    pip install 'cuda-core[cu13]'
    python examples/cuda_core_object_code.py

Without a GPU the launch is left out, and the plan is that of an H200.
"""

from __future__ import annotations

import ctypes
import struct
from math import prod
from typing import Any

from cubin_runtime.testing import require_module

for name in ("cuda.bindings", "cuda.core"):
    require_module(name, "pip install 'cuda-core[cu13]'")

from cuda.bindings import driver as cuda
from cuda.core import Device, ObjectCode

from cubin_runtime.artifacts.cubins.cubin import parse_cubin
from cubin_runtime.artifacts.library import Library
from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, plan_paged_decode
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.launch import DeviceFacts, LaunchPlan, LaunchRecord

H200 = "H200"  # what is planned for where there is no GPU
# A decode of two requests over pages of 16 tokens, 8 query heads over 1 KV head.
SHAPES = {
    "q": ("bfloat16", (2, 8, 128)),
    "k_cache": ("bfloat16", (8, 16, 1, 128)),
    "v_cache": ("bfloat16", (8, 16, 1, 128)),
    "page_table": ("int32", (2, 4)),
    "seq_lens": ("int32", (2,)),
    "out": ("bfloat16", (2, 8, 128)),
}
ALIGNMENT = 128  # of the parameter struct, which holds tensor maps


def object_code(library: Library, launch: LaunchPlan) -> ObjectCode:
    """The cubin of a launch as object code: only bytes whose digest is the pinned one get there."""
    artifact = library.load(launch.path, fetch=True)
    assert artifact.sha256 == launch.sha256
    return ObjectCode.from_cubin(artifact.data, name=launch.path.name)


def plan_decode(runtime: Runtime, tensors: dict[str, TensorView], device: DeviceFacts | str) -> PagedDecodePlan:
    """The plan of the decode for ``device``; nothing is launched."""
    return plan_paged_decode(**tensors, max_seq_len=64, runtime=runtime, device_facts=device)


def content(name: str) -> bytes:
    """What a tensor holds at first: tables and lengths that fit, numbers from 1 to 2 else."""
    if name == "page_table":
        return struct.pack("<8i", *range(8))
    if name == "seq_lens":
        return struct.pack("<2i", 33, 64)
    elements = prod(SHAPES[name][1])
    ones = 0x3F80  # 1.0 as bfloat16, whose low seven bits are its fraction
    return struct.pack(f"<{elements}H", *(ones + (37 * index + len(name)) % 128 for index in range(elements)))


def launch_again(code: ObjectCode, record: LaunchRecord, device: Device, stream: Any) -> None:
    """Launch a kernel of ``code`` as ``record`` says: grid, block, shared memory and parameter bytes.

    ``cuda.core.launch`` takes numbers and buffers; these kernels take one struct, so the call is that of the bindings.
    """
    kernel = code.get_kernel(record.symbol)
    largest = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cuda.cuKernelSetAttribute(largest, record.shared_bytes, kernel.handle, device.device_id))
    memory = ctypes.create_string_buffer(len(record.parameters) + ALIGNMENT)
    at = ctypes.addressof(memory) + -ctypes.addressof(memory) % ALIGNMENT
    ctypes.memmove(at, record.parameters, len(record.parameters))
    arguments = (ctypes.c_void_p * 1)(at)
    function = cuda.CUfunction(int(kernel.handle))
    launch = (*record.grid, *record.block, record.shared_bytes, stream.handle, ctypes.addressof(arguments), 0)
    check(cuda.cuLaunchKernel(function, *launch))


def check(result: tuple[Any, ...]) -> None:
    """Raise for what a function of the bindings returned, unless it is success."""
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver returned {result[0]!r}")


def run_both(runtime: Runtime, device: Device) -> None:
    """Launch through a plan and through cuda.core, on one stream of cuda.core, and compare the outputs."""
    stream = device.create_stream()
    buffers = {name: device.allocate(len(content(name)), stream=stream) for name in SHAPES}
    stream.sync()
    tensors = {}
    for name, (dtype, shape) in SHAPES.items():
        address = int(buffers[name].handle)
        runtime.driver.copy_to_device(address, content(name))
        tensors[name] = TensorView.contiguous(address, dtype, shape, device.device_id)
    plan = plan_decode(runtime, tensors, runtime.driver.device(device.device_id))
    plan.run(**tensors, stream=stream)
    stream.sync()
    out, size = tensors["out"].pointer, len(content("out"))
    ours = runtime.driver.read(out, size)
    runtime.driver.copy_to_device(out, bytes(size))
    code = object_code(runtime.library, plan.launch_plans()[0])
    launch_again(code, runtime.driver.last_launches()[-1], device, stream)
    stream.sync()
    equal = runtime.driver.read(out, size) == ours
    print(f"launched on {device.name} by both: outputs {'equal' if equal else 'DIFFER'}")
    if not equal:
        raise SystemExit(1)


def main(runtime: Runtime | None = None) -> None:
    """Show the object code, and launch it where there is a GPU."""
    runtime = runtime or Runtime()
    made_up = {name: TensorView.contiguous(0x1000_0000, dtype, shape) for name, (dtype, shape) in SHAPES.items()}
    launch = plan_decode(runtime, made_up, H200).launch_plans()[0]
    code = object_code(runtime.library, launch)
    facts = parse_cubin(code.code).kernels[launch.symbol]
    print(f"{code.name}: {len(code.code)} bytes, sha256 {launch.sha256}")
    print(
        f"{facts.symbol}: {facts.registers} registers, {[part.size for part in facts.parameters]} bytes of parameters"
    )
    try:
        device = Device(runtime.driver.device(0).ordinal)
    except CubinRuntimeError as error:
        print(f"not launched, as there is no GPU here: {error}")
        return
    device.set_current()
    run_both(runtime, device)


if __name__ == "__main__":
    main()
