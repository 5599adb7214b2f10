"""A pytest plugin for vLLM's tests of attention backends: they test ours, and every outcome is written down.

- Every list of backends has ours alone: that for a decoder's keys and values, dense MLA, sparse MLA.
- The fixtures are those that the tests ask for, but processes stay initialised between tests.
- Tests of vLLM's own functions, which run no backend of a list, are left out.

Outcomes: ``passed``; ``refused``: by our backend, with the reason; ``failed``; ``skipped``: by the test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recording import Recording

from cubin_runtime.errors import UsageError

RECORDING = Recording("VLLM_TESTS")
MEMORY = 0.85  # of the device's that tensors of all processes may take
KEPT_BYTES = 2 << 30
FUNCTIONS = (
    *("test_causal_backend_correctness", "test_sliding_window_backend_correctness"),
    *("test_sliding_window_encoder_backend_correctness", "test_non_causal_backend_correctness"),
    *("test_backend_correctness", "test_sparse_backend_decode_correctness"),
)


class Ours:
    """A member of a list of backends: what the tests ask of vLLM's enumeration."""

    name = "CUBIN_RUNTIME"

    def __init__(self, get_class: Callable[[], Any]) -> None:
        self.get_class = get_class

    def __repr__(self) -> str:
        return self.name


def pytest_configure() -> None:
    """Share the device's memory."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(MEMORY / RECORDING.settings.get("jobs", 1))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Replace the backends that a test is parametrised with, before pytest reads them."""
    from cubin_runtime.integrations.vllm.sparse_mla_backend import CubinRuntimeSparseMlaBackend

    marks = metafunc.definition.own_markers
    for place, mark in enumerate(marks):
        if mark.name == "parametrize" and mark.args[0] == "backend_cls":
            ours = pytest.mark.parametrize("backend_cls", [CubinRuntimeSparseMlaBackend], ids=[Ours.name])
            marks[place] = ours.mark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put our backends in, and keep this process's share of the sample."""
    for module in {item.module for item in items}:  # type: ignore[attr-defined]
        if hasattr(module, "SPEC_DECODE_BACKENDS"):
            use_ours_in_dense_mla(module)
        elif hasattr(module, "NON_CAUSAL_BACKENDS_TO_TEST"):
            use_ours_in_decoders(module)
    ours = [item for item in items if item.nodeid.split("::")[1].split("[")[0] in FUNCTIONS]
    items[:] = RECORDING.share_of(ours)


def use_ours_in_decoders(module: Any) -> None:
    """``module`` tests our backend of keys and values in place of each list."""
    from cubin_runtime.integrations.vllm.backend import CubinRuntimeBackend

    ours, check = Ours(lambda: CubinRuntimeBackend), module._test_backend_correctness

    def check_ours(spec: Any, model: str, _: Any, *args: Any, **kwargs: Any) -> None:
        check(spec, model, [ours], *args, **kwargs)

    module._test_backend_correctness = check_ours


def use_ours_in_dense_mla(module: Any) -> None:
    """``module`` tests our backend of dense MLA, with pages of its size."""
    from cubin_runtime.integrations.vllm.mla_backend import CubinRuntimeMlaBackend

    ours = Ours(lambda: CubinRuntimeMlaBackend)
    module.BACKENDS_TO_TEST = module.SPEC_DECODE_BACKENDS = [ours]
    module.BACKEND_BLOCK_SIZES = {ours: CubinRuntimeMlaBackend.get_supported_kernel_block_sizes()[0]}


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """A configuration without a model, as the current one."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(scope="session")
def dist_init() -> Iterator[None]:
    """One rank; it stays for the process's other tests."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "nccl")
        initialize_model_parallel(1, 1)
        yield


@pytest.fixture
def workspace_init() -> Iterator[None]:
    """vLLM's shared workspace."""
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    init_workspace_manager(torch.device("cuda:0"))
    yield
    reset_workspace_manager()


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over what remains when the time is up."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    return RECORDING.passes_over(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down how a test ended."""
    made: Any = yield
    if call.when != "call" and made.get_result().passed:
        return
    RECORDING.end(item, call, *outcome_of(call.excinfo.value if call.excinfo else None))


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """The outcome of a test that ended with ``error``, and why."""
    if error is None:
        return "passed", ""
    if isinstance(error, pytest.skip.Exception):
        return "skipped", str(error)
    if isinstance(error, (UsageError, NotImplementedError)):
        return "refused", str(error)[:300]
    return "failed", f"{type(error).__name__}: {error}"[:2000]
