"""Plans on a machine without a GPU: a described device by name, and tensors of torch without memory."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime import BackendError, Runtime, UsageError, append_kv, plan_append_kv, plan_paged_decode
from cubin_runtime.attention.described_tensors import describe_tensors
from tests.attention.attention_examples import Tensors

GOOD = Tensors()


def plan(runtime: Runtime, **options: Any) -> Any:
    asked = {"max_seq_len": 1024, "runtime": runtime, **GOOD.named, **options}
    return plan_paged_decode(*GOOD.positional, **asked)


@pytest.mark.parametrize(("name", "multiprocessors"), [("H200", 132), ("NVIDIA H100", 132), ("h200", 132)])
def test_a_device_is_described_by_its_name(planner: Runtime, name: str, multiprocessors: int) -> None:
    (launch,) = plan(planner, device_facts=name).launch_plans()
    assert 0 < launch.grid[0] * launch.grid[1] * launch.grid[2] <= 2 * multiprocessors


def test_an_h100_has_its_own_costs(planner: Runtime) -> None:
    times = [plan(planner, device_facts=name).selections[0].microseconds for name in ("H100", "H200")]
    assert times[0] > times[1]


@pytest.mark.parametrize("facts", ["H300", "", 90])
def test_an_unknown_device_is_usage(planner: Runtime, facts: Any) -> None:
    with pytest.raises(UsageError, match="expected DeviceFacts or "):
        plan(planner, device_facts=facts)


@pytest.mark.parametrize("name", ["B200", "B300"])
def test_on_blackwell_the_trtllm_gen_functions_are_named(planner: Runtime, name: str) -> None:
    with pytest.raises(
        BackendError,
        match=r"trtllm_batch_decode_with_kv_cache \(backend 'trtllm-gen'\) in cubin_runtime.compat.flashinfer",
    ):
        plan(planner, device_facts=name)


def decode_tensors(torch: Any, device: str) -> dict[str, Any]:
    return {
        "q": torch.empty(4, 64, 128, dtype=torch.bfloat16, device=device),
        "k_cache": torch.empty(100, 64, 8, 128, dtype=torch.bfloat16, device=device),
        "v_cache": torch.empty(100, 64, 8, 128, dtype=torch.bfloat16, device=device),
        "page_table": torch.empty(4, 16, dtype=torch.int32, device=device),
        "seq_lens": torch.empty(4, dtype=torch.int32, device=device),
        "out": torch.empty(4, 64, 128, dtype=torch.bfloat16, device=device),
    }


@pytest.mark.torch
def test_meta_tensors_are_planned_for_like_views_of_their_shape(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    made = plan_paged_decode(**decode_tensors(torch, "meta"), max_seq_len=1024, runtime=planner, device_facts="H200")
    (launch,), (expected,) = made.launch_plans(), plan(planner, device_facts="H200").launch_plans()
    assert (launch.kernel, launch.grid, launch.block) == (expected.kernel, expected.grid, expected.block)


@pytest.mark.torch
def test_fake_tensors_are_planned_for(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = plan_paged_decode(
            **decode_tensors(torch, "cuda"), max_seq_len=1024, runtime=planner, device_facts="H200"
        )
    assert made.launch_plans()[0].kernel == plan(planner, device_facts="H200").launch_plans()[0].kernel


@pytest.mark.torch
def test_rules_hold_for_meta_tensors(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    wrong = {**decode_tensors(torch, "meta"), "seq_lens": torch.empty(4, dtype=torch.int64, device="meta")}
    with pytest.raises(UsageError, match=r"seq_lens: dtype int64, .* torch's .int\(\) converts it"):
        plan_paged_decode(**wrong, max_seq_len=1024, runtime=planner, device_facts="H200")


@pytest.mark.torch
def test_without_a_described_device_the_error_names_the_argument(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="q: is on meta, expected a CUDA device; a plan with device_facts='H200'"):
        plan_paged_decode(**decode_tensors(torch, "meta"), max_seq_len=1024, runtime=planner)


@pytest.mark.torch
def test_other_operators_take_meta_tensors(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    tensors = decode_tensors(torch, "meta")
    new = torch.empty(4, 2, 8, 128, dtype=torch.bfloat16, device="meta")
    names = ("k_cache", "v_cache", "page_table", "seq_lens")
    with pytest.raises(UsageError, match=r"the release has no kernel|no .*kernel"):  # the last step of planning
        plan_append_kv(new, new.clone(), *(tensors[name] for name in names), runtime=planner, device_facts="H200")


@pytest.mark.torch
def test_views_of_one_meta_tensor_share_memory() -> None:
    torch = pytest.importorskip("torch")
    both = torch.empty(100, 64, 2, 8, 128, dtype=torch.bfloat16, device="meta")
    arguments = {"k": both[:, :, 0], "v": both[:, :, 1], "other": torch.empty(3, device="meta"), "number": 1}
    describe_tensors(arguments)
    k, v, other = arguments["k"], arguments["v"], arguments["other"]
    assert (v.pointer - k.pointer, v.strides) == (8 * 128 * 2, (64 * 2 * 8 * 128, 2 * 8 * 128, 128, 1))
    assert other.pointer >= k.pointer + both.numel() * 2
    assert arguments["number"] == 1


@pytest.mark.torch
def test_a_fake_tensor_without_a_described_device_is_told_how_to_plan(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(UsageError, match=r"q: a FakeTensor, .*; a plan with device_facts='H200'"):
        plan_paged_decode(**decode_tensors(torch, "cuda"), max_seq_len=1024, runtime=planner)


@pytest.mark.torch
def test_a_call_with_meta_tensors_says_so_before_it_asks_for_a_stream(planner: Runtime) -> None:
    torch = pytest.importorskip("torch")
    tensors = decode_tensors(torch, "meta")
    new = torch.empty(4, 2, 8, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UsageError, match="k: is on meta, expected a CUDA device"):
        append_kv(
            new, new, *(tensors[name] for name in ("k_cache", "v_cache", "page_table", "seq_lens")), runtime=planner
        )
