"""Run in a copy of the project that the stored patches changed: the toy family and tensor, on the stand-in driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cubin_runtime import Config
from cubin_runtime.attention import Runtime, TensorView
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.launch.driver import Driver
from cubin_runtime.testing import StandIn, build_standin
from kernels_src.build import build, select
from kernels_src.kernel_cache import kernel_cache
from kernels_src.toolchain import find_toolchain
from kernels_src.variants import VARIANTS
from tests.attention.attention_examples import RELEASE_NAME, pin_release
from tests.attention.latent_examples import latent_call, view


def main(added: str, folder: Path) -> None:
    names = {"kernel_family": "toy_decode*", "optional_tensor": "fmha_paged_decode_bf16_d128_rows8_sm90a"}[added]
    build(
        folder / "tree",
        select(VARIANTS, names),
        LAYOUTS,
        find_toolchain(),
        release=RELEASE_NAME,
        jobs=2,
        cache=kernel_cache(),
    )
    standin = StandIn(build_standin(folder))
    standin.reset()
    config = Config(
        store=folder / "store", sources=(str(folder / "tree"),), pin_files=(pin_release(folder),), offline=True
    )
    runtime = Runtime(config, driver=Driver(standin.path), release=RELEASE_NAME)
    (kernel,) = runtime.native_release().kernels
    standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    {"kernel_family": run_family, "optional_tensor": run_tensor}[added](runtime, standin)


def sent(standin: StandIn, struct: str) -> dict[str, Any]:
    return LAYOUTS[struct].unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def run_family(runtime: Runtime, standin: StandIn) -> None:
    from cubin_runtime.attention import toy_decode

    given = latent_call()
    given["out"] = given["out"].contiguous(0x7F0000400000, "bfloat16", given["q"].shape)
    toy_decode(**given, max_seq_len=1000, output_scale=0.5, runtime=runtime)
    seen = sent(standin, "ToyParams")
    assert (seen["cache"], seen["q"]) == (given["kv_cache"].pointer, given["q"].pointer)
    assert (seen["heads"], seen["max_seq_len"], seen["output_scale"]) == (16, 1000, 0.5)
    assert standin.calls("cuLaunchKernelEx")[-1].seen["grid"] == "64,1,1"


def run_tensor(runtime: Runtime, standin: StandIn) -> None:
    from cubin_runtime.attention import paged_decode

    cache = TensorView.contiguous(0x7F0000100000, "bfloat16", (100, 64, 8, 128))
    bias = view("float32", 64, pointer=0x7F0000007700)
    given = {
        "q": view("bfloat16", 4, 64, 128, pointer=0x7F0000001000),
        "k_cache": cache,
        "v_cache": cache,
        "page_table": view("int32", 4, 16, pointer=0x7F0000002000),
        "seq_lens": view("int32", 4, pointer=0x7F0000003000),
        "out": view("bfloat16", 4, 64, 128, pointer=0x7F0000004000),
    }
    for head_bias, address in ((bias, bias.pointer), (None, 0)):
        paged_decode(**given, head_bias=head_bias, max_seq_len=1000, runtime=runtime)
        assert sent(standin, "PagedDecodeTmaParams")["head_bias"] == address


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
