"""What a plan and its steps do with each option of a decode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import (
    ClampedInputError,
    PagedDecodePlan,
    Runtime,
    TensorView,
    paged_decode,
    plan_paged_decode,
)
from cubin_runtime.errors import UsageError, WorkspaceError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA, PAGED_DECODE_TMA_E4M3
from cubin_runtime.launch.workspace import SemaphoreWorkspace, workspace_size
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200, Tensors

GOOD = Tensors()
E4M3 = "float8_e4m3fn"
LOG2_E = math.log2(math.e)


def view(dtype: str, *shape: int, pointer: int = 0x7F0000007000) -> TensorView:
    return TensorView.contiguous(pointer, dtype, shape)


MASK = view("uint16", 4, 3, 2)
SINKS = view("float32", 64, pointer=0x7F0000007100)
SCALE = view("float32", 1, pointer=0x7F0000007200)
FACTOR = view("float32", 1, pointer=0x7F0000007300)


def make_plan(runtime: Runtime, tensors: Tensors = GOOD, **options: Any) -> PagedDecodePlan:
    asked = {"max_seq_len": 1024, "runtime": runtime, **tensors.named, **options}
    return plan_paged_decode(*tensors.positional, **asked)


def run(plan: PagedDecodePlan, tensors: Tensors = GOOD, **options: Any) -> None:
    plan.run(*tensors.positional, **{"workspace": plan.prepare(0), **tensors.named, **options})


def sent(standin: StandIn) -> dict[str, Any]:
    """The parameters of the last launch, as they arrived."""
    return PAGED_DECODE_TMA.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def values(planner: Runtime, tensors: Tensors = GOOD, **options: Any) -> dict[str, Any]:
    """The parameters as planned for an H200."""
    (launch,) = make_plan(planner, tensors, device_facts=H200, **options).launch_plans()
    return dict(launch.values)


@pytest.mark.parametrize(
    ("kv", "q", "out", "kernel", "codes"),
    [
        ("bfloat16", "bfloat16", "float16", "bf16", (0, 1)),
        ("float16", "float16", E4M3, "fp16", (1, 2)),
        (E4M3, "bfloat16", "bfloat16", "e4m3", (0, 0)),
        (E4M3, E4M3, "bfloat16", "e4m3", (2, 0)),
    ],
)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 512])
def test_dtypes_and_head_dimensions_reach_kernel_and_parameters(
    planner: Runtime, kv: str, q: str, out: str, kernel: str, codes: tuple[int, int], head_dim: int
) -> None:
    plan = make_plan(planner, GOOD.of_dtypes(kv, q, out, head_dim), device_facts=H200)
    traits, given = plan.selections[0].kernel.traits, plan.launch_plans()[0].values
    assert (traits["dtype"], traits["head_dim"]) == (kernel, head_dim)
    assert (given["q_type"], given["out_type"]) == codes
    assert given["softmax_scale_log2"] == pytest.approx(LOG2_E / math.sqrt(head_dim))


def test_one_token_a_request(planner: Runtime) -> None:
    given = values(planner)
    assert (given["batch"], given["tokens"], given["q_len"], given["q_token_stride"]) == (4, 4, 1, 8192)


def test_draft_tokens_are_seen_as_tokens(planner: Runtime) -> None:
    given = values(planner, GOOD.draft(3, lse=view("float32", 4, 3, 64)))
    assert (given["batch"], given["tokens"], given["q_len"]) == (4, 12, 3)
    assert (given["q_token_stride"], given["q_head_stride"]) == (8192, 128)
    assert (given["lse_token_stride"], given["lse_head_stride"]) == (64, 1)


def test_ragged_tokens_have_their_bound(planner: Runtime) -> None:
    given = values(planner, GOOD.ragged(23), max_q_len=9)
    assert (given["batch"], given["tokens"], given["q_len"]) == (4, 23, 9)


def test_row_tiles_follow_tokens_and_group(planner: Runtime) -> None:
    plan = make_plan(planner, GOOD.draft(16), device_facts=H200)
    assert plan.selections[0].row_tiles == -(-16 * 8 // int(plan.selections[0].kernel.traits["rows"]))


@pytest.mark.parametrize(("window", "planned"), [(-1, -1), (0, 0), (100, 100), (2**31 - 1, 1024)])
def test_a_window_reaches_the_parameters_as_far_as_it_hides_something(
    planner: Runtime, window: int, planned: int
) -> None:
    assert values(planner, window_left=window)["window_left"] == planned


def test_batch_invariance_fixes_the_splits(planner: Runtime) -> None:
    plan = make_plan(planner, batch_invariant=True, device_facts=H200)
    assert plan.launch_plans()[0].values["splits"] == 4  # of 16 tiles
    assert plan.workspace_bytes >= 4 * 8 * 4 * int(plan.selections[0].kernel.traits["rows"]) * 128 * 4
    assert values(planner)["splits"] == 0


def test_scales_that_are_numbers_are_in_the_parameters(planner: Runtime) -> None:
    given = values(planner, softmax_scale=2, output_scale=-0.5)
    assert (given["softmax_scale_log2"], given["output_scale"]) == (pytest.approx(2 * LOG2_E), -0.5)


def test_scales_on_the_device_leave_one_in_the_parameters(planner: Runtime) -> None:
    given = values(planner, replace(GOOD, softmax_scale=SCALE, output_scale=FACTOR))
    assert (given["softmax_scale_log2"], given["output_scale"]) == (pytest.approx(LOG2_E), 1.0)


def test_a_step_sends_every_optional_tensor(runtime: Runtime, standin: StandIn) -> None:
    tensors = GOOD.draft(
        3, lse=view("float32", 4, 3, 64), mask=MASK, sinks=SINKS, softmax_scale=SCALE, output_scale=FACTOR
    )
    run(make_plan(runtime, tensors), tensors)
    seen = sent(standin)
    names = ("lse", "mask", "sinks", "softmax_scale_device", "output_scale_device", "q_cu_seq_lens")
    pointers = [view.pointer for view in (MASK, MASK, SINKS, SCALE, FACTOR)]
    assert [seen[name] for name in names] == [*pointers, 0]
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(LOG2_E), 1.0)


def test_a_step_sends_where_ragged_tokens_begin(runtime: Runtime, standin: StandIn) -> None:
    tensors = GOOD.ragged(23)
    run(make_plan(runtime, tensors, max_q_len=9), tensors)
    assert sent(standin)["q_cu_seq_lens"] == tensors.q_cu_seq_lens.pointer


def test_what_a_step_leaves_out_is_null(runtime: Runtime, standin: StandIn) -> None:
    run(make_plan(runtime))
    names = ("lse", "mask", "sinks", "softmax_scale_device", "output_scale_device", "q_cu_seq_lens")
    assert {sent(standin)[name] for name in names} == {0}


def test_scales_of_one_step_do_not_stay(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime, softmax_scale=1.0, output_scale=3.0)
    run(plan, softmax_scale=2.0, output_scale=5.0)
    assert sent(standin)["output_scale"] == 5.0
    run(plan)
    assert (sent(standin)["softmax_scale_log2"], sent(standin)["output_scale"]) == (pytest.approx(LOG2_E), 3.0)


ALL = GOOD.draft(3, lse=view("float32", 4, 3, 64), mask=MASK, sinks=SINKS, softmax_scale=SCALE, output_scale=FACTOR)
OPTIONAL = ("lse", "mask", "sinks", "softmax_scale", "output_scale")


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("like_torch", [False, True])
def test_a_tensor_that_was_planned_cannot_be_left_out(runtime: Runtime, name: str, like_torch: bool) -> None:
    tensors = ALL.as_torch() if like_torch else ALL
    plan = make_plan(runtime, ALL)
    run(plan, tensors)
    with pytest.raises(UsageError, match=f"^{name}: .* of no tensor, planned for"):
        run(plan, replace(tensors, **{name: None}))


@pytest.mark.parametrize("name", OPTIONAL)
@pytest.mark.parametrize("like_torch", [False, True])
def test_a_tensor_that_was_not_planned_cannot_be_given(runtime: Runtime, name: str, like_torch: bool) -> None:
    plan = make_plan(runtime, replace(ALL, **{name: None}))
    tensors = ALL.as_torch() if like_torch else ALL
    with pytest.raises(UsageError, match=f"^{name}: .*, planned for no tensor"):
        run(plan, tensors)


@pytest.mark.parametrize("name", ["q", *OPTIONAL])
@pytest.mark.parametrize("like_torch", [False, True], ids=["views", "torch"])
def test_a_planned_tensor_at_no_address_is_refused_before_and_after_a_run(
    runtime: Runtime, standin: StandIn, name: str, like_torch: bool
) -> None:
    plan, nowhere = make_plan(runtime, ALL), ALL.changed(name, pointer=0)
    good, bad = (tensors.as_torch() if like_torch else tensors for tensors in (ALL, nowhere))
    for launches in (0, 1):
        with pytest.raises(UsageError, match=rf"{name}: address 0x0, expected a multiple of \d+ that is not 0"):
            run(plan, bad)
        assert len(standin.calls("cuLaunchKernelEx")) == launches
        run(plan, good)


def test_a_mask_of_another_type_than_planned_is_refused(runtime: Runtime) -> None:
    with pytest.raises(UsageError, match=r"mask: .*'uint32', \(4, 3, 1\).*planned for \('uint16'"):
        run(make_plan(runtime, ALL), replace(ALL, mask=view("uint32", 4, 3, 1)))


def test_a_number_in_place_of_a_planned_tensor_is_refused(runtime: Runtime) -> None:
    with pytest.raises(UsageError, match=r"softmax_scale: .* of no tensor, planned for"):
        run(make_plan(runtime, ALL), ALL, softmax_scale=0.5)


def test_tensors_like_torch_s_take_the_short_way_with_the_same_result(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime, ALL)
    run(plan, ALL)
    expected = sent(standin)
    for _ in range(2):
        run(plan, ALL.as_torch())
    moved = ALL.changed("mask", pointer=0x7F0000008000).as_torch()
    run(plan, moved)
    assert sent(standin) == {**expected, "mask": 0x7F0000008000}


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_an_output_scale_that_is_not_finite_is_refused_at_each_step(runtime: Runtime, factor: float) -> None:
    with pytest.raises(UsageError, match="output_scale="):
        run(make_plan(runtime), output_scale=factor)


def test_callers_semaphores_and_scratch_are_used(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime, batch_invariant=True)
    workspace = SemaphoreWorkspace(semaphores=(0x7F0100000000, 8 << 20), scratch=(0x7F0200000000, 64 << 20))
    run(plan, workspace=workspace)
    seen = sent(standin)
    assert (seen["status"], seen["counters"]) == (0x7F0100000000, 0x7F0100000100)
    assert 0x7F0200000000 == seen["partial_statistics"] < seen["partial_out"]


def test_semaphores_that_are_too_few_name_the_bytes(runtime: Runtime) -> None:
    workspace = SemaphoreWorkspace(semaphores=(0x7F0100000000, 256), scratch=(0x7F0200000000, 64 << 20))
    with pytest.raises(WorkspaceError, match=r"semaphores of 256 bytes: .* bytes are needed"):
        run(make_plan(runtime, batch_invariant=True), workspace=workspace)


def test_workspace_bytes_cover_all_regions(runtime: Runtime) -> None:
    plan = make_plan(runtime, batch_invariant=True)
    assert plan.workspace_bytes == workspace_size(plan.regions)


def test_a_clamped_q_cu_seq_lens_is_told(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    workspace = plan.prepare(0)
    runtime.driver.fill_words(workspace.regions(plan.regions)["status"], 8, 1, 0)
    with pytest.raises(ClampedInputError, match="met a q_cu_seq_lens that decreases, steps over max_q_len or leaves"):
        plan.check(workspace)


OVER_E4M3 = GOOD.of_dtypes(E4M3, "bfloat16", "bfloat16")


def sent_over_e4m3(standin: StandIn) -> dict[str, Any]:
    return PAGED_DECODE_TMA_E4M3.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


@pytest.mark.parametrize(
    ("scale", "strides"),
    [
        (view("float32"), (0, 0)),
        (view("float32", 1, 1), (0, 0)),
        (view("float32", 8), (0, 1)),
        (view("float32", 4, 8), (8, 1)),
        (replace(view("float32", 4, 8), strides=(0, 0)), (0, 0)),  # one that was expanded
        (replace(view("float32", 4, 8), strides=(1, 4)), (1, 4)),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_keys_and_values_are_read_with_their_strides(
    stub_runtime: Runtime, standin: StandIn, name: str, scale: TensorView, strides: tuple[int, int]
) -> None:
    for _ in range(2):  # the second time by the fast path
        paged_decode(**decode_call(OVER_E4M3), **{name: scale}, max_seq_len=1024, runtime=stub_runtime)
        seen = sent_over_e4m3(standin)
        assert seen[name] == scale.pointer
        assert (seen[f"{name}_request_stride"], seen[f"{name}_head_stride"]) == strides
        other = {"k_scale": "v_scale", "v_scale": "k_scale"}[name]
        assert [seen[f"{other}{part}"] for part in ("", "_request_stride", "_head_stride")] == [0, 0, 0]


def decode_call(tensors: Tensors) -> dict[str, Any]:
    """Its tensors by name, those that are there."""
    return {name: tensor for name, tensor in tensors.by_name.items() if tensor is not None}


@pytest.mark.parametrize("tensors", [GOOD, OVER_E4M3])
def test_numbers_of_keys_and_values_are_parts_of_the_other_scales(
    stub_runtime: Runtime, standin: StandIn, tensors: Tensors
) -> None:
    layout = PAGED_DECODE_TMA if tensors is GOOD else PAGED_DECODE_TMA_E4M3
    given = {"k_scale": 0.5, "v_scale": 4.0, "output_scale": 3.0, "max_seq_len": 1024, "runtime": stub_runtime}
    for scale in (None, 2.0):
        for _ in range(2):
            paged_decode(**decode_call(tensors), **given, softmax_scale=scale)
            seen = layout.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))
            of_scores = (128**-0.5 if scale is None else scale) * 0.5 * LOG2_E
            assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(of_scores), 12.0)


@pytest.mark.parametrize(
    ("tensors", "scale", "words"),
    [
        (GOOD, view("float32", 1), "a tensor with bfloat16 keys and values, expected a number or None"),
        (OVER_E4M3, view("float32", 4), r"shape \(4,\), expected"),
        (OVER_E4M3, view("float32", 8, 4), r"shape \(8, 4\), expected"),
        (OVER_E4M3, view("float64", 1), "dtype float64"),
        (OVER_E4M3, math.inf, "expected a finite number"),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_are_refused(planner: Runtime, name: str, tensors: Tensors, scale: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{words}"):
        make_plan(planner, tensors, device_facts=H200, **{name: scale})
