"""The operators end to end: from FlashInfer's arguments to the launches that the driver receives."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.attention import trtllm_gen as operators
from cubin_runtime.attention.backends import BackendError
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import FrozenError, UsageError, WorkspaceError
from cubin_runtime.kernels.trtllm_gen.batch_invariance import InvarianceRefused
from cubin_runtime.kernels.trtllm_gen.call import Call
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.testing import StandIn
from tests.attention.trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    launched,
    mla_arguments,
    ragged_arguments,
)
from tests.attention.trtllm_operators import OPERATORS, Spy, expected_parameters, main_launch, reduced_mla

FP8 = "float8_e4m3fn"
NON_PORTABLE_CLUSTER = "14"  # CUfunction_attribute


@pytest.mark.parametrize("name", OPERATORS)
def test_the_launch_is_what_the_planner_says(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory))
    seen = main_launch(standin)
    plan = spy.runs[0][0]
    main = plan.launch_plans()[0]
    assert seen["symbol"] == plan.kernel
    assert seen["grid"] == ",".join(map(str, main.grid))
    assert seen["block"] == f"{plan.decision.meta.threads},1,1"
    assert int(seen["shared"]) == plan.decision.meta.shared_bytes
    assert seen["cluster"] == ",".join(map(str, main.attributes.cluster or ()))
    assert int(seen["policy"]) == main.attributes.scheduling_policy
    assert seen["aligned0"] == "1"
    assert launched(seen) == expected_parameters(runtime, spy)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_driver_gets_the_bytes_of_the_manifest(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory))
    plan = spy.runs[0][0]
    wanted = {runtime.digest_of(launch.path) for launch in plan.launch_plans()}
    assert {hashlib.sha256(image).hexdigest() for image in standin.images()} >= wanted
    assert plan.decision.meta.sha256 in wanted


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_call_takes_the_cached_plan_and_its_own_addresses(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory))
    loads = runtime.modules.counts.loads
    standin.clear_log()
    operator(**arguments(memory, bmm1_scale=0.5, bmm2_scale=0.25))
    assert spy.runs[0][0] is spy.runs[1][0]
    assert runtime.modules.counts.loads == loads
    assert "cuModuleLoadData" not in standin.names()
    assert launched(main_launch(standin)) == expected_parameters(runtime, spy)


@pytest.mark.parametrize("name", OPERATORS)
def test_lse_is_made_behind_the_main_launch(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    out, lse = operator(**arguments(memory, return_lse=True))
    plan, call, _, _ = spy.runs[0]
    last = standin.calls("cuLaunchKernelEx")[-1].seen
    assert last["symbol"] == plan.launch_plans()[-1].symbol
    rows = call.tokens * call.query.shape[1]
    threads = min(1024, 1 << (rows - 1).bit_length())
    assert (last["grid"], last["block"]) == (f"{-(-rows // threads)},1,1", f"{threads},1,1")
    sent = plan.launch_plans()[-1].layout.unpack(launched(last))
    assert sent["lse"] == lse.pointer
    assert sent["rows"] == rows
    main = KERNEL_PARAMS.unpack(launched(main_launch(standin)))
    assert sent["statistics"] == main["ptrSoftmaxStats"] != 0
    assert main["ptrO"] == out.pointer


def test_a_reduction_follows_where_the_kernel_does_not_merge(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory))
    plan = spy.runs[0][0]
    assert plan.decision.reduction is not None
    main, reduction = [call.seen for call in standin.calls("cuLaunchKernelEx")]
    assert reduction["symbol"] == plan.launch_plans()[1].symbol
    assert reduction["grid"] == ",".join(map(str, plan.decision.reduction.grid))
    assert reduction["block"] == "512,1,1"
    assert reduction["pdl"] == main["pdl"] == "1"
    sent, first = plan.launch_plans()[1].layout.unpack(launched(reduction)), KERNEL_PARAMS.unpack(launched(main))
    assert sent["out"] == out.pointer
    assert (sent["partial_out"], sent["partial_statistics"]) == (first["ptrPartialO"], first["ptrPartialStats"])
    assert (sent["ctas_q"], sent["ctas_kv"]) == (first["mMaxNumCtasQ"], first["mMaxNumCtasKv"])
    assert sent["softmax_scale_log2"] == first["mScaleSoftmaxLog2"]
    assert sent["sum_scale"] == 1.0


def test_the_reduction_reads_the_scale_on_the_device_that_the_main_kernel_reads(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    given = reduced_mla(memory, bmm1_scale=memory.tensor("float32", 1), bmm2_scale=memory.tensor("float32", 1))
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    main, reduction = [call.seen for call in standin.calls("cuLaunchKernelEx")]
    (made,) = [view for what, view in memory.made if what == "scaled by 1.4427"]
    sent = spy.runs[0][0].launch_plans()[1].layout.unpack(launched(reduction))
    first = KERNEL_PARAMS.unpack(launched(main))
    assert sent["device_softmax_scale_log2"] == first["ptrScaleSoftmaxLog2"] == made.pointer
    assert first["ptrOutputScale"] == given["bmm2_scale"].pointer


def test_eight_bit_queries_scale_the_sums_of_the_reduction(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    given = reduced_mla(memory, query=memory.tensor(FP8, 4, 2, 128, 576), kv_cache=memory.tensor(FP8, 1024, 64, 576))
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    reduction = standin.calls("cuLaunchKernelEx")[1].seen
    assert spy.runs[0][0].launch_plans()[1].layout.unpack(launched(reduction))["sum_scale"] == 448.0


def test_ragged_queries_with_their_bound_read_nothing_back(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    given = mla_arguments(
        memory, query=memory.tensor("bfloat16", 7, 128, 576), cum_seq_lens_q=memory.tensor("int32", 5), max_q_len=3
    )
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)
    assert memory.reads == []
    assert not {"cuStreamSynchronize", "cuMemcpyDtoHAsync"} & set(standin.names())
    sent = KERNEL_PARAMS.unpack(launched(main_launch(standin)))
    assert (sent["mMaxSeqLenQ"], sent["mSumOfSeqLensQ"]) == (3, 7)
    assert sent["ptrCumSeqLensQ"] == given["cum_seq_lens_q"].pointer


def test_ragged_queries_without_their_bound_read_it_back_once(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    given = decode_arguments(
        memory,
        query=memory.tensor("bfloat16", 7, 32, 128),
        q_len_per_req=None,
        cum_seq_lens_q=memory.tensor("int32", 5, values=(0, 1, 4, 5, 7)),
    )
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    assert memory.reads == [given["cum_seq_lens_q"].pointer]
    assert KERNEL_PARAMS.unpack(launched(main_launch(standin)))["mMaxSeqLenQ"] == 3


def test_nhd_caches_are_taken_by_their_strides(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    cache = memory.tensor("bfloat16", 64, 2, 32, 4, 128)
    flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory, kv_cache=cache, kv_layout="NHD"))
    key = [
        call.seen for call in standin.calls("cuTensorMapEncodeTiled") if int(call.seen["address"], 16) == cache.pointer
    ]
    assert key[0]["dims"] == "128,32,4,128"
    assert key[0]["strides"] == "1024,256,65536"


def test_an_fp4_output_comes_with_its_scales(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    given = decode_arguments(
        memory, query=memory.tensor(FP8, 4, 32, 128), kv_cache=memory.tensor(FP8, 64, 2, 4, 32, 128)
    )
    out = flashinfer.trtllm_batch_decode_with_kv_cache(**given, out_dtype="nvfp4", o_sf_scale=0.5)
    sent = KERNEL_PARAMS.unpack(launched(main_launch(standin)))
    assert (out.data.shape, out.scale.shape) == ((4, 32, 64), (128, 256))
    assert (sent["ptrO"], sent["ptrSfO"], sent["mScaleSfO"]) == (out.data.pointer, out.scale.pointer, 0.5)


def test_an_fp4_cache_comes_with_its_scales(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    cache, scales = memory.tensor("uint8", 64, 2, 4, 32, 64), memory.tensor(FP8, 64, 2, 4, 32, 8)
    given = decode_arguments(memory, query=memory.tensor(FP8, 4, 32, 128), kv_cache=cache, kv_cache_sf=scales)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    encoded = {int(call.seen["address"], 16) for call in standin.calls("cuTensorMapEncodeTiled")}
    assert {cache.pointer, scales.pointer} <= encoded


def test_a_workspace_that_is_too_small_is_refused_with_the_bytes_needed(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory))
    plan, call, _, _ = spy.runs[0]
    needed = operators.workspace_size(call, runtime=runtime)
    assert needed == plan.workspace_bytes
    assert needed >= plan.decision.scratch_bytes > 1 << 20
    standin.clear_log()
    small = memory.tensor("uint8", needed - 16)
    with pytest.raises(
        WorkspaceError, match=rf"workspace of {needed - 16} bytes at .* needs \d+ bytes there, {needed}"
    ):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, workspace_buffer=small))
    assert "cuLaunchKernelEx" not in standin.names()


def test_a_workspace_of_the_size_told_ahead_holds_scratch_and_statistics(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, return_lse=True))
    needed = operators.workspace_size(spy.runs[0][1], runtime=runtime)
    exact = memory.tensor("uint8", needed)
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, return_lse=True, workspace_buffer=exact))
    main = [c.seen for c in standin.calls("cuLaunchKernelEx") if c.seen["symbol"] == spy.runs[0][0].kernel][-1]
    sent = KERNEL_PARAMS.unpack(launched(main))
    assert exact.pointer <= sent["ptrSoftmaxStats"] < sent["ptrPartialStats"] < sent["ptrPartialO"]
    assert sent["ptrPartialO"] < exact.pointer + needed


def test_a_workspace_of_the_size_told_ahead_may_begin_anywhere(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory))
    exact = memory.tensor("uint8", operators.workspace_size(spy.runs[0][1], runtime=runtime))
    for offset in (0, 1, 15):
        moved = replace(exact, pointer=exact.pointer + offset)
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, workspace_buffer=moved))


def test_a_workspace_without_room_for_statistics_is_refused(runtime: Runtime, memory: MadeUpMemory) -> None:
    small = memory.tensor("uint8", 1 << 20)
    with pytest.raises(WorkspaceError, match="workspace of 1048576 bytes"):
        flashinfer.trtllm_batch_context_with_kv_cache(
            **context_arguments(memory, return_lse=True, workspace_buffer=small)
        )


@pytest.mark.parametrize("scale", [math.nan, 1e39])
def test_a_scale_that_is_no_number_is_refused_by_a_cached_plan_too(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy, scale: float
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory))
    with pytest.raises(UsageError, match=re.escape(f"bmm2_scale={scale}")):
        flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory, bmm2_scale=scale))


def test_an_lse_by_request_and_token_is_filled_in_place(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    lse = memory.tensor("float32", 4, 2, 128)
    given = mla_arguments(memory, lse=lse, return_lse=True)
    assert flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given)[1] is lse
    last = standin.calls("cuLaunchKernelEx")[-1].seen
    sent = spy.runs[0][0].launch_plans()[-1].layout.unpack(launched(last))
    assert (sent["lse"], sent["token_stride"], sent["head_stride"]) == (lse.pointer, 128, 1)


def test_sinks_are_taken_as_a_list_of_one_too(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    sinks = memory.tensor("float32", 32)
    flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory, sinks=[sinks]))
    assert KERNEL_PARAMS.unpack(launched(main_launch(standin)))["ptrAttentionSinks"] == sinks.pointer


def splitting_decode(memory: MadeUpMemory, **changes: Any) -> dict[str, Any]:
    """Decode whose splits meet in global memory, by counters: too many CTAs for a cluster."""
    pool = (memory.tensor("bfloat16", 4096, 1, 32, 128), memory.tensor("bfloat16", 4096, 1, 32, 128))
    given = {
        "query": memory.tensor("bfloat16", 1, 8, 128),
        "kv_cache": pool,
        "block_tables": memory.tensor("int32", 1, 4096),
        "seq_lens": memory.tensor("int32", 1),
        "max_seq_len": 131072,
    }
    return decode_arguments(memory, **{**given, **changes})


def test_counters_are_made_zeroed_where_splits_meet_in_global_memory(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**splitting_decode(memory))
    (zeros,) = [view for what, view in memory.made if what == "zeros"]
    assert KERNEL_PARAMS.unpack(launched(main_launch(standin)))["ptrMultiCtasKvCounter"] == zeros.pointer
    assert zeros.shape[0] * 4 == operators.counter_size(spy.runs[0][1], runtime=runtime)


def test_counters_of_the_caller_are_used(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    own = memory.tensor("int32", 4096)
    flashinfer.trtllm_batch_decode_with_kv_cache(**splitting_decode(memory, multi_ctas_kv_counter_buffer=own))
    assert KERNEL_PARAMS.unpack(launched(main_launch(standin)))["ptrMultiCtasKvCounter"] == own.pointer
    assert [what for what, _ in memory.made] == ["empty"]


@pytest.mark.parametrize("number", [4, 135])
def test_counters_that_are_too_few_are_refused_with_the_bytes_needed(
    runtime: Runtime, memory: MadeUpMemory, number: int
) -> None:
    own = memory.tensor("int32", number)
    with pytest.raises(WorkspaceError, match=rf"counters of {4 * number} bytes: .* needs 544 bytes"):
        flashinfer.trtllm_batch_decode_with_kv_cache(**splitting_decode(memory, multi_ctas_kv_counter_buffer=own))


def test_a_stream_of_its_own_needs_counters_of_its_own(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    given = splitting_decode(memory)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    call, workspace = spy.runs[0][1], given["workspace_buffer"]
    stream = runtime.driver.create_stream()
    with pytest.raises(UsageError, match="counters: None with a stream of its own; expected 544 zeroed bytes"):
        operators.run(call, workspace, stream=stream, runtime=runtime)
    standin.clear_log()
    operators.run(call, workspace, counters=memory.tensor("int32", 136), stream=stream, runtime=runtime)
    assert standin.call("cuLaunchKernelEx")["stream"] == hex(stream)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"strides": (2,)}, "workspace_buffer: strides .*contiguous"), ({"device": 1}, "workspace_buffer: on device 1")],
)
def test_a_workspace_of_another_form_is_refused(
    runtime: Runtime, memory: MadeUpMemory, changes: dict[str, Any], words: str
) -> None:
    given = decode_arguments(memory)
    given["workspace_buffer"] = replace(given["workspace_buffer"], **changes)
    with pytest.raises(UsageError, match=words):
        flashinfer.trtllm_batch_decode_with_kv_cache(**given)


def test_misaligned_counters_are_refused(runtime: Runtime, memory: MadeUpMemory) -> None:
    own = memory.tensor("int32", 4096)
    own = replace(own, pointer=own.pointer + 4)
    with pytest.raises(
        UsageError, match=r"^multi_ctas_kv_counter_buffer: at 0x.*; expected 16-byte aligned, contiguous"
    ):
        flashinfer.trtllm_batch_decode_with_kv_cache(**splitting_decode(memory, multi_ctas_kv_counter_buffer=own))


def test_clusters_are_asked_of_the_driver(runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory))
    asked = spy.runs[0][0].decision.selection.asked
    assert asked is not None
    (question,) = standin.calls("cuOccupancyMaxActiveClusters")
    assert question.seen["cluster"] == f"{asked.cluster_x},1,1"
    assert asked.active_clusters == 16


def test_a_cluster_of_sixteen_is_allowed_before_it_is_asked_about(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    one = {"query": memory.tensor("bfloat16", 1, 32, 128), "seq_lens": memory.tensor("int32", 1)}
    given = decode_arguments(memory, **one, block_tables=memory.tensor("int32", 1, 256), max_seq_len=8192)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    call = spy.runs[0][1]
    runtime.modules.close()
    runtime.plans = type(runtime.plans)()
    standin.clear_log()
    asked = operators.plan(call, runtime=runtime).decision.selection.asked
    assert asked is not None
    assert asked.cluster_x == 16
    allowed = {call.seen["attribute"] for call in standin.calls("cuFuncSetAttribute")}
    assert NON_PORTABLE_CLUSTER in allowed


def test_a_tile_without_a_kernel_is_passed_over(runtime: Runtime, memory: MadeUpMemory, spy: Spy) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(
        **decode_arguments(
            memory,
            query=memory.tensor("bfloat16", 96, 64, 512),
            kv_cache=memory.tensor("bfloat16", 64, 2, 4, 64, 512),
            block_tables=memory.tensor("int32", 32, 256),
            seq_lens=memory.tensor("int32", 32),
            max_seq_len=16384,
            q_len_per_req=3,
        )
    )
    passes = spy.runs[0][0].decision.selection.passes
    assert any(candidate.kernel is None for done in passes for candidate in done.candidates)


def test_lengths_that_grow_keep_the_plan(runtime: Runtime, memory: MadeUpMemory, spy: Spy) -> None:
    for length in (1025, 1500, 2048):
        flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory, max_seq_len=length))
    assert len({id(plan) for plan, *_ in spy.runs}) == 1


def test_preloaded_kernels_serve_after_freeze(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy
) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, return_lse=True))
    call = spy.runs[0][1]
    runtime.modules.close()
    runtime.plans = type(runtime.plans)()
    report = operators.preload(call, runtime=runtime)
    assert report.loads == 3
    runtime.freeze()
    standin.clear_log()
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, return_lse=True))
    assert len(standin.calls("cuLaunchKernelEx")) == 3
    assert "cuModuleLoadData" not in standin.names()


def test_a_kernel_that_is_not_loaded_is_refused_after_freeze(runtime: Runtime, memory: MadeUpMemory) -> None:
    runtime.freeze()
    with pytest.raises(FrozenError, match="preload"):
        flashinfer.trtllm_batch_context_with_kv_cache(**context_arguments(memory))


def test_a_capturing_stream_gets_launches_of_loaded_kernels(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    given = context_arguments(memory)
    flashinfer.trtllm_batch_context_with_kv_cache(**given)
    stream = runtime.driver.create_stream()
    memory.stream = stream
    runtime.driver.begin_capture(stream)
    standin.clear_log()
    flashinfer.trtllm_batch_context_with_kv_cache(**given)
    assert standin.call("cuLaunchKernelEx")["stream"] == hex(stream)
    assert not {"cuMemAlloc", "cuModuleLoadData", "cuStreamSynchronize"} & set(standin.names())


@pytest.mark.parametrize("name", ["decode", "mla"])
def test_batch_invariance_finds_one_kernel_for_every_batch_and_bound(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory), batch_invariant=True)
    first = spy.runs[0][1]
    kernels = {
        operators.plan(call, runtime=runtime).kernel
        for batch in range(1, 257)
        for call in (resized(first, memory, batch, max_q=1 + batch % 3, max_kv=1 + 61 * batch),)
    }
    assert kernels == {spy.runs[0][0].kernel}


def resized(call: Call, memory: MadeUpMemory, batch: int, max_q: int, max_kv: int) -> Call:
    """The call for another batch and other bounds."""
    heads, width = call.query.shape[1:]
    table = memory.tensor("int32", batch, call.block_tables.shape[1])  # type: ignore[attr-defined]
    return replace(  # type: ignore[call-arg]
        call,
        query=memory.tensor(call.query.dtype, batch * max_q, heads, width),
        out=memory.tensor(call.out.dtype, batch * max_q, heads, call.out.shape[2]),
        seq_lens=memory.tensor("int32", batch),
        block_tables=table,
        max_q=max_q,
        max_kv=max_kv,
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_a_batch_invariant_launch_splits_no_kv(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory), batch_invariant=True)
    assert KERNEL_PARAMS.unpack(launched(main_launch(standin)))["mMaxNumCtasKv"] == 1
    assert len(standin.calls("cuLaunchKernelEx")) == 1
    assert "Persistent" in spy.runs[0][0].kernel


def test_without_it_the_kernel_follows_the_batch(runtime: Runtime, memory: MadeUpMemory, spy: Spy) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache(**decode_arguments(memory))
    first = spy.runs[0][1]
    large = resized(first, memory, 256, max_q=1, max_kv=2000)
    assert operators.plan(large, runtime=runtime).kernel != spy.runs[0][0].kernel


def test_batch_invariance_without_a_kernel_is_refused(runtime: Runtime, memory: MadeUpMemory) -> None:
    given = mla_arguments(
        memory,
        query=memory.tensor("bfloat16", 4, 2, 128, 320),
        kv_cache=memory.tensor("bfloat16", 1024, 64, 320),
        kv_lora_rank=256,
    )
    with pytest.raises(InvarianceRefused, match="batch_invariant: the release has no kernel"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given, batch_invariant=True)


def refused(operator: Callable[..., Any], given: dict[str, Any], standin: StandIn) -> None:
    with pytest.raises(BackendError, match=r"no backend supports it \(.*trtllm-gen: published for 10.0, 10.3\)"):
        operator(**given)
    assert standin.calls("cuModuleLoadData") == []


@pytest.mark.parametrize("name", ["decode", "mla"])
@pytest.mark.parametrize("where", [(9, 0), (12, 0)], ids=["sm90", "sm120"])
def test_other_devices_are_refused_with_what_there_is(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str, where: tuple[int, int]
) -> None:
    standin.pose_as(*where)
    operator, arguments = OPERATORS[name]
    refused(operator, arguments(memory, backend="trtllm-gen"), standin)


@pytest.mark.parametrize("name", ["context", "ragged"])
def test_context_operators_are_refused_where_neither_backend_is(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, name: str
) -> None:
    standin.pose_as(12, 0)
    operator, arguments = OPERATORS[name]
    refused(operator, arguments(memory), standin)


def test_a_call_as_a_value_is_for_trtllm_gen_kernels_alone(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory
) -> None:
    standin.pose_as(9, 0)
    scale = operators.Scale(1.0)
    tensors = {name: memory.tensor("bfloat16", 300, 32, 128) for name in ("query", "key", "value", "out")}
    lengths = {name: memory.tensor("int32", 4) for name in ("cum_seq_lens_q", "cum_seq_lens_kv")}
    given = {**tensors, **lengths, "seq_lens": memory.tensor("int32", 3), "bmm1": scale, "bmm2": scale}
    call = operators.RaggedCall(**given, max_q=128, max_kv=128)  # type: ignore[arg-type]
    refused(operators.plan, {"call": call, "runtime": runtime}, standin)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bmm1": 0.5}, "bmm1: got float, expected Scale"),
        ({"bmm2": None}, "bmm2: got NoneType, expected Scale"),
        ({"query": object()}, "query: got object, expected TensorView"),
        ({"lse": 5}, "lse: got int, expected TensorView"),
        ({"max_q": True}, "max_q: got bool, expected int"),
        ({"max_kv": 128.0}, "max_kv: got float, expected int"),
        ({"window_left": None}, "window_left: got NoneType, expected int"),
        ({"pdl": None}, "pdl: got NoneType, expected bool"),
        ({"sage": None}, "sage: got NoneType, expected Sage"),
    ],
)
def test_a_field_of_another_kind_is_named(
    runtime: Runtime, memory: MadeUpMemory, spy: Spy, changes: dict[str, Any], words: str
) -> None:
    flashinfer.trtllm_ragged_attention_deepseek(**ragged_arguments(memory))
    call, workspace = spy.runs[-1][1], memory.tensor("uint8", 128 << 20)
    for ask in (operators.plan, operators.workspace_size, lambda asked: operators.run(asked, workspace)):
        with pytest.raises(UsageError, match=f"^{words}"):
            ask(replace(call, **changes))


def test_calls_and_runtimes_of_other_classes_are_refused(runtime: Runtime, memory: MadeUpMemory, spy: Spy) -> None:
    flashinfer.trtllm_ragged_attention_deepseek(**ragged_arguments(memory))
    with pytest.raises(UsageError, match="call: got NoneType, expected DecodeCall, ContextCall or RaggedCall"):
        operators.plan(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="runtime: got int, expected a Runtime"):
        operators.plan(spy.runs[-1][1], runtime=5)  # type: ignore[arg-type]


def test_kernels_of_ours_that_never_ran_there_come_with_a_warning(runtime: Runtime, memory: MadeUpMemory) -> None:
    with pytest.warns(UserWarning, match=r"trtllm_gen_kv_reduction_bf16_to_bf16_sm10\d runs after .* never run there"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory))
