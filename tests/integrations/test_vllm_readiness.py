"""Before vLLM's first request: kernels, scratch and fast paths are there, and steps of any lengths add nothing."""

from __future__ import annotations

import importlib.util
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
from torch.overrides import TorchFunctionMode  # noqa: E402

# isort: off
from tests.integrations.vllm_steps import BACKEND, BF16, BLOCK, DIM, HEADS, KV_HEADS, MAX_LEN  # noqa: E402
from tests.integrations.vllm_steps import ParallelConfig, builder, cache, layer, speculative, step  # noqa: E402

# isort: on
from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402

pytestmark = pytest.mark.torch
REQUESTS, TOKENS, STEPS = 24, 96, 2000


@pytest.fixture(params=[MAX_LEN // 2, MAX_LEN], ids=["two bounds of prompts", "one"])
def ready(hopper: Runtime, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setattr("cubin_runtime.integrations.scratch._SHORTER_BOUNDS", (request.param,))
    return start(monkeypatch)


def measured(monkeypatch: pytest.MonkeyPatch, drafts: int | None = None) -> Any:
    """A layer while the engine measures its memory, running the model without metadata and without a cache."""
    configure(monkeypatch, REQUESTS, TOKENS, MAX_LEN, drafts)
    made = layer(BACKEND)
    run_dummy(made, torch.empty(0, dtype=BF16))
    return made


def configure(
    monkeypatch: pytest.MonkeyPatch, requests: int, tokens: int, keys: int, drafts: int | None = None
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=keys),
        cache_config=SimpleNamespace(block_size=BLOCK),
        speculative_config=speculative(drafts),
        parallel_config=ParallelConfig(),
    )
    where = "cubin_runtime.integrations.vllm.backend.get_current_vllm_config_or_none"
    monkeypatch.setattr(where, lambda: config)


def run_dummy(made: Any, kv_cache: Any) -> None:
    out = torch.ones(TOKENS, HEADS, DIM, dtype=BF16)
    assert made.forward(None, queries(TOKENS), None, None, kv_cache, None, out).count_nonzero() == 0


def start(monkeypatch: pytest.MonkeyPatch, drafts: int | None = None) -> Any:
    """A layer after the engine's start: it measured its memory, made its cache, and ran its sampler once."""
    made = measured(monkeypatch, drafts)
    run_dummy(made, cache())
    return made


def queries(tokens: int) -> Any:
    """Queries as a model has them: a part of the rows that its projection wrote, keys and values behind them."""
    return torch.zeros(tokens, (HEADS + 2 * KV_HEADS) * DIM, dtype=BF16)[:, : HEADS * DIM].view(tokens, HEADS, DIM)


def mixed_step(chance: random.Random) -> Any:
    """Decodes, prompts or both, of mixed lengths within the limits."""
    decodes = chance.randrange(REQUESTS)
    prompts = [chance.randrange(2, 20) for _ in range(chance.randrange(4))]
    q_lens = [1] * decodes + prompts
    while sum(q_lens) > TOKENS or len(q_lens) > REQUESTS or not q_lens:
        q_lens = q_lens[1:] or [1]
    return step(q_lens, [chance.randrange(new, MAX_LEN + 1) for new in q_lens])


def run(made: Any, metadata: Any, kv_cache: Any, drafts: int | None = None) -> None:
    query = queries(metadata.num_actual_tokens)
    built = builder(BACKEND, drafts=drafts).build(0, metadata)
    made.forward(None, query, None, None, kv_cache, built, torch.empty_like(query))


def test_steps_of_mixed_lengths_load_and_allocate_nothing(ready: Any, hopper: Runtime, standin: StandIn) -> None:
    chance, kv_cache = random.Random(1), cache()
    before = hopper.stats()
    allocations = len(standin.calls("cuMemAlloc"))
    for _ in range(STEPS):
        run(ready, mixed_step(chance), kv_cache)
    assert (hopper.stats().loads, hopper.stats().fast_paths) == (before.loads, before.fast_paths)
    assert len(standin.calls("cuMemAlloc")) == allocations


def test_a_first_step_with_metadata_writes_fast_paths_too(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    made, chance, kv_cache = measured(monkeypatch), random.Random(1), cache()
    with monkeypatch.context() as patched:  # on a stream where graphs are captured
        patched.setattr(hopper.memory, "current_stream", lambda like: 7)
        run(made, step([1, 1, 1], [4, 5, 6]), kv_cache)
    assert hopper.stats().plans_made == 1, "that of the step alone"
    run(made, step([1, 1, 1], [4, 5, 6]), kv_cache)
    before = hopper.stats().fast_paths
    for _ in range(STEPS // 4):
        run(made, mixed_step(chance), kv_cache)
    assert 0 < before == hopper.stats().fast_paths


def test_fast_paths_are_those_of_page_tables_that_vllm_rounds_up(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = MAX_LEN - 2 * BLOCK
    monkeypatch.setattr("tests.integrations.vllm_steps.MAX_LEN", keys)
    configure(monkeypatch, REQUESTS, TOKENS, keys)
    made, kv_cache = layer(BACKEND), cache()
    for memory in (torch.empty(0, dtype=BF16), kv_cache):
        run_dummy(made, memory)
    before = hopper.stats().fast_paths
    for requests in range(1, REQUESTS + 1):
        table = torch.zeros(requests, MAX_LEN // BLOCK, dtype=torch.int32)
        run(made, step([1] * requests, [50] * requests, block_table_tensor=table), kv_cache)
    assert 0 < before == hopper.stats().fast_paths


def test_an_engine_on_another_stream_shares_scratch_among_its_layers_too(
    ready: Any, hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper.memory, "current_stream", lambda like: 7)
    second = start(monkeypatch)
    before, allocations = hopper.stats().fast_paths, len(standin.calls("cuMemAlloc"))
    chance, kv_cache = random.Random(1), cache()
    for _ in range(STEPS // 4):
        run(second, mixed_step(chance), kv_cache)
    assert (hopper.stats().fast_paths, len(standin.calls("cuMemAlloc"))) == (before, allocations)


def test_steps_on_a_stream_without_shared_scratch_ask_for_nothing(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kv_cache = measured(monkeypatch), cache()
    monkeypatch.setattr(hopper.memory, "current_stream", lambda like: 7)
    monkeypatch.setattr("cubin_runtime.integrations.vllm.backend.warm_up", lambda *_: pytest.fail("asked"))
    for _ in range(2):
        run(made, step([1, 1, 1], [4, 5, 6]), kv_cache)


def test_steps_with_drafts_load_and_allocate_nothing(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chance, kv_cache = start(monkeypatch, drafts=3), random.Random(2), cache()
    loads = hopper.stats().loads
    allocations = len(standin.calls("cuMemAlloc"))
    for number in range(STEPS // 4):
        requests = chance.randrange(1, REQUESTS + 1)
        q_lens = [4] * requests if number % 2 else [chance.randrange(1, 5) for _ in range(requests)]
        run(made, step(q_lens, [chance.randrange(new, MAX_LEN + 1) for new in q_lens]), kv_cache, drafts=3)
    assert hopper.stats().loads == loads
    assert len(standin.calls("cuMemAlloc")) == allocations


def test_a_kernel_that_is_not_loaded_is_none_of_those_that_steps_use(ready: Any, hopper: Runtime) -> None:
    hopper.freeze()
    for requests in range(1, REQUESTS + 1):
        run(ready, step([1] * requests, [MAX_LEN] * requests), cache())
    run(ready, step([TOKENS], [TOKENS]), cache())


def test_scratch_is_there_when_vllm_measures_its_memory_and_so_leaves_fewer_blocks(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hopper.driver.memory_info()[0]
    made = measured(monkeypatch)
    assert hopper.driver.memory_info()[0] < before
    allocations = len(standin.calls("cuMemAlloc"))
    run_dummy(made, cache())
    assert len(standin.calls("cuMemAlloc")) == allocations


class Allocations(TorchFunctionMode):
    """The bytes of tensors that are made like others."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "new_empty":
            self.sizes.append(made.nbytes)
        return made


@pytest.mark.parametrize(("keys", "copied"), [(8192, 5), (1 << 18, 2), (1 << 20, 0)])
def test_a_copy_of_an_e4m3_cache_is_taken_and_returned_while_vllm_measures_its_memory(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, keys: int, copied: int
) -> None:
    tokens = 2048
    configure(monkeypatch, 5, tokens, keys)
    made = layer(BACKEND, kv_cache_dtype="fp8")
    scales = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    for _ in range(2):  # every layer, as vLLM looks at its peak
        with Allocations() as allocations:
            arguments = (queries(tokens), None, None, torch.empty(0, dtype=torch.uint8), None)
            made.forward(scales, *arguments, torch.zeros(tokens, HEADS, DIM, dtype=BF16))
        assert allocations.sizes[-1] == copied * 2 * keys * KV_HEADS * DIM * BF16.itemsize


def test_launches_share_one_scratch(ready: Any, standin: StandIn) -> None:
    for requests in (3, 7):
        run(ready, step([1] * requests, [MAX_LEN] * requests), cache())
    scratch = ready._options.scratch
    assert scratch.of_launch(REQUESTS, TOKENS, MAX_LEN) is scratch.of_launch(1, 1, 1)
    assert scratch.of_launch(REQUESTS + 1, TOKENS, MAX_LEN) is None
    assert scratch.of_launch(REQUESTS, TOKENS + 1, MAX_LEN) is None
    assert scratch.of_launch(REQUESTS, TOKENS, MAX_LEN + 1) is None


def test_a_launch_that_was_not_foreseen_has_scratch_of_its_own(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubin_runtime.integrations.readiness._counts", lambda most: [1])
    made, before = start(monkeypatch), len(standin.calls("cuLaunchKernelEx"))
    run(made, step([1] * REQUESTS, [MAX_LEN] * REQUESTS), cache())
    assert len(standin.calls("cuLaunchKernelEx")) == before + 1


def test_another_stream_has_scratch_of_its_own(ready: Any, hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.memory, "current_stream", lambda like: 7)
    assert ready._options.scratch.of_launch(1, 1, 1) is None


def test_one_line_names_the_kernels_of_each_kind_of_layer(
    ready: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = torch.zeros(TOKENS, HEADS, DIM, dtype=BF16)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", "vllm.cubin_runtime"):
        for window in (16, 16, None):
            made = layer(BACKEND, sliding_window=window)
            made.forward(None, query, None, None, torch.empty(0), None, torch.empty_like(query))
    (line,) = {record.getMessage() for record in caplog.records if "run on" in record.getMessage()}
    assert line.startswith("cubin_runtime: layers of head_dim 128, 8 heads on 2, window 16 run on ")
    assert "paged_decode" in line
    assert "context_attention" in line
