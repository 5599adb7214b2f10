"""Before the first request to a model with MLA: kernels, scratch and fast paths of decodes are there."""

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
# isort: off
from tests.integrations.vllm_mla_steps import MAX_LEN, builder, cache_of, configuration, layer_of  # noqa: E402  (it imports vLLM)
from tests.integrations.vllm_mla_steps import queries, step, use  # noqa: E402

# isort: on
from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.integrations.scratch import Limits  # noqa: E402
from cubin_runtime.integrations.vllm.backend import table_columns  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402

pytestmark = pytest.mark.torch
REQUESTS, STEPS = 12, 2000
TOKENS = 8 * REQUESTS
SCALES = SimpleNamespace(_k_scale_float=0.5, _q_scale_float=2.0)


class Engine:
    """A layer after the engine's start: the model was made, and a dummy step wrote to the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
        scheduler = SimpleNamespace(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS)
        self.config = configuration(scheduler_config=scheduler, **changed)
        backend = use(monkeypatch, self.config)
        self.made, self.builder = layer_of(backend, self.config), builder(backend, self.config)
        self.kv_cache = cache_of(self.config)
        raw = self.kv_cache.view(torch.uint8) if self.made.kv_cache_dtype.startswith("fp8") else self.kv_cache
        measured = raw[:3]  # for which vLLM captures graphs to measure them
        monkeypatch.setattr("vllm._custom_ops.concat_and_cache_mla", lambda *_, **__: None, raising=False)
        for cache in (torch.empty(0), measured, raw):
            self.write(cache)

    def write(self, cache: Any) -> None:
        given = torch.zeros(1, 512), torch.zeros(1, 1, 64), cache, torch.zeros(1)
        self.made.do_kv_cache_update(*given, self.made.kv_cache_dtype, torch.ones(()))

    @property
    def columns(self) -> int:
        """Those of vLLM's page tables, whose rows it rounds up to 128 tokens."""
        block = self.config.cache_config.block_size
        blocks, together = -(-self.config.model_config.max_model_len // block), max(1, 128 // block)
        return -(-blocks // together) * together

    def run(self, q_lens: list[int], kv_lens: list[int], padded: int = 0) -> None:
        tokens = sum(q_lens) + padded * max(q_lens)
        table = torch.zeros(len(q_lens) + padded, self.columns, dtype=torch.int32)
        built = self.builder.build(0, step(q_lens, kv_lens, padded, num_actual_tokens=tokens, block_table_tensor=table))
        self.made.forward_mqa(queries(self.config, tokens), self.kv_cache, built, SCALES)


@pytest.mark.parametrize(
    "changed",
    [
        {"cache_dtype": "fp8", "heads": 128},
        {"kv_lora_rank": 256, "drafts": 7, "heads": 8},
    ],
)
def test_steps_of_mixed_lengths_load_and_allocate_nothing(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    engine, chance, drafts = Engine(monkeypatch, **changed), random.Random(1), changed.get("drafts", 0)
    loads = hopper.stats().loads
    allocations = len(standin.calls("cuMemAlloc"))
    assert loads > 0
    for _ in range(STEPS):
        requests = chance.randrange(1, REQUESTS)
        q_lens = [1 + (drafts and chance.randrange(drafts + 1)) for _ in range(requests)]
        if chance.randrange(2):
            q_lens = [1 + drafts] * requests
        padded = chance.randrange(REQUESTS - requests) if len({*q_lens}) == 1 else 0
        engine.run(q_lens, [chance.randrange(new, MAX_LEN + 1) for new in q_lens], padded)
    assert hopper.stats().loads == loads
    assert len(standin.calls("cuMemAlloc")) == allocations


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        ({"cache_dtype": "fp8", "heads": 128}, TOKENS),
        ({"heads": 16}, TOKENS // 4 + REQUESTS),
        ({"heads": 16, "block_size": 32}, TOKENS // 4 + REQUESTS),
        ({"heads": 16, "drafts": 3}, TOKENS // 4 + REQUESTS),
        ({"cache_dtype": "fp8", "heads": 4, "drafts": 2}, TOKENS // 16 + REQUESTS),
    ],
)
def test_prompts_in_chunks_load_and_allocate_nothing(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], most: int
) -> None:
    engine, chance = Engine(monkeypatch, **changed), random.Random(1)
    before = hopper.stats()
    allocations = len(standin.calls("cuMemAlloc"))
    scratch = engine.made._options.scratch
    assert scratch.of_launch(most, TOKENS, MAX_LEN) is not None
    assert scratch.of_launch(most + 1, TOKENS, MAX_LEN) is None
    one_token_more = [5] * (REQUESTS - 1)  # than chunks of 4
    steps = [[TOKENS], [*one_token_more, TOKENS - sum(one_token_more)]]
    for _ in range(STEPS // 10):
        steps.append([chance.randrange(1, TOKENS // REQUESTS + 1) for _ in range(chance.randrange(REQUESTS))])
        steps[-1].append(chance.randrange(engine.builder._decode_tokens + 1, TOKENS - sum(steps[-1]) + 1))
    for q_lens in steps:
        engine.run(q_lens, [chance.randrange(new, MAX_LEN + 1) for new in q_lens])
    assert (hopper.stats().loads, hopper.stats().fast_paths) == (before.loads, before.fast_paths)
    assert len(standin.calls("cuMemAlloc")) == allocations


@pytest.mark.parametrize("changed", [{"block_size": 16, "max_model_len": 200}, {"max_model_len": 150}])
def test_fast_paths_are_those_of_page_tables_that_vllm_rounds_up(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    engine = Engine(monkeypatch, **changed)
    before = hopper.stats().fast_paths
    for requests in range(1, REQUESTS + 1):
        engine.run([1] * requests, [100] * requests)
    assert 0 < before == hopper.stats().fast_paths


@pytest.mark.parametrize(
    ("keys", "page_size", "ranks", "columns"),
    [(4096, 64, 1, 64), (4096, 64, 4, 16), (4097, 16, 1, 264), (100, 32, 1, 4), (1000, 256, 2, 2), (130, 128, 1, 2)],
)
def test_columns_of_vllms_page_tables(keys: int, page_size: int, ranks: int, columns: int) -> None:
    assert table_columns(keys, page_size, ranks) == columns


def test_fast_paths_wait_for_a_stream_with_shared_scratch(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    larger = torch.zeros(2 * len(engine.kv_cache), *engine.kv_cache.shape[1:], dtype=engine.kv_cache.dtype)
    plans = hopper.stats().plans_made
    with monkeypatch.context() as patched:  # on a stream where graphs are captured
        patched.setattr(hopper.memory, "current_stream", lambda like: 7)
        engine.write(larger)
    assert hopper.stats().plans_made == plans
    engine.write(larger)
    assert hopper.stats().plans_made > plans


def test_layers_without_chunks_leave_the_scratch_of_the_others(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Engine(monkeypatch).made._options.scratch
    scratch.cover([], Limits(REQUESTS, TOKENS, MAX_LEN))
    assert scratch.of_launch(TOKENS // 4 + REQUESTS, TOKENS, MAX_LEN) is not None


def test_no_kernel_is_loaded_later(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, drafts=3)
    hopper.freeze()
    for requests in range(1, REQUESTS + 1):
        for q_len in (1, 4):
            engine.run([q_len] * requests, [MAX_LEN] * requests)
        engine.run([4, *[1] * (requests - 1)], [MAX_LEN] * requests)


def test_one_line_names_the_kernels(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("INFO", "vllm.cubin_runtime"):
        for _ in range(2):
            Engine(monkeypatch, cache_dtype="fp8", heads=8)
    (line,) = {record.getMessage() for record in caplog.records if "run on" in record.getMessage()}
    assert line.startswith("cubin_runtime: decodes of layers of MLA with 512 + 64 columns, 8 heads")
    assert "a cache of float8_e4m3fn run on " in line
    assert "paged_mla_decode_e4m3" in line


def test_scratch_is_the_drivers_own(hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch's allocator gives out while a model is loaded is discarded when the engine sleeps.
    before = len(standin.calls("cuMemAlloc"))
    engine = Engine(monkeypatch)
    assert len(standin.calls("cuMemAlloc")) > before
    scratch = engine.made._options.scratch.of_launch(REQUESTS, TOKENS, MAX_LEN)
    assert scratch.owner.address == scratch.semaphores[0]
