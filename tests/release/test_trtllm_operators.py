"""The operators end to end on a recording driver that poses as SM100 and SM103, with the published kernels."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attention_examples import RELEASE_NAME, build_release
from standin_build import StandIn, build_standin
from trtllm_calls import (
    MadeUpMemory,
    context_arguments,
    decode_arguments,
    launched,
    mla_arguments,
    ragged_arguments,
)

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention import trtllm_gen as operators
from cubin_runtime.attention.backends import BackendError
from cubin_runtime.attention.trtllm_gen.calls import Call
from cubin_runtime.attention.trtllm_gen.plans import AttentionPlan
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import FrozenError, WorkspaceError
from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.trtllm_gen.fill import pack
from cubin_runtime.launch.trtllm_gen.invariance import InvarianceRefused
from cubin_runtime.launch.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.launch.trtllm_gen.tensor_maps import TensorMaps

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]

Operator = tuple[Callable[..., Any], Callable[..., dict[str, Any]]]
OPERATORS: dict[str, Operator] = {
    "decode": (flashinfer.trtllm_batch_decode_with_kv_cache, decode_arguments),
    "mla": (flashinfer.trtllm_batch_decode_with_kv_cache_mla, mla_arguments),
    "context": (flashinfer.trtllm_batch_context_with_kv_cache, context_arguments),
    "ragged": (flashinfer.trtllm_ragged_attention_deepseek, ragged_arguments),
}
FP8 = "float8_e4m3fn"


@pytest.fixture(scope="session")
def own_release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Our kernels for SM100 and SM103, and the pin file that trusts them."""
    return build_release(tmp_path_factory.mktemp("own"), "trtllm_gen_*_sm10?")


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(params=[(10, 0), (10, 3)], ids=["sm100", "sm103"])
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def standin(standin_library: Path, capability: tuple[int, int]) -> Iterator[StandIn]:
    control = StandIn(standin_library)
    control.reset()
    control.pose_as(*capability)
    control.accept_kernels(KERNEL_PARAMS.size)
    yield control
    control.reset()


@pytest.fixture
def memory() -> MadeUpMemory:
    return MadeUpMemory()


@pytest.fixture
def runtime(
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
    own_release: tuple[Path, Path],
    standin: StandIn,
    memory: MadeUpMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runtime]:
    tree, pins = own_release
    # One store for all tests: it keeps the metadata index, which takes longest to make.
    store = tmp_path_factory.getbasetemp() / "operators-store"
    store.mkdir(exist_ok=True)
    config = Config(store=store, sources=(str(wheel), str(tree)), pin_files=(pins,), offline=True)
    made = Runtime(config, driver=Driver(standin.path), release=RELEASE_NAME, memory=memory)
    for kernel in made.own_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr(flashinfer, "default_runtime", lambda: made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "trtllm_gen_.* was built for SM")
        yield made
    made.driver.set_current(None)


class Spy:
    """Keeps the calls and plans that the operators ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[AttentionPlan, Call, tuple[int, int], int]] = []
        original = AttentionPlan.run

        def run(plan: AttentionPlan, call: Call, workspace: tuple[int, int], counters: int, stream: int) -> None:
            self.runs.append((plan, call, workspace, counters))
            original(plan, call, workspace, counters, stream)

        monkeypatch.setattr(AttentionPlan, "run", run)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def main_launch(standin: StandIn) -> dict[str, str]:
    (first, *_) = [call.seen for call in standin.calls("cuLaunchKernelEx")]
    return first


def expected_parameters(runtime: Runtime, spy: Spy) -> bytes:
    """What a fresh plan for exactly the last call's tensors fills in; descriptors as the stand-in encodes them."""
    plan, call, workspace, counters = spy.runs[-1]
    fresh = AttentionPlan(runtime, call, 0).planned
    problem = call.problem(plan.device, workspace, counters)
    from cubin_runtime.launch.trtllm_gen.plan import plan_selected

    values = plan_selected(problem, fresh.selection).values
    encoded = {
        name: runtime.descriptors.encode(spec)  # type: ignore[arg-type]
        for name, spec in values.items()
        if name.startswith("tma") and spec is not None
    }
    return pack(values, encoded)


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
    assert seen["block"] == f"{plan.planned.meta.threads},1,1"
    assert int(seen["shared"]) == plan.planned.meta.shared_bytes
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
    assert plan.planned.meta.sha256 in wanted


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
    assert last["symbol"] == "trtllm_gen_lse_from_statistics"
    rows = call.tokens * call.query.shape[1]
    threads = min(1024, 1 << (rows - 1).bit_length())
    assert (last["grid"], last["block"]) == (f"{-(-rows // threads)},1,1", f"{threads},1,1")
    sent = plan.launch_plans()[-1].layout.unpack(launched(last))
    assert sent["lse"] == lse.pointer
    assert sent["rows"] == rows
    main = KERNEL_PARAMS.unpack(launched(main_launch(standin)))
    assert sent["statistics"] == main["ptrSoftmaxStats"] != 0
    assert main["ptrO"] == out.pointer
