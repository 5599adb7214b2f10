from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import BackendError, ClampedInputError, PagedDecodePlan, Runtime, plan_paged_decode
from cubin_runtime.errors import AbiError, CorruptError, FrozenError, UsageError, WorkspaceError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.workspace import Workspace
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200, RELEASE_NAME, Tensors

GOOD = Tensors()


def make_plan(runtime: Runtime, tensors: Tensors = GOOD, **options: Any) -> PagedDecodePlan:
    asked = {"max_seq_len": 1024, "runtime": runtime, **tensors.named, **options}
    return plan_paged_decode(*tensors.positional, **asked)


def sent(standin: StandIn, index: int = -1) -> dict[str, Any]:
    """The parameters of a launch, as they arrived."""
    return PAGED_DECODE_TMA.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[index].seen["parameter0"]))


def run(plan: PagedDecodePlan, tensors: Tensors = GOOD, **options: Any) -> None:
    plan.run(*tensors.positional, **{"workspace": plan.prepare(0), **tensors.named, **options})


def test_planning_for_a_described_device_calls_no_driver(config: Config) -> None:
    runtime = Runtime(config, driver=Driver("/nonexistent/libcuda.so.1"), release=RELEASE_NAME)
    plan = make_plan(runtime, device_facts=H200)
    assert plan.selections[0].kernel.name == "fmha_paged_decode_bf16_d128_rows8_sm90a"
    assert plan.launch_plans()[0].grid == (4, 8, 4)


def test_the_plan_describes_every_field_with_its_meaning(config: Config) -> None:
    runtime = Runtime(config, release=RELEASE_NAME)
    (described,) = make_plan(runtime, device_facts=H200).describe()
    rows = {row.name: row for row in described}
    assert (rows["group"].value, rows["page_size_log2"].value, rows["num_pages"].value) == (8, 6, 100)
    assert rows["softmax_scale_log2"].value == pytest.approx(math.log2(math.e) / math.sqrt(128))
    assert all(row.meaning for row in rows.values())


def test_the_grid_and_workspace_depend_on_bounds_alone(config: Config) -> None:
    runtime = Runtime(config, release=RELEASE_NAME)
    short = make_plan(runtime, max_seq_len=64, device_facts=H200)
    assert (short.launch_plans()[0].grid, short.selections[0].ctas) == ((1, 8, 16), 128)
    invariant = make_plan(runtime, max_seq_len=64, batch_invariant=True, device_facts=H200)
    assert invariant.workspace_bytes < make_plan(runtime, batch_invariant=True, device_facts=H200).workspace_bytes


def test_a_run_sends_the_tensors_and_the_workspace(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    workspace = plan.prepare(0)
    run(plan)
    seen = sent(standin)
    assert [seen[name] for name in ("q", "out", "page_table", "seq_lens", "lse")] == [
        GOOD.q.pointer,
        GOOD.out.pointer,
        GOOD.page_table.pointer,
        GOOD.seq_lens.pointer,
        0,
    ]
    assert workspace.address <= seen["status"] < seen["partial_out"] < workspace.address + workspace.nbytes
    assert (seen["max_seq_len"], seen["batch"], seen["kv_heads"]) == (1024, 4, 8)


def test_descriptors_of_both_caches_are_built_from_their_strides(runtime: Runtime, standin: StandIn) -> None:
    run(make_plan(runtime))
    encoded = [call.seen for call in standin.calls("cuTensorMapEncodeTiled")]
    assert [call["address"] for call in encoded] == [hex(GOOD.k_cache.pointer), hex(GOOD.v_cache.pointer)]
    assert {call["dims"] for call in encoded} == {"128,64,8,100"}
    assert {call["strides"] for call in encoded} == {"2048,256,131072"}
    assert {call["box"] for call in encoded} == {"64,64,1,1"}


def test_a_second_run_loads_encodes_and_allocates_nothing(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan)
    standin.clear_log()
    run(plan)
    names = set(standin.names())
    assert "cuLaunchKernelEx" in names
    assert not names & {"cuModuleLoadData", "cuTensorMapEncodeTiled", "cuMemAlloc", "cuStreamSynchronize"}


def test_a_step_carries_its_own_pointers_bound_and_scale(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    moved = GOOD.changed("q", pointer=0x7F0000009000).changed("k_cache", pointer=0x7F0020000000)
    run(plan, moved, max_seq_len=700, softmax_scale=2.0)
    seen = sent(standin)
    assert (seen["q"], seen["max_seq_len"]) == (0x7F0000009000, 700)
    assert seen["softmax_scale_log2"] == pytest.approx(2 * math.log2(math.e))
    assert standin.calls("cuTensorMapEncodeTiled")[0].seen["address"] == hex(0x7F0020000000)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "page_table", "seq_lens", "out"])
def test_a_tensor_of_another_form_than_planned_is_refused(runtime: Runtime, name: str) -> None:
    plan = make_plan(runtime)
    shape = getattr(GOOD, name).shape
    other = GOOD.changed(name, shape=(shape[0] + 1, *shape[1:]))
    with pytest.raises(UsageError, match=f"^{name}: .*planned for"):
        run(plan, other)


@pytest.mark.parametrize(("name", "address"), [("q", 0x1002), ("out", 0x1001), ("seq_lens", 0), ("k_cache", 0x1008)])
def test_an_address_that_the_kernel_cannot_take_is_refused_at_each_run(
    runtime: Runtime, standin: StandIn, name: str, address: int
) -> None:
    plan = make_plan(runtime)
    with pytest.raises(UsageError, match=f"{name}: address {address:#x}"):
        run(plan, GOOD.changed(name, pointer=address))
    assert "cuLaunchKernelEx" not in standin.names()


@pytest.mark.parametrize("options", [{"max_seq_len": 1025}, {"max_seq_len": -1}, {"softmax_scale": math.nan}])
def test_a_step_outside_the_plan_is_refused(runtime: Runtime, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        run(make_plan(runtime), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_len": 3.5}, "max_seq_len=3.5: expected an integer"),
        ({"max_seq_len": "all"}, "max_seq_len='all': expected an integer"),
        ({"softmax_scale": 1e300}, r"softmax_scale=1e\+300: expected a finite number"),
        ({"output_scale": -1e39}, r"output_scale=-1e\+39: expected a finite number"),
        ({"workspace": GOOD.q}, "workspace: got TensorView, expected a Workspace"),
    ],
)
def test_an_option_of_a_step_of_another_kind_is_named(
    runtime: Runtime, standin: StandIn, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(make_plan(runtime), **options)
    assert "cuLaunchKernelEx" not in standin.names()


def test_a_workspace_that_is_too_small_names_the_bytes(runtime: Runtime) -> None:
    plan = make_plan(runtime, batch_invariant=True)
    small = Workspace.allocate(runtime.driver, runtime.driver.primary_context(0), 4096)
    with pytest.raises(WorkspaceError, match=r"4096 bytes: \d+ bytes are needed"):
        run(plan, workspace=small)


def test_workspace_bytes_are_enough(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    own = Workspace.allocate(runtime.driver, runtime.driver.primary_context(0), plan.workspace_bytes)
    run(plan, workspace=own)
    assert len(standin.calls("cuLaunchKernelEx")) == 1


def test_a_workspace_serves_one_stream(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    with pytest.raises(WorkspaceError, match="belongs to stream"):
        run(plan, workspace=plan.prepare(0), stream=runtime.driver.create_stream())


def test_an_unloaded_kernel_is_refused_while_the_stream_captures(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    stream = runtime.driver.create_stream()
    workspace = plan.prepare(stream)
    runtime.driver.begin_capture(stream)
    with pytest.raises(FrozenError, match="preload"):
        run(plan, workspace=workspace, stream=stream)


def test_a_preloaded_kernel_runs_while_the_stream_captures(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    stream = runtime.driver.create_stream()
    workspace = plan.prepare(stream)
    plan.preload()
    runtime.driver.begin_capture(stream)
    run(plan, workspace=workspace, stream=stream)
    assert len(standin.calls("cuLaunchKernelEx")) == 1


def test_a_frozen_runtime_loads_nothing_more(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    runtime.freeze()
    with pytest.raises(FrozenError, match="frozen"):
        run(plan)


def test_the_status_word_is_read_told_and_cleared(runtime: Runtime) -> None:
    plan = make_plan(runtime)
    workspace = plan.prepare(0)
    status = workspace.regions(plan.regions)["status"]
    runtime.driver.fill_words(status, 1 | 4, 1, 0)
    with pytest.raises(ClampedInputError, match="a length over max_seq_len and a page id outside the pool"):
        plan.check(workspace)
    plan.check(workspace)


@pytest.mark.parametrize("graphs", ["x", 1.5, None, -1])
def test_a_wrong_number_of_graphs_is_named(runtime: Runtime, standin: StandIn, graphs: Any) -> None:
    plan = make_plan(runtime)
    calls = standin.names()
    for reserve in (plan.prepare, plan.bind):
        with pytest.raises(UsageError, match=r"^graphs=.*: expected"):
            reserve(graphs=graphs)
    assert standin.names() == calls


@pytest.mark.parametrize("workspace", [None, 7, object()])
def test_what_is_no_workspace_is_not_checked(runtime: Runtime, workspace: Any) -> None:
    with pytest.raises(UsageError, match=r"^workspace: got"):
        make_plan(runtime).check(workspace)


def test_pdl_is_passed_as_a_launch_attribute(runtime: Runtime, standin: StandIn) -> None:
    run(make_plan(runtime, enable_pdl=True))
    assert standin.call("cuLaunchKernelEx")["pdl"] == "1"


def test_auto_refuses_a_device_that_was_never_measured(runtime: Runtime, standin: StandIn) -> None:
    standin.pose_as(8, 0)
    with pytest.raises(BackendError, match=r"8.0"):
        make_plan(runtime)


def test_a_release_without_a_kernel_for_the_device_says_what_it_has(runtime: Runtime, standin: StandIn) -> None:
    standin.pose_as(8, 0)
    with pytest.warns(UserWarning, match="never run"), pytest.raises(UsageError, match="kernels for sm_90a"):
        make_plan(runtime, backend="native")


def test_a_kernel_whose_struct_is_another_is_never_launched(runtime: Runtime, standin: StandIn) -> None:
    standin.reset()
    for kernel in runtime.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes + 8,), kernel.threads)
    with pytest.raises(
        AbiError, match=f"according to the driver, the kernel takes one of {PAGED_DECODE_TMA.size + 8} bytes"
    ):
        run(make_plan(runtime))


def test_a_damaged_cubin_never_reaches_the_driver(
    runtime: Runtime, standin: StandIn, release: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    tree = tmp_path / "damaged"
    shutil.copytree(release[0], tree)
    for cubin in tree.rglob("*.cubin"):
        data = bytearray(cubin.read_bytes())
        data[-1] ^= 1
        cubin.chmod(0o644)
        cubin.write_bytes(data)
    config = replace(runtime.config, sources=(str(tree),))
    damaged = Runtime(config, driver=runtime.driver, release=RELEASE_NAME)
    with pytest.raises(CorruptError, match="sha256"):
        run(make_plan(damaged))
    assert "cuModuleLoadData" not in standin.names()


def test_a_run_without_a_workspace_takes_the_plans_own(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    run(plan, stream=0)
    run(plan, workspace=None, stream=0)
    sent = [call.seen["parameter0"] for call in standin.calls("cuLaunchKernelEx")]
    assert sent[0] == sent[1]


def test_the_regions_of_the_last_workspaces_are_remembered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.operator_plan._MAX_PLACES", 2)
    plan, placed, original = make_plan(runtime), list[Workspace](), Workspace.regions

    def regions(self: Workspace, *given: Any) -> dict[str, int]:
        placed.append(self)
        return original(self, *given)

    context = runtime.driver.primary_context(0)
    first, second, third = (Workspace.allocate(runtime.driver, context, plan.workspace_bytes) for _ in range(3))
    monkeypatch.setattr(Workspace, "regions", regions)
    for workspace in (first, second, third, second, third, first):
        run(plan, workspace=workspace)
    assert placed == [first, second, third, first]
