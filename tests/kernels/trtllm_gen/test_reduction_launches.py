"""Which of our kernels run behind a launch, and with what."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from trtllm_examples import recorded_cases, recorded_kernels

from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.cli.recorded_cases import occupancy_of, problem_of
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.layouts import LAYOUTS
from cubin_runtime.kernels.trtllm_gen.plan import Planned, plan
from cubin_runtime.kernels.trtllm_gen.reduction_launches import LSE, REDUCTION, choose_own, launches_after

STRUCTS = {REDUCTION: "KvReductionParams", LSE: "LseFromStatisticsParams"}
KERNEL = NativeKernel(
    name="trtllm_gen_kv_reduction_bf16_to_bf16_sm100",
    symbol="trtllm_gen_kv_reduction_bf16_to_bf16",
    file="trtllm_gen/trtllm_gen_kv_reduction_bf16_to_bf16_sm100.cubin",
    sm="100",
    family="trtllm_gen",
    operation=REDUCTION,
    traits={"dtype_partial": "bf16", "dtype_out": "bf16"},
    struct="KvReductionParams",
    struct_bytes=136,
    struct_fingerprint="0" * 64,
    threads=512,
    dynamic_shared_bytes=0,
    static_shared_bytes=0,
    registers=64,
    spill_bytes=0,
    flags=(),
    sources_sha256="0" * 64,
    status="built, not run",
)
BF16 = {"dtype_partial": "bf16", "dtype_out": "bf16"}


@cache
def planned_cases() -> list[tuple[dict[str, object], Planned]]:
    """Recorded cases that a reduction follows, with what was recorded of it."""
    return [
        (record["reduction"], plan(problem_of(record["case"]), recorded_kernels(), occupancy_of(record["case"])))
        for record in recorded_cases()
        if record["ok"] and record["reduction"]
    ]


def test_every_field_of_the_struct_is_filled() -> None:
    for _, planned in planned_cases():
        for after in launches_after(planned):
            assert LAYOUTS[STRUCTS[after.operation]].pack(after.values)


def test_geometry_is_what_was_recorded() -> None:
    for recorded, planned in planned_cases():
        after = launches_after(planned)[0]
        assert [list(after.grid), list(after.block)] == [recorded["grid"], recorded["block"]]
        assert after.values["ctas_per_tile"] == recorded["numCtasForReduction"]
        assert after.values["value_ctas"] == recorded["numHeadDimCtasV"]
        assert after.pdl == bool(recorded["pdl"])


def test_the_grid_covers_every_head_and_value() -> None:
    for _, planned in planned_cases():
        after, values = launches_after(planned)[0], launches_after(planned)[0].values
        heads = after.grid[1] // int(values["value_ctas"]) * int(values["heads_per_cta"])  # type: ignore[call-overload]
        assert heads == values["heads_q"]
        assert int(values["value_ctas"]) * int(values["head_dim"]) == values["head_dim_v"]  # type: ignore[call-overload]


def test_an_lse_comes_last() -> None:
    found = [launches_after(planned) for _, planned in planned_cases() if planned.lse is not None]
    assert found
    assert {tuple(after.operation for after in launches) for launches in found} == {(REDUCTION, LSE)}


def test_the_kernel_of_the_device_itself_is_preferred() -> None:
    own = replace(KERNEL, name="own", sm="103")
    assert choose_own((KERNEL, own), REDUCTION, BF16, 103) is own
    assert choose_own((KERNEL, own), REDUCTION, BF16, 100) is KERNEL


def test_a_kernel_of_the_same_generation_serves() -> None:
    assert choose_own((KERNEL,), REDUCTION, BF16, 103) is KERNEL


@pytest.mark.parametrize(
    ("operation", "traits", "sm"),
    [(LSE, {}, 100), (REDUCTION, {"dtype_partial": "fp16", "dtype_out": "fp16"}, 100), (REDUCTION, BF16, 90)],
)
def test_a_kernel_that_there_is_not_is_named(operation: str, traits: dict[str, str], sm: int) -> None:
    with pytest.raises(UsageError, match=rf"our release has no {operation} kernel.* on SM {sm}"):
        choose_own((KERNEL,), operation, traits, sm)
