"""A decode of two launches: ragged requests of few and of many rows, under batch_invariant without segments."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import ClampedInputError, PagedDecodePlan, Runtime, plan_paged_decode
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.kernels.native.launches import WORKSPACE_FIELDS
from cubin_runtime.launch.workspace import SemaphoreWorkspace, workspace_size
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200, Tensors

RAGGED = Tensors().ragged(23)
MANY = (1 << 31) - 1
KERNELS = ("fmha_paged_decode_bf16_d128_rows8_sm90a", "fmha_paged_decode_bf16_d128_rows64_sm90a")


def make_plan(runtime: Runtime, tensors: Tensors = RAGGED, **options: Any) -> PagedDecodePlan:
    asked = {"max_seq_len": 1024, "max_q_len": 9, "batch_invariant": True, "runtime": runtime, **options}
    return plan_paged_decode(*tensors.positional, **tensors.named, **asked)


def run(plan: PagedDecodePlan, tensors: Tensors = RAGGED, **options: Any) -> None:
    plan.run(*tensors.positional, **{"workspace": plan.prepare(0), **tensors.named, **options})


def sent(standin: StandIn) -> list[dict[str, Any]]:
    """The parameters of all launches, as they arrived."""
    calls = standin.calls("cuLaunchKernelEx")
    return [PAGED_DECODE_TMA.unpack(bytes.fromhex(call.seen["parameter0"])) for call in calls]


def test_each_launch_takes_its_own_requests(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan)
    assert [selection.kernel.name for selection in plan.selections] == list(KERNELS)
    assert [(seen["min_rows"], seen["max_rows"]) for seen in sent(standin)] == [(0, 16), (17, MANY)]


def test_tables_of_keys_and_of_values_arrive_as_one_and_an_offset(runtime: Runtime, standin: StandIn) -> None:
    tables = RAGGED.changed("page_table", shape=(4, 2, 16), strides=(100, 40, 1))
    run(make_plan(runtime, tables, draft_position="index", window_left=5), tables)
    names = ("table_stride", "v_table_offset", "positions_by_index", "page_table")
    assert [[seen[name] for name in names] for seen in sent(standin)] == [[100, 40, 1, tables.page_table.pointer]] * 2


def test_launches_differ_in_grid_rows_and_scratch_alone(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan, max_seq_len=700, softmax_scale=0.5, output_scale=3.0)
    few, many = sent(standin)
    different = {name for name in few if few[name] != many[name]}
    scratch = {"counters", "partial_statistics", "partial_out"}
    assert different == {"min_rows", "max_rows"} | scratch
    assert (few["max_seq_len"], few["output_scale"]) == (700, 3.0)


def test_scratch_of_the_launches_does_not_overlap(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    workspace = plan.prepare(0)
    run(plan)
    starts = sorted({seen[name] for seen in sent(standin) for name in WORKSPACE_FIELDS})
    addresses = workspace.regions(plan.regions)
    assert starts == sorted(addresses.values())
    ends = [addresses[region.name] + region.nbytes for region in plan.regions]
    assert all(end <= start for end, start in zip(sorted(ends), starts[1:], strict=False))
    assert plan.workspace_bytes == workspace_size(plan.regions)


def test_a_later_run_sends_other_tensors_to_both(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan)
    standin.clear_log()
    run(plan, RAGGED.changed("q", pointer=0x7F0000009000))
    assert [seen["q"] for seen in sent(standin)] == [0x7F0000009000] * 2
    assert not {"cuModuleLoadData", "cuTensorMapEncodeTiled", "cuMemAlloc"} & set(standin.names())


def test_preloading_loads_both_kernels(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    plan.preload()
    runtime.freeze()
    run(plan)
    assert len(sent(standin)) == 2


def test_both_launches_are_described(runtime: Runtime) -> None:
    plan = make_plan(runtime, device_facts=H200)
    assert [launch.kernel for launch in plan.launch_plans()] == list(KERNELS)
    rows = [{row.name: row.value for row in described} for described in plan.describe()]
    assert [row["max_rows"] for row in rows] == [16, MANY]


def test_programmatic_launches_are_both_so(runtime: Runtime) -> None:
    launches = make_plan(runtime, enable_pdl=True).launch_plans()
    assert [launch.attributes.programmatic_serialization for launch in launches] == [True, True]


def test_what_was_clamped_names_both_kernels_once(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    workspace = plan.prepare(0)
    runtime.driver.fill_words(workspace.regions(plan.regions)["status"], 4, 1, 0)
    with pytest.raises(ClampedInputError, match=f"by {KERNELS[0]} and {KERNELS[1]} met a page id"):
        plan.check(workspace)
    plan.check(workspace)


def test_counters_of_both_come_from_callers_semaphores(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan, workspace=SemaphoreWorkspace((0x7F0100000000, 8 << 20), (0x7F0200000000, 1 << 30)))
    few, many = sent(standin)
    assert few["status"] == many["status"] == 0x7F0100000000 < few["counters"] < many["counters"] < 0x7F0110000000
    assert 0x7F0200000000 == few["partial_statistics"] < few["partial_out"] < many["partial_out"]


def test_a_workspace_for_one_launch_alone_is_too_small(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    small = SemaphoreWorkspace((0x7F0100000000, 8 << 20), (0x7F0200000000, plan.workspace_bytes // 2))
    with pytest.raises(WorkspaceError, match=r"bytes are needed \(.*partial_out 2"):
        run(plan, workspace=small)


def test_requests_that_cannot_have_many_rows_take_one_launch(runtime: Runtime) -> None:
    assert len(make_plan(runtime, max_q_len=2).launches) == 1
