"""What reaches the kernel's parameters from each argument of ``xqa``."""

from __future__ import annotations

import gc
import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.compat.flashinfer import workspace
from cubin_runtime.errors import WorkspaceError
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import MadeUpMemory
from tests.attention.xqa_calls import CACHE, HEAD_DIM, HEADS, KV_HEADS, PAGE, PAGES, sent, xqa_arguments

pytestmark = pytest.mark.usefixtures("hopper")

FP8 = "float8_e4m3fn"
LOG2_E = math.log2(math.e)
SCORES = LOG2_E / math.sqrt(HEAD_DIM)


def xqa(standin: StandIn, arguments: dict[str, Any]) -> dict[str, Any]:
    assert flashinfer.xqa(**arguments) is None
    return sent(standin)


def test_tensors_and_sizes_arrive(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = xqa_arguments(memory)
    seen = xqa(standin, arguments)
    for name, argument in (("q", "q"), ("out", "output"), ("page_table", "page_table"), ("seq_lens", "seq_lens")):
        assert seen[name] == arguments[argument].pointer
    sizes = ("batch", "tokens", "q_len", "kv_heads", "group", "page_size_log2", "num_pages", "table_stride")
    assert [seen[name] for name in sizes] == [4, 4, 1, KV_HEADS, HEADS // KV_HEADS, 6, PAGES, 16]
    assert (seen["q_token_stride"], seen["q_head_stride"]) == (HEADS * HEAD_DIM, HEAD_DIM)


def test_without_options_there_is_nothing_but_the_scale_of_the_head(standin: StandIn, memory: MadeUpMemory) -> None:
    seen = xqa(standin, xqa_arguments(memory))
    absent = ("lse", "q_cu_seq_lens", "mask", "sinks", "softmax_scale_device", "output_scale_device")
    assert [seen[name] for name in absent] == [0] * len(absent)
    assert (seen["window_left"], seen["splits"], seen["output_scale"]) == (-1, 0, 1.0)
    assert seen["softmax_scale_log2"] == pytest.approx(SCORES)


def test_the_page_table_bounds_the_lengths(standin: StandIn, memory: MadeUpMemory) -> None:
    assert xqa(standin, xqa_arguments(memory))["max_seq_len"] == 16 * PAGE


def test_semaphores_hold_what_is_counted_and_the_workspace_the_rest(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = xqa_arguments(memory, batch_invariant=True)
    seen = xqa(standin, arguments)
    semaphores, scratch = arguments["semaphores"].pointer, arguments["workspace_buffer"].pointer
    assert semaphores == seen["status"] < seen["counters"] < semaphores + (8 << 20)
    assert scratch == seen["partial_statistics"] < seen["partial_out"] < scratch + (128 << 20)


@pytest.mark.parametrize("shape", [(4, HEADS, HEAD_DIM), (4, 1, HEADS, HEAD_DIM), (4, 1, 1, HEADS, HEAD_DIM)])
def test_one_token_a_request_comes_in_three_forms(
    standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...]
) -> None:
    seen = xqa(
        standin, xqa_arguments(memory, q=memory.tensor("bfloat16", *shape), output=memory.tensor("bfloat16", *shape))
    )
    assert (seen["batch"], seen["tokens"], seen["q_len"]) == (4, 4, 1)


@pytest.mark.parametrize("shape", [(4, 3, HEADS, HEAD_DIM), (4, 1, 3, HEADS, HEAD_DIM)])
def test_drafts_come_in_two_forms(standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...]) -> None:
    arguments = xqa_arguments(
        memory,
        q=memory.tensor("bfloat16", *shape),
        output=memory.tensor("bfloat16", *shape),
        q_seq_len=3,
        mask=memory.tensor("uint16", 4, 3, 2),
    )
    seen = xqa(standin, arguments)
    assert (seen["batch"], seen["tokens"], seen["q_len"]) == (4, 12, 3)
    assert seen["mask"] == arguments["mask"].pointer


def test_drafts_without_a_mask_are_causal(standin: StandIn, memory: MadeUpMemory) -> None:
    q = memory.tensor("bfloat16", 4, 1, 3, HEADS, HEAD_DIM)
    assert xqa(standin, xqa_arguments(memory, q=q, output=replace(q), q_seq_len=3))["mask"] == 0


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_drafts_of_different_length(standin: StandIn, memory: MadeUpMemory, dtype: str) -> None:
    q = memory.tensor("bfloat16", 7, HEADS, HEAD_DIM)
    arguments = xqa_arguments(
        memory,
        q=q,
        output=memory.tensor("bfloat16", 7, HEADS, HEAD_DIM),
        q_seq_len=4,
        q_cu_seq_lens=memory.tensor(dtype, 5),
        mask=memory.tensor("uint16", 7, 2),
    )
    seen = xqa(standin, arguments)
    assert (seen["batch"], seen["tokens"], seen["q_len"]) == (4, 7, 4)
    assert seen["q_cu_seq_lens"] == arguments["q_cu_seq_lens"].pointer
    assert seen["mask"] == arguments["mask"].pointer


@pytest.mark.parametrize(("size", "left"), [(0, -1), (1, 0), (256, 255)])
def test_a_sliding_window_counts_its_own_key(standin: StandIn, memory: MadeUpMemory, size: int, left: int) -> None:
    assert xqa(standin, xqa_arguments(memory, sliding_win_size=size))["window_left"] == left


def test_the_largest_sliding_window_is_taken(standin: StandIn, memory: MadeUpMemory) -> None:
    assert xqa(standin, xqa_arguments(memory, sliding_win_size=1 << 31))["window_left"] >= 16 * PAGE


@pytest.mark.parametrize("shape", [(HEADS,), (KV_HEADS, HEADS // KV_HEADS)])
def test_sinks_come_flat_or_by_kv_head(standin: StandIn, memory: MadeUpMemory, shape: tuple[int, ...]) -> None:
    sinks = memory.tensor("float32", *shape)
    assert xqa(standin, xqa_arguments(memory, sinks=sinks))["sinks"] == sinks.pointer


@pytest.mark.parametrize(("layout", "dims"), [("NHD", (0, 1, 2, 3)), ("HND", (0, 2, 1, 3))])
def test_both_layouts_reach_the_descriptor_alike(
    standin: StandIn, memory: MadeUpMemory, layout: str, dims: tuple[int, ...]
) -> None:
    cache = memory.tensor("bfloat16", *(CACHE[i] for i in dims))
    seen = xqa(standin, xqa_arguments(memory, k_cache=cache, v_cache=replace(cache), kv_layout=layout))
    assert (seen["kv_heads"], seen["page_size_log2"]) == (KV_HEADS, 6)


def test_scales_as_numbers(standin: StandIn, memory: MadeUpMemory) -> None:
    seen = xqa(standin, xqa_arguments(memory, q_scale=0.5, kv_scale=0.25))
    assert seen["softmax_scale_log2"] == pytest.approx(0.5 * 0.25 * SCORES)
    assert seen["output_scale"] == 0.25


def test_a_kv_scale_on_the_device_scales_both_and_leaves_the_numbers(standin: StandIn, memory: MadeUpMemory) -> None:
    scale = memory.tensor("float32", 1)
    seen = xqa(standin, xqa_arguments(memory, q_scale=0.5, kv_scale=scale))
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scale.pointer, scale.pointer)
    assert seen["softmax_scale_log2"] == pytest.approx(0.5 * SCORES)
    assert seen["output_scale"] == 1.0
    assert memory.made == []


def test_a_q_scale_on_the_device_scales_the_scores_alone(standin: StandIn, memory: MadeUpMemory) -> None:
    scale = memory.tensor("float32")
    seen = xqa(standin, xqa_arguments(memory, q_scale=scale, kv_scale=0.25))
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (scale.pointer, 0)
    assert seen["softmax_scale_log2"] == pytest.approx(0.25 * SCORES)
    assert seen["output_scale"] == 0.25


def test_two_scales_on_the_device_are_multiplied_there(standin: StandIn, memory: MadeUpMemory) -> None:
    q_scale, kv_scale = memory.tensor("float32"), memory.tensor("float32")
    seen = xqa(standin, xqa_arguments(memory, q_scale=q_scale, kv_scale=kv_scale))
    ((what, product),) = memory.made
    assert what == f"product of {q_scale.pointer:#x} and {kv_scale.pointer:#x}"
    assert (seen["softmax_scale_device"], seen["output_scale_device"]) == (product.pointer, kv_scale.pointer)
    assert (seen["softmax_scale_log2"], seen["output_scale"]) == (pytest.approx(SCORES), 1.0)


def test_the_scale_of_an_e4m3_output_counts_in_the_output_alone(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = xqa_arguments(
        memory,
        k_cache=memory.tensor(FP8, *CACHE),
        v_cache=memory.tensor(FP8, *CACHE),
        output=memory.tensor(FP8, 4, 1, HEADS, HEAD_DIM),
        kv_scale=0.5,
        rcp_out_scale=4.0,
    )
    seen = xqa(standin, arguments)
    assert (seen["q_type"], seen["out_type"]) == (0, 2)
    assert seen["softmax_scale_log2"] == pytest.approx(0.5 * SCORES)
    assert seen["output_scale"] == 2.0


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", 0), ("float16", 1), (FP8, 2)])
def test_queries_over_an_e4m3_cache(standin: StandIn, memory: MadeUpMemory, dtype: str, code: int) -> None:
    caches = {name: memory.tensor(FP8, *CACHE) for name in ("k_cache", "v_cache")}
    seen = xqa(standin, xqa_arguments(memory, q=memory.tensor(dtype, 4, 1, HEADS, HEAD_DIM), **caches))
    assert seen["q_type"] == code


def test_what_the_peer_refuses_but_our_kernels_can(standin: StandIn, memory: MadeUpMemory) -> None:
    cache, q = memory.tensor("bfloat16", PAGES, PAGE, 2, 512), memory.tensor("bfloat16", 4, 1, 2, 64, 512)
    changes = {"q": q, "output": replace(q), "k_cache": cache, "v_cache": replace(cache), "num_kv_heads": 2}
    seen = xqa(standin, xqa_arguments(memory, **changes, q_seq_len=2))
    assert (seen["q_len"], seen["group"]) == (2, 32)


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), (True, "1"), (False, "0")])
def test_dependent_launch_is_on_unless_switched_off(
    standin: StandIn, memory: MadeUpMemory, given: bool | None, wanted: str
) -> None:
    xqa(standin, xqa_arguments(memory, enable_pdl=given))
    assert standin.calls("cuLaunchKernelEx")[-1].seen["pdl"] == wanted


@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), False), ((9, 0), True)])
def test_dependent_launch_is_off_by_default_where_the_device_lacks_it(
    standin: StandIn,
    memory: MadeUpMemory,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    wanted: bool,
) -> None:
    standin.pose_as(*capability)
    seen: list[bool] = []
    module = sys.modules[flashinfer.xqa.__module__]
    monkeypatch.setattr(module, "paged_decode", lambda *given, enable_pdl, **options: seen.append(enable_pdl))
    flashinfer.xqa(**xqa_arguments(memory))
    assert seen == [wanted]


def test_batch_invariance_splits_a_request_by_its_bound(standin: StandIn, memory: MadeUpMemory) -> None:
    assert xqa(standin, xqa_arguments(memory, batch_invariant=True))["splits"] == 4
    assert xqa(standin, xqa_arguments(memory))["splits"] == 0


def test_the_sm_count_of_the_device_is_taken(standin: StandIn, memory: MadeUpMemory, hopper: Runtime) -> None:
    xqa(standin, xqa_arguments(memory, sm_count=hopper.driver.device(0).multiprocessors))


def test_equal_calls_share_a_plan_and_read_nothing_back(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime
) -> None:
    arguments = xqa_arguments(memory)
    flashinfer.xqa(**arguments)
    standin.clear_log()
    flashinfer.xqa(**{**arguments, "seq_lens": memory.tensor("uint32", 4, 1)})
    assert standin.names().count("cuLaunchKernelEx") == 1
    assert not [name for name in standin.names() if "Alloc" in name or "Synchronize" in name or "Load" in name]
    assert (memory.reads, memory.made) == ([], [])


def test_too_few_semaphores_are_replaced_by_the_same_memory_of_ours(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = xqa_arguments(memory, semaphores=memory.tensor("uint32", 68))
    first = xqa(standin, arguments)
    assert first["status"] != arguments["semaphores"].pointer
    assert xqa(standin, arguments)["status"] == first["status"]
    others = xqa_arguments(memory, semaphores=memory.tensor("uint32", 68))
    assert xqa(standin, others)["status"] != first["status"]


def with_semaphores(memory: MadeUpMemory, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with semaphores elsewhere, too few of them again."""
    return {**arguments, "semaphores": memory.tensor("uint32", 68)}


def test_replaced_semaphores_are_a_bounded_number(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = xqa_arguments(memory)
    standin.clear_log()
    for _ in range(200):
        flashinfer.xqa(**with_semaphores(memory, arguments))
    made, freed = (standin.names().count(name) for name in ("cuMemAlloc", "cuMemFree"))
    assert made == 200
    assert made - freed <= 66


def test_replaced_semaphores_are_dropped_least_recently_used_first(standin: StandIn, memory: MadeUpMemory) -> None:
    arguments = with_semaphores(memory, xqa_arguments(memory))
    first = xqa(standin, arguments)
    for _ in range(2):
        for _ in range(40):
            flashinfer.xqa(**with_semaphores(memory, arguments))
        assert xqa(standin, arguments)["status"] == first["status"]


def test_replaced_semaphores_of_a_captured_graph_are_never_freed(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime
) -> None:
    arguments = with_semaphores(memory, xqa_arguments(memory))
    first = xqa(standin, arguments)
    memory.stream = hopper.driver.create_stream()
    hopper.driver.begin_capture(memory.stream)
    flashinfer.xqa(**arguments)
    hopper.driver.end_capture(memory.stream)
    workspace._replaced.clear()
    gc.collect()
    standin.clear_log()
    memory.stream = 0
    flashinfer.xqa(**with_semaphores(memory, arguments))
    freed = {int(call.seen["address"], 16) for call in standin.calls("cuMemFree")}
    assert first["status"] not in freed


def test_replaced_semaphores_are_not_freed_before_their_launch(
    standin: StandIn, memory: MadeUpMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may push an address out between the look at its semaphores and the launch."""
    arguments = with_semaphores(memory, xqa_arguments(memory))
    others = [with_semaphores(memory, arguments) for _ in range(200)]
    module, seen = sys.modules[flashinfer.xqa.__module__], []
    real = module.launch

    def launch(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "launch", real)
        for other in others:
            flashinfer.xqa(**other)
        freed = {int(call.seen["address"], 16) for call in standin.calls("cuMemFree")}
        seen.append((options["workspace"].semaphores[0], freed))
        return real(*given, **options)

    monkeypatch.setattr(module, "launch", launch)
    standin.clear_log()
    flashinfer.xqa(**arguments)
    ((own, freed),) = seen
    assert freed
    assert own not in freed


@pytest.mark.parametrize(("q_len", "suffice"), [(1, True), (8, False)])
def test_semaphores_are_counted_for_every_draft(
    standin: StandIn, memory: MadeUpMemory, q_len: int, suffice: bool
) -> None:
    q = memory.tensor("bfloat16", 100, 1, q_len, HEADS, HEAD_DIM)
    given = xqa_arguments(
        memory,
        q=q,
        output=replace(q),
        q_seq_len=q_len,
        page_table=memory.tensor("int32", 100, 16),
        seq_lens=memory.tensor("uint32", 100, 1),
        semaphores=memory.tensor("uint32", 8000),
    )
    assert (xqa(standin, given)["status"] == given["semaphores"].pointer) is suffice


def test_more_semaphores_for_one_address_take_the_place_of_fewer(standin: StandIn, memory: MadeUpMemory) -> None:
    semaphores = memory.tensor("uint32", 68)
    few = xqa_arguments(memory, semaphores=semaphores)
    many = few | {
        "q": memory.tensor("bfloat16", 2000, 1, HEADS, HEAD_DIM),
        "output": memory.tensor("bfloat16", 2000, 1, HEADS, HEAD_DIM),
        "page_table": memory.tensor("int32", 2000, 16),
        "seq_lens": memory.tensor("uint32", 2000, 1),
    }
    first, larger = xqa(standin, few), xqa(standin, many)
    assert larger["status"] != first["status"]
    assert xqa(standin, few)["status"] == larger["status"]


def test_replaced_semaphores_of_a_captured_graph_stay_its_own(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime
) -> None:
    arguments = with_semaphores(memory, xqa_arguments(memory))
    first = xqa(standin, arguments)
    memory.stream = hopper.driver.create_stream()
    hopper.driver.begin_capture(memory.stream)
    assert xqa(standin, arguments)["status"] == first["status"]
    hopper.driver.end_capture(memory.stream)
    memory.stream = 0
    for _ in range(100):
        assert xqa(standin, with_semaphores(memory, arguments))["status"] != first["status"]
    assert xqa(standin, arguments)["status"] == first["status"]


def test_a_capture_with_too_few_semaphores_says_how_many(
    standin: StandIn, memory: MadeUpMemory, hopper: Runtime
) -> None:
    hopper.driver.primary_context(0)
    memory.stream = hopper.driver.create_stream()
    hopper.driver.begin_capture(memory.stream)
    with pytest.raises(WorkspaceError, match="semaphores of 272 bytes: 32768 bytes are needed"):
        flashinfer.xqa(**xqa_arguments(memory, semaphores=memory.tensor("uint32", 68)))


def test_a_call_is_captured_after_a_first_run(standin: StandIn, memory: MadeUpMemory, hopper: Runtime) -> None:
    arguments = xqa_arguments(memory)
    hopper.driver.primary_context(0)
    memory.stream = hopper.driver.create_stream()
    flashinfer.xqa(**arguments)
    hopper.driver.begin_capture(memory.stream)
    seen = xqa(standin, arguments)
    assert seen["q"] == arguments["q"].pointer


def test_it_runs_on_the_stream_of_the_caller(standin: StandIn, memory: MadeUpMemory, hopper: Runtime) -> None:
    hopper.driver.primary_context(0)
    memory.stream = hopper.driver.create_stream()
    flashinfer.xqa(**xqa_arguments(memory))
    assert int(standin.calls("cuLaunchKernelEx")[-1].seen["stream"], 0) == memory.stream


def test_a_workspace_that_is_too_small_goes_by_its_name(memory: MadeUpMemory) -> None:
    given = xqa_arguments(memory, workspace_buffer=memory.tensor("uint8", 1024), batch_invariant=True)
    with pytest.raises(WorkspaceError, match=r"^workspace_buffer of 1024 bytes: \d+ bytes are needed"):
        flashinfer.xqa(**given)
