"""Two real devices: operators run where their tensors are, whatever is current, and never mix devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cubin_runtime import CubinRuntimeError
from cubin_runtime.attention import Runtime, mla_decode, paged_decode, plan_mla_decode, plan_paged_decode
from cubin_runtime.attention.runtime import NATIVE_RELEASE
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import FrozenError, UsageError
from cubin_runtime.launch.workspace import Workspace

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

BATCH, KV_HEADS, GROUP, HEAD_DIM, PAGE, COLUMNS = 3, 4, 8, 128, 64, 12
HEADS, LATENT = 16, 512
BOUND = PAGE * COLUMNS
PAIRS = [(device, current) for device in (0, 1) for current in (0, 1)]


@pytest.fixture(autouse=True)
def on_the_first_device() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    for device in (0, 1):
        torch.cuda.synchronize(device)
    torch.cuda.set_device(0)


def gqa(device: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    on = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
    pages = BATCH * COLUMNS
    return {
        "q": torch.randn(BATCH, KV_HEADS * GROUP, HEAD_DIM, **on),
        "k_cache": torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, **on),
        "v_cache": torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, **on),
        "page_table": torch.randperm(pages, device=on["device"], dtype=torch.int32).view(BATCH, COLUMNS),
        "seq_lens": torch.tensor([BOUND, 65, 1], device=on["device"], dtype=torch.int32),
    }


def mla(device: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    on = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
    pages = BATCH * COLUMNS
    return {
        "q": torch.randn(BATCH, HEADS, LATENT + 64, **on),
        "kv_cache": torch.randn(pages, PAGE, LATENT + 64, **on),
        "page_table": torch.randperm(pages, device=on["device"], dtype=torch.int32).view(BATCH, COLUMNS),
        "seq_lens": torch.tensor([BOUND, 65, 1], device=on["device"], dtype=torch.int32),
    }


def gqa_reference(given: dict[str, Any]) -> Any:
    return _reference(given["q"], given["k_cache"], given["v_cache"], given, HEAD_DIM**-0.5, KV_HEADS)


def mla_reference(given: dict[str, Any]) -> Any:
    keys = given["kv_cache"].unsqueeze(2)
    return _reference(given["q"], keys, keys[..., :LATENT], given, 0.05, 1)


def _reference(q: Any, k: Any, v: Any, given: dict[str, Any], scale: float, kv_heads: int) -> Any:
    out = torch.zeros(*q.shape[:-1], v.shape[-1], device=q.device, dtype=torch.float64)
    for b, length in enumerate(given["seq_lens"].tolist()):
        pages = given["page_table"][b].long()
        keys, values = (c[pages].reshape(-1, kv_heads, c.shape[-1])[:length].double() for c in (k, v))
        rows = q[b].double().view(kv_heads, -1, q.shape[-1])
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", rows, keys) * scale, -1)
        out[b] = torch.einsum("hgn,nhd->hgd", weights, values).reshape(out.shape[1:])
    return out


def assert_near(got: Any, want: Any) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error < 8e-3, error  # NaN is not


def by_function(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given = gqa(device)
    return paged_decode(**given, max_seq_len=BOUND, runtime=runtime), gqa_reference(given)


def by_mla_function(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given = mla(device)
    return mla_decode(**given, max_seq_len=BOUND, softmax_scale=0.05, runtime=runtime), mla_reference(given)


def by_plan(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given = gqa(device)
    out = torch.full_like(given["q"], float("nan"))
    plan = plan_paged_decode(**given, out=out, max_seq_len=BOUND, runtime=runtime)
    plan.run(**given, out=out, workspace=plan.prepare())
    return out, gqa_reference(given)


def by_mla_plan(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given = mla(device)
    out = torch.full((BATCH, HEADS, LATENT), float("nan"), device=given["q"].device, dtype=torch.bfloat16)
    plan = plan_mla_decode(**given, out=out, max_seq_len=BOUND, softmax_scale=0.05, runtime=runtime)
    plan.run(**given, out=out, workspace=plan.prepare())
    return out, mla_reference(given)


def buffer_on(device: Any) -> Any:
    return torch.zeros(64 << 20, dtype=torch.uint8, device=device)


def gqa_arguments(device: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What FlashInfer's batch operators take for ``gqa``, in NHD, and ``gqa`` itself."""
    given = gqa(device)
    arguments = {
        "query": given["q"],
        "kv_cache": (given["k_cache"], given["v_cache"]),
        "workspace_buffer": buffer_on(given["q"].device),
        "block_tables": given["page_table"],
        "seq_lens": given["seq_lens"],
        "max_seq_len": BOUND,
        "bmm1_scale": HEAD_DIM**-0.5,
        "kv_layout": "NHD",
    }
    return arguments, given


def mla_arguments(device: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What FlashInfer's batch operators take for ``mla``, and ``mla`` itself."""
    given = mla(device)
    arguments = {
        "query": given["q"].unsqueeze(1),
        "kv_cache": given["kv_cache"],
        "workspace_buffer": buffer_on(given["q"].device),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": 64,
        "block_tables": given["page_table"],
        "seq_lens": given["seq_lens"],
        "max_seq_len": BOUND,
        "bmm1_scale": 0.05,
    }
    return arguments, given


def by_xqa(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given, out = gqa(device), torch.empty(BATCH, 1, KV_HEADS * GROUP, HEAD_DIM, device=f"cuda:{device}").bfloat16()
    flashinfer.xqa(
        given["q"].unsqueeze(1),
        given["k_cache"],
        given["v_cache"],
        given["page_table"],
        given["seq_lens"],
        out,
        buffer_on(out.device),
        torch.zeros(64, dtype=torch.int32, device=out.device),  # too few: the runtime replaces them
        KV_HEADS,
        PAGE,
    )
    return out.squeeze(1), gqa_reference(given)


def by_xqa_mla(runtime: Runtime, device: int) -> tuple[Any, Any]:
    given, out = mla(device), torch.empty(BATCH, 1, HEADS, LATENT, device=f"cuda:{device}").bfloat16()
    flashinfer.xqa_mla(
        given["q"].unsqueeze(1),
        given["kv_cache"],
        given["kv_cache"],
        given["page_table"],
        given["seq_lens"],
        out,
        buffer_on(out.device),
        torch.zeros(2 << 20, dtype=torch.int32, device=out.device),
        PAGE,
        q_scale=0.05,
    )
    return out.squeeze(1), mla_reference(given)


def by_xqa_batch(runtime: Runtime, device: int) -> tuple[Any, Any]:
    arguments, given = gqa_arguments(device)
    return flashinfer.xqa_batch_decode_with_kv_cache(**arguments), gqa_reference(given)


def by_trtllm_batch(runtime: Runtime, device: int) -> tuple[Any, Any]:
    arguments, given = gqa_arguments(device)
    return flashinfer.trtllm_batch_decode_with_kv_cache(**arguments), gqa_reference(given)


def by_xqa_batch_mla(runtime: Runtime, device: int) -> tuple[Any, Any]:
    arguments, given = mla_arguments(device)
    return flashinfer.xqa_batch_decode_with_kv_cache_mla(**arguments).squeeze(1), mla_reference(given)


def by_trtllm_batch_mla(runtime: Runtime, device: int) -> tuple[Any, Any]:
    arguments, given = mla_arguments(device)
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments).squeeze(1), mla_reference(given)


COMPAT = (by_xqa, by_xqa_mla, by_xqa_batch, by_trtllm_batch, by_xqa_batch_mla, by_trtllm_batch_mla)


@pytest.mark.parametrize("stream", ["default", "own"])
@pytest.mark.parametrize(("device", "current"), PAIRS)
@pytest.mark.parametrize("way", [by_function, by_mla_function, by_plan, by_mla_plan, *COMPAT])
def test_it_runs_where_its_tensors_are(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, way: Callable[..., Any], device: int, current: int, stream: str
) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    torch.cuda.set_device(current)
    before = runtime.driver.current_context()
    if stream == "own":
        own = torch.cuda.Stream(device)
        # torch makes a stream's device current with it, so only the stream is set.
        torch._C._cuda_setStream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)
        torch.cuda.set_device(current)
        before = runtime.driver.current_context()
    try:
        got, want = way(runtime, device)
        assert runtime.driver.current_context() == before
        torch.cuda.synchronize(device)
        assert_near(got, want)
    finally:
        default = torch.cuda.default_stream(device)
        torch._C._cuda_setStream(
            stream_id=default.stream_id, device_index=default.device_index, device_type=default.device_type
        )


def test_a_thread_without_a_context_runs_on_the_second_device(runtime: Runtime) -> None:
    given, found = gqa(1), []
    out = torch.empty_like(given["q"])
    torch.cuda.synchronize(1)

    def work() -> None:
        try:
            paged_decode(**given, out=out, stream=0, max_seq_len=BOUND, runtime=runtime)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize(1)
    assert found == []
    assert_near(out, gqa_reference(given))


def test_two_threads_on_two_devices_at_once(runtime: Runtime) -> None:
    failures: list[BaseException] = []

    def work(device: int) -> None:
        try:
            for seed in range(40):
                given = gqa(device, seed)
                out = paged_decode(**given, max_seq_len=BOUND, runtime=runtime)
                torch.cuda.synchronize(device)
                assert_near(out, gqa_reference(given))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_graphs_are_captured_on_the_second_device_beside_eager_runs(runtime: Runtime) -> None:
    given, stream = gqa(1), torch.cuda.Stream(1)
    out = torch.empty_like(given["q"])
    plan = plan_paged_decode(**given, out=out, max_seq_len=BOUND, runtime=runtime)
    workspace = plan.prepare(stream, graphs=2)
    plan.run(**given, out=out, workspace=workspace, stream=stream)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
            plan.run(**given, out=out, workspace=workspace, stream=stream)
        graphs.append(graph)
    for length in (7, BOUND):
        given["seq_lens"].fill_(length)
        want = gqa_reference(given)
        for graph in graphs:
            out.fill_(float("nan"))
            torch.cuda.synchronize(1)
            graph.replay()
            torch.cuda.synchronize(1)
            assert_near(out, want)
        out.fill_(float("nan"))
        torch.cuda.synchronize(1)
        plan.run(**given, out=out, workspace=workspace, stream=stream)
        torch.cuda.synchronize(1)
        assert_near(out, want)
    held = len(workspace.places())
    graphs.clear()
    del graph
    torch.cuda.synchronize(1)
    for _ in range(3):  # what the graphs had is free again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
            plan.run(**given, out=out, workspace=workspace, stream=stream)
        del graph
        torch.cuda.synchronize(1)
    assert len(workspace.places()) == held


def test_mixed_devices_are_refused_and_both_stay_usable(runtime: Runtime) -> None:
    given = gqa(1)
    with pytest.raises(UsageError, match="seq_lens: on device 0, q is on device 1"):
        paged_decode(**{**given, "seq_lens": given["seq_lens"].to("cuda:0")}, max_seq_len=BOUND, runtime=runtime)
    out = torch.empty_like(given["q"])
    plan = plan_paged_decode(**given, out=out, max_seq_len=BOUND, runtime=runtime)
    there = gqa(0)
    with pytest.raises(UsageError, match="q: on device 0, planned for device 1"):
        plan.run(**there, out=torch.empty_like(there["q"]), workspace=plan.prepare())
    driver = runtime.driver
    elsewhere = Workspace.allocate(driver, driver.primary_context(0), plan.workspace_bytes)
    with pytest.raises(UsageError, match="workspace: on device 0, the plan is for tensors on device 1"):
        plan.run(**given, out=out, workspace=elsewhere)
    with pytest.raises(CubinRuntimeError, match=r"device 0.* device 1"):
        plan.run(**given, out=out, workspace=plan.prepare(0), stream=torch.cuda.Stream(0))
    for device in (0, 1):
        got, want = by_function(runtime, device)
        torch.cuda.synchronize(device)
        assert_near(got, want)


def test_flashinfers_operators_refuse_mixed_devices_and_stay_usable(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.compat.flashinfer.arguments.default_runtime", lambda: runtime)
    for arguments, function in (
        (gqa_arguments(1)[0], flashinfer.xqa_batch_decode_with_kv_cache),
        (mla_arguments(1)[0], flashinfer.xqa_batch_decode_with_kv_cache_mla),
    ):
        for name in ("workspace_buffer", "block_tables", "seq_lens"):
            with pytest.raises(UsageError, match=f"{name}: on device 0, (q|query) is on device 1"):
                function(**{**arguments, name: arguments[name].to("cuda:0")})
    for way in COMPAT:
        got, want = way(runtime, 1)
        torch.cuda.synchronize(1)
        assert_near(got, want)


def test_flashinfers_operators_are_captured_on_the_second_device(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.compat.flashinfer.arguments.default_runtime", lambda: runtime)
    stream, graph = torch.cuda.Stream(1), torch.cuda.CUDAGraph()
    arguments, given = gqa_arguments(1)
    out = torch.empty_like(given["q"])
    arguments["out"] = out
    with torch.cuda.device(1), torch.cuda.stream(stream):
        flashinfer.xqa_batch_decode_with_kv_cache(**arguments)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
        flashinfer.xqa_batch_decode_with_kv_cache(**arguments)
    out.fill_(float("nan"))
    torch.cuda.synchronize(1)
    graph.replay()
    torch.cuda.synchronize(1)
    assert_near(out, gqa_reference(given))


def test_a_kernel_is_preloaded_for_the_device_named(runtime_config: Any) -> None:
    made = Runtime(runtime_config)
    made.library.fetch(made.library.pins.get(NATIVE_RELEASE))
    given = gqa(1)
    out = torch.empty_like(given["q"])
    plan = plan_paged_decode(**given, out=out, max_seq_len=BOUND, runtime=made)
    made.preload([selection.kernel for selection in plan.selections], device=1)
    made.freeze()
    plan.run(**given, out=out)
    with pytest.raises(FrozenError, match="not loaded on device 0"):
        paged_decode(**gqa(0), max_seq_len=BOUND, runtime=made)
    torch.cuda.synchronize(1)
    assert_near(out, gqa_reference(given))
    made.modules.close()
