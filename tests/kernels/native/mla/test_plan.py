from __future__ import annotations

import math
from dataclasses import replace

from cubin_runtime.artifacts.path import ArtifactPath
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.kernels.native.launches import KernelFile
from cubin_runtime.kernels.native.mla.params import PAGED_MLA_DECODE
from cubin_runtime.kernels.native.mla.plan import MlaProblem, cache_descriptor, mla_launch, mla_regions
from cubin_runtime.kernels.native.mla.select import MlaSelection, MlaShape, select_mla_decode
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.tensormap import TensorMapSpec, check_tensor_map
from tests.kernels.mla_examples import FEW, KERNELS, WIDE
from tests.launch.examples import DIGEST, H100

PROBLEM = MlaProblem(
    batch=6,
    tokens=12,
    q_len=2,
    heads=128,
    latent=512,
    rope=64,
    page_size=64,
    num_pages=100,
    max_seq_len=4096,
    kv_dtype="bf16",
    q_dtype="bf16",
    out_dtype="fp16",
    softmax_scale=0.5,
    output_scale=1.0,
    q_strides=(128 * 576, 576),
    out_strides=(128 * 512, 512),
    lse_strides=(128, 1),
    table_stride=64,
    cache_strides=(64 * 576, 576),
)


def selection(batch_invariant: bool = False) -> MlaSelection:
    shape = MlaShape("bf16", 512, 128, 6, q_len=2, max_seq_len=4096, batch_invariant=batch_invariant)
    return select_mla_decode(KERNELS, shape, H100)


def plan(problem: MlaProblem = PROBLEM) -> LaunchPlan:
    path = ArtifactPath("hopper-0.1.0/mla/kernel.cubin")
    return mla_launch(selection(), problem, KernelFile(path, DIGEST, PAGED_MLA_DECODE)).plan


def region_bytes(chosen: MlaSelection) -> dict[str, int]:
    return {region.name: region.nbytes for region in mla_regions(chosen, PROBLEM)}


def test_every_field_of_the_struct_has_a_value() -> None:
    encoded = {**plan().values, "kv_map": bytes(128)}
    assert len(PAGED_MLA_DECODE.pack(encoded)) == PAGED_MLA_DECODE.size


def descriptor(problem: MlaProblem, kernel: NativeKernel) -> TensorMapSpec:
    return cache_descriptor(problem, kernel, problem.latent + problem.rope, problem.cache_strides)


def test_the_descriptor_is_one_that_the_driver_takes() -> None:
    check_tensor_map(descriptor(PROBLEM, WIDE[0]))


def test_the_descriptor_of_an_e4m3_cache_is_one_that_the_driver_takes() -> None:
    for box_columns, swizzle in ((64, "none"), (128, "128B")):
        kernel = replace(FEW[0], traits={**FEW[0].traits, "box_columns": box_columns, "swizzle": swizzle})
        check_tensor_map(descriptor(replace(PROBLEM, kv_dtype="e4m3"), kernel))


def test_a_box_stays_within_a_page() -> None:
    assert descriptor(replace(PROBLEM, page_size=32), WIDE[0]).box == (64, 32, 1)


def test_the_softmax_scale_is_for_base_2() -> None:
    assert plan().values["softmax_scale_log2"] == 0.5 * math.log2(math.e)


def test_the_grid_has_two_partials_a_cta() -> None:
    chosen = selection()
    assert region_bytes(chosen)["partial_out"] == 2 * chosen.ctas * 64 * 512 * 2


def test_batch_invariant_has_partials_for_each_part_of_each_pair() -> None:
    chosen = selection(batch_invariant=True)
    assert region_bytes(chosen)["partial_statistics"] == 6 * 4 * chosen.splits * 64 * (2 + 8) * 4
