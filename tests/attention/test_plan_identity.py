"""Which calls share a plan: all that kernel and parameters depend on tells plans apart, addresses do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import PagedDecodePlan, Runtime, TensorView, paged_decode, plan_paged_decode
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.launch.workspace import SemaphoreWorkspace, Workspace
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.trtllm_calls import MadeUpMemory

LSE = TensorView.contiguous(0x7F0000006000, "float32", (4, 64))
SCALE = TensorView.contiguous(0x7F0000007000, "float32", (1,))
GOOD = Tensors(lse=LSE)
ELSEWHERE = Tensors(**{name: replace(view, device=1) for name, view in vars(GOOD).items() if view is not None})
KINDS = pytest.mark.parametrize("like_torch", [False, True], ids=["views", "torch"])
# A tensor's other form, the field of the parameters that follows it, and the two values.
FORMS = [
    ("q", {"strides": (16384, 128, 1)}, "q_token_stride", (8192, 16384)),
    ("q", {"strides": (16384, 256, 1)}, "q_head_stride", (128, 256)),
    ("out", {"strides": (128, 512, 1)}, "out_token_stride", (8192, 128)),
    ("out", {"strides": (128, 512, 1)}, "out_head_stride", (128, 512)),
    ("out", {"dtype": "float16"}, "out_type", (0, 1)),
    ("lse", {"strides": (1, 4)}, "lse_token_stride", (64, 1)),
    ("lse", {"strides": (1, 4)}, "lse_head_stride", (1, 4)),
    ("page_table", {"strides": (40, 1)}, "table_stride", (16, 40)),
    ("page_table", {"shape": (4, 17), "strides": (17, 1)}, "table_stride", (16, 17)),
]


@pytest.fixture
def runtime(runtime: Runtime) -> Runtime:
    runtime.memory = MadeUpMemory()
    return runtime


def call(runtime: Runtime, tensors: Tensors, *, like_torch: bool = False, **options: Any) -> None:
    q, k, v, table, lens, out, lse = (tensors.as_torch() if like_torch else tensors).positional
    paged_decode(q, k, v, table, lens, **{"max_seq_len": 1024, "out": out, "lse": lse, "runtime": runtime, **options})


def sent(standin: StandIn) -> list[dict[str, Any]]:
    """The parameters of every launch, as they arrived."""
    launches = standin.calls("cuLaunchKernelEx")
    return [PAGED_DECODE_TMA.unpack(bytes.fromhex(launch.seen["parameter0"])) for launch in launches]


@KINDS
@pytest.mark.parametrize(("name", "changes", "field", "values"), FORMS)
def test_each_call_is_launched_by_the_form_of_its_own_tensors(
    runtime: Runtime,
    standin: StandIn,
    like_torch: bool,
    name: str,
    changes: dict[str, Any],
    field: str,
    values: tuple[int, int],
) -> None:
    first, other = values
    for tensors in (GOOD, GOOD.changed(name, **changes), GOOD):
        call(runtime, tensors, like_torch=like_torch)
    assert [seen[field] for seen in sent(standin)] == [first, other, first]


@KINDS
def test_each_call_s_descriptors_have_the_strides_of_its_own_caches(
    runtime: Runtime, standin: StandIn, like_torch: bool
) -> None:
    wide = (131072, 1024, 128, 1)
    for tensors in (GOOD, GOOD.changed("k_cache", strides=wide), GOOD.changed("v_cache", strides=wide)):
        call(runtime, tensors, like_torch=like_torch)
    descriptors = [seen.seen["strides"] for seen in standin.calls("cuTensorMapEncodeTiled")]
    assert descriptors == ["2048,256,131072"] * 2 + ["2048,256,262144"] * 2


@KINDS
def test_tensors_on_another_device_are_launched_there(runtime: Runtime, standin: StandIn, like_torch: bool) -> None:
    standin.with_devices(2)
    for tensors in (GOOD, ELSEWHERE, GOOD):
        runtime.driver.set_current(None)
        call(runtime, tensors, like_torch=like_torch)
    contexts = [hex(runtime.driver.primary_context(device)) for device in (0, 1)]
    assert [seen.seen["context"] for seen in standin.calls("cuModuleLoadData")] == contexts
    assert [launch["lse"] for launch in sent(standin)] == [LSE.pointer] * 3


def make_plan(runtime: Runtime, tensors: Tensors = GOOD, **options: Any) -> PagedDecodePlan:
    return plan_paged_decode(*tensors.positional, **{"max_seq_len": 1024, "runtime": runtime, **options})


def run(plan: PagedDecodePlan, tensors: Tensors = GOOD, *, like_torch: bool = False, **options: Any) -> None:
    given = (tensors.as_torch() if like_torch else tensors).positional
    plan.run(*given, **{"workspace": plan.prepare(0), **options})


@KINDS
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"strides": (16384, 128, 1)}),
        ("q", {"device": 1}),
        ("k_cache", {"strides": (131072, 1024, 128, 1)}),
        ("v_cache", {"device": 1}),
        ("page_table", {"strides": (40, 1)}),
        ("seq_lens", {"dtype": "uint32"}),
        ("out", {"dtype": "float16"}),
        ("lse", {"strides": (1, 4)}),
    ],
)
def test_a_plan_refuses_tensors_of_another_form_before_and_after_it_ran(
    runtime: Runtime, standin: StandIn, like_torch: bool, name: str, changes: dict[str, Any]
) -> None:
    plan = make_plan(runtime)
    for launches in (0, 1):
        with pytest.raises(UsageError, match=f"^{name}: .*planned for"):
            run(plan, GOOD.changed(name, **changes), like_torch=like_torch)
        assert len(standin.calls("cuLaunchKernelEx")) == launches
        run(plan, like_torch=like_torch)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_any_rank_fits_a_plan_for_one_on_the_device(
    runtime: Runtime, standin: StandIn, shape: tuple[int, ...]
) -> None:
    plan = make_plan(runtime, softmax_scale=SCALE, output_scale=SCALE)
    scale = TensorView(0x7F0000008000, "float32", shape, (7,) * len(shape))
    run(plan, softmax_scale=scale, output_scale=scale)
    (seen,) = sent(standin)
    assert seen["softmax_scale_device"] == seen["output_scale_device"] == scale.pointer


def test_each_run_uses_the_memory_of_its_own_workspace(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime, batch_invariant=True)
    context = runtime.driver.primary_context(0)
    first, second = (Workspace.allocate(runtime.driver, context, plan.workspace_bytes) for _ in range(2))
    for workspace in (first, second, first):
        run(plan, workspace=workspace)
    assert [seen["status"] for seen in sent(standin)] == [first.address, second.address, first.address]


@pytest.mark.parametrize("moved", ["semaphores", "scratch"])
def test_each_run_uses_its_own_semaphores_and_scratch(runtime: Runtime, standin: StandIn, moved: str) -> None:
    plan = make_plan(runtime, batch_invariant=True)
    first = SemaphoreWorkspace(semaphores=(0x7F0100000000, 8 << 20), scratch=(0x7F0200000000, 64 << 20))
    second = replace(first, **{moved: (0x7F0300000000, 64 << 20)})
    for workspace in (first, second, first):
        run(plan, workspace=workspace)
    field = {"semaphores": "status", "scratch": "partial_statistics"}[moved]
    began = getattr(first, moved)[0]
    assert [seen[field] for seen in sent(standin)] == [began, 0x7F0300000000, began]


def test_a_run_takes_the_context_of_its_workspace(runtime: Runtime, standin: StandIn) -> None:
    plan, own = make_plan(runtime), standin.make_context(0)
    run(plan, workspace=Workspace.allocate(runtime.driver, own, plan.workspace_bytes))
    assert standin.call("cuModuleLoadData")["context"] == standin.call("cuLaunchKernelEx")["context"] == hex(own)


def test_the_status_word_is_read_behind_the_work_of_its_stream(runtime: Runtime, standin: StandIn) -> None:
    plan = make_plan(runtime)
    stream = runtime.driver.create_stream()
    workspace = plan.prepare(stream)
    standin.clear_log()
    plan.check(workspace, stream)
    assert standin.call("cuStreamSynchronize") == {"stream": hex(stream)}
