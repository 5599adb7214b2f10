"""The operators with the published cubins: what is planned for is there, passes the gate, and is what is launched."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer
from cubin_runtime.kernels.trtllm_gen.params import KERNEL_PARAMS
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import RELEASE_NAME, build_release
from tests.attention.trtllm_calls import MadeUpMemory, launched
from tests.attention.trtllm_operators import OPERATORS, Spy, expected_parameters, main_launch, reduced_mla

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def native_release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Our kernels for SM100 and SM103, and the pin file that trusts them."""
    return build_release(tmp_path_factory.mktemp("own"), "trtllm_gen_*_sm10?")


@pytest.fixture(params=[(10, 0), (10, 3)], ids=["sm100", "sm103"])
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def standin(cubin_standin_library: Path, capability: tuple[int, int]) -> Iterator[StandIn]:
    control = StandIn(cubin_standin_library)
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
    native_release: tuple[Path, Path],
    standin: StandIn,
    memory: MadeUpMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Runtime]:
    tree, pins = native_release
    # One store for all tests: it keeps the metadata index, which takes longest to make.
    store = tmp_path_factory.getbasetemp() / "operators-store"
    store.mkdir(exist_ok=True)
    config = Config(store=store, sources=(str(wheel), str(tree)), pin_files=(pins,), offline=True)
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME, memory=memory)
    for kernel in made.native_release().kernels:
        standin.add_kernel(kernel.symbol, (kernel.struct_bytes,), kernel.threads)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "trtllm_gen_.* was built for SM")
        made.driver.set_current(made.driver.primary_context(0))
        yield made
    made.driver.set_current(None)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_launch_is_what_the_planner_says(
    runtime: Runtime, standin: StandIn, memory: MadeUpMemory, spy: Spy, name: str
) -> None:
    operator, arguments = OPERATORS[name]
    operator(**arguments(memory))
    seen = main_launch(standin)
    assert seen["symbol"] == spy.runs[0][0].kernel
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


def test_built_kernels_follow_a_published_one(runtime: Runtime, standin: StandIn, memory: MadeUpMemory) -> None:
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**reduced_mla(memory, return_lse=True))
    _, *followers = [call.seen["symbol"] for call in standin.calls("cuLaunchKernelEx")]
    assert followers == ["trtllm_gen_kv_reduction_bf16_to_bf16", "trtllm_gen_lse_from_statistics"]
