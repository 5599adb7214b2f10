"""A kernel that merges KV splits, as a release lists it."""

from __future__ import annotations

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.reduction.plan import KV_REDUCTION

KERNEL = NativeKernel(
    name="trtllm_gen_kv_reduction_bf16_to_bf16_sm100",
    symbol="trtllm_gen_kv_reduction_bf16_to_bf16",
    file="trtllm_gen/trtllm_gen_kv_reduction_bf16_to_bf16_sm100.cubin",
    sm="100",
    family="trtllm_gen",
    operation=KV_REDUCTION,
    traits={"dtype_partial": "bf16", "dtype_out": "bf16"},
    struct="KvReductionParams",
    struct_bytes=136,
    struct_fingerprint="0" * 64,
    threads=512,
    dynamic_shared_bytes=4096,
    static_shared_bytes=0,
    registers=64,
    spill_bytes=0,
    flags=(),
    sources_sha256="0" * 64,
    status="built, not run",
)
