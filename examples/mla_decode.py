"""MLA decode: 128 heads over a paged latent cache of 512 + 64 columns, checked against float64.

make install  # in a clone, then the line with which it ends
python examples/mla_decode.py
"""

from __future__ import annotations

from cubin_runtime.testing import require_module

require_module("numpy", "pip install numpy")

from cubin_runtime import mla_decode, plan_mla_decode
from cubin_runtime.testing import Device, assert_attention_close, mla_case, on_first_device

LENGTHS = (4096, 1, 777, 0, 2500, 64, 3333, 1024)


def main(device: Device) -> None:
    """Decode one token of each request, once by the plain function and then by a plan."""
    case = mla_case(seed=0, lengths=LENGTHS)
    tensors = case.on(device)  # any library's tensors do: torch, CuPy, or what speaks DLPack
    options = {"max_seq_len": case.max_seq_len, "softmax_scale": case.softmax_scale}
    expected, lse = case.reference()
    print(f"requests  {len(LENGTHS)} of up to {max(LENGTHS)} keys, 128 heads; float64 on the host:")
    for request in (0, 1):
        head = f"output {expected[request, 0, 0]:+.4f}, log-sum-exp {lse[request, 0]:+.4f}"
        print(f"          request {request}, head 0, column 0: {head}")

    # The plain function checks, plans, and keeps the plan for calls like this one.
    mla_decode(**tensors, **options)

    # Plan once, run many: a run allocates nothing and waits for nothing.
    plan = plan_mla_decode(**tensors, **options)
    (launch,) = plan.launch_plans()
    plan.run(**tensors)
    print(f"kernel    {launch.kernel}")
    print(f"why       {plan.selections[0].reason}")
    print(f"launch    grid {launch.grid}, block {launch.block}, {launch.shared_bytes} bytes of shared memory")
    print(f"workspace {plan.workspace_bytes} bytes")
    if not device.computes:
        print("compared  nothing: the stand-in driver runs no kernels")
        return
    out = device.numpy(tensors["out"])
    error = assert_attention_close(out, expected, lse=device.numpy(tensors["lse"]), expected_lse=lse)
    print(f"compared  with float64: relative error {error:.1e}")
    microseconds = device.median_microseconds(lambda: plan.run(**tensors))
    read = sum(LENGTHS) * case.cache[0].shape[-1] * case.cache[0].itemsize
    print(f"time      {microseconds:.1f} us on {device.facts.name}, reading {read / microseconds / 1e6:.2f} TB/s")


if __name__ == "__main__":
    on_first_device(main)
