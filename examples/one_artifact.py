"""One artifact by path: find it, fetch it, verify it, read its facts, launch it.

make install  # in a clone, then the line with which it ends
python examples/one_artifact.py
"""

from __future__ import annotations

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

import cubin_runtime
from cubin_runtime import plan_paged_decode
from cubin_runtime.testing import Device, assert_attention_close, on_first_device, paged_case

LENGTHS = (300, 1, 64)


def main(device: Device) -> None:
    """From a call to the artifact that it needs, and from the artifact's path to the launch."""
    library = cubin_runtime.default_runtime().library
    case = paged_case(seed=0, lengths=LENGTHS)
    tensors = case.on(device)
    plan = plan_paged_decode(**tensors, max_seq_len=case.max_seq_len)
    (launch,) = plan.launch_plans()
    print(f"planned   {launch.path}")

    path = str(launch.path)
    pin = library.pins.covering(launch.path)
    print(f"pinned    {pin.name}, whose checksums.txt has sha256 {pin.manifest_sha256[:16]}...")
    report = cubin_runtime.fetch(path, library=library)
    print(f"fetched   {report.fetched} of 1 file into {library.store.root}, {report.present} was there")
    verified = cubin_runtime.verify(path, complete=True, library=library)  # raises if a byte is wrong
    print(f"verified  {verified.ok} ok, {verified.bytes} bytes, in {verified.where}")

    artifact = cubin_runtime.load(path, library=library)  # hashed again, into private memory
    kernel = artifact.cubin.kernels[launch.symbol]
    size = sum(parameter.size for parameter in kernel.parameters)
    print(f"facts     {kernel.registers} registers, at most {kernel.max_threads} threads, {size} bytes of parameters")

    plan.run(**tensors)  # loads the module, compares struct, block and architecture with these facts, launches
    print(f"launched  grid {launch.grid}, block {launch.block} on {device.facts.name}")
    if device.computes:
        expected, lse = case.reference()
        out = device.numpy(tensors["out"])
        error = assert_attention_close(out, expected, lse=device.numpy(tensors["lse"]), expected_lse=lse)
        print(f"compared  with float64: relative error {error:.1e}")


if __name__ == "__main__":
    on_first_device(main)
