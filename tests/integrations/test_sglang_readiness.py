"""Before SGLang's first request: kernels and scratch are there, and steps of any lengths add nothing."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations import sglang_steps as plain  # noqa: E402  (first: it imports SGLang)
from tests.integrations import sglang_mla_steps as mla  # noqa: E402

# isort: on
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402

pytestmark = pytest.mark.torch
STEPS, FIRST = 2000, 60
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's server sets from its arguments."""
    return plain.server_flags(monkeypatch)


class Plain:
    """A model without MLA."""

    requests, most, stream = 3, plain.MAX_LEN, None

    def __init__(self) -> None:
        server = SimpleNamespace(chunked_prefill_size=64)
        model = torch.nn.ModuleList([plain.layer_of()])
        self.made = plain.backend(model=model, server_args=server, forward_stream=self.stream)

    def forward(self, step: Any) -> None:
        plain.forward(self.made, step)


class Latent:
    """A model with MLA; prompts run on projected keys, once for the new tokens and once for a cached chunk."""

    requests, most, stream = mla.REQUESTS, mla.MAX_LEN, None

    def __init__(self) -> None:
        self.made, self.layer = mla.backend(forward_stream=self.stream), mla.prompt_layer()

    def forward(self, step: Any) -> None:
        if not step.forward_mode.is_extend_without_speculative():
            mla.forward(self.made, step)
            return
        tokens, cached = sum(step.extend_seq_lens_cpu), int(step.seq_lens.sum()) - sum(step.extend_seq_lens_cpu)
        step.attn_attend_prefix_cache, step.mha_return_lse = False, cached > 0
        self.run_prompts(step, tokens, tokens)
        if cached:
            lengths = step.seq_lens - step.extend_seq_lens
            sums = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
            step.attn_attend_prefix_cache, step.prefix_chunk_idx, step.prefix_chunk_cu_seq_lens = True, 0, [sums]
            self.run_prompts(step, tokens, cached)

    def run_prompts(self, step: Any, tokens: int, keys: int) -> None:
        q, k, v = (torch.zeros(n, mla.HEADS, size, dtype=BF16) for n, size in ((tokens, 192), (keys, 192), (keys, 128)))
        self.made.forward(q.view(tokens, -1), k, v, self.layer, step, save_kv_cache=False)


def step_of(engine: Any, chance: random.Random, drafts: int) -> Any:
    """A step of decodes, of draft tokens to verify, or of prompts, with mixed lengths."""
    requests = [chance.randrange(engine.requests) for _ in range(chance.randrange(1, engine.requests + 1))]
    if chance.randrange(3) == 0:
        new = [chance.randrange(1, 11) for _ in requests]
        lengths = [chance.randrange(tokens, engine.most - drafts) for tokens in new]
        return plain.batch(ForwardMode.EXTEND, requests, lengths, new)
    lengths = [chance.randrange(1, engine.most - drafts) for _ in requests]
    if drafts:
        return plain.batch(ForwardMode.TARGET_VERIFY, requests, lengths, [drafts] * len(requests))
    return plain.batch(ForwardMode.DECODE, requests, lengths)


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("model", [Plain, Latent])
def test_after_the_first_steps_nothing_is_loaded_or_allocated(
    hopper: Runtime, standin: StandIn, flags: SimpleNamespace, model: Any, drafts: int
) -> None:
    if drafts:
        flags.speculative_algorithm = "EAGLE"
        flags.speculative_num_draft_tokens, flags.speculative_eagle_topk = drafts, 1
    engine, chance = model(), random.Random(1)
    loads = hopper.stats().loads
    assert loads > 0
    counts: list[tuple[int, int]] = []
    for number in range(FIRST + STEPS):
        if number == FIRST:
            counts.append(len(standin.calls("cuMemAlloc")))
        step = step_of(engine, chance, drafts)
        engine.made.init_forward_metadata(step)
        engine.forward(step)
    counts.append(len(standin.calls("cuMemAlloc")))
    assert hopper.stats().loads == loads
    assert counts[0] == counts[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_draft_tokens_find_kernels_scratch_and_fast_paths(
    hopper: Runtime, standin: StandIn, flags: SimpleNamespace, deterministic: bool
) -> None:
    flags.speculative_algorithm, flags.enable_deterministic_inference = "EAGLE", deterministic
    flags.speculative_num_draft_tokens, flags.speculative_eagle_topk = 4, 1
    engine, before = Plain(), hopper.stats()
    allocations = len(standin.calls("cuMemAlloc"))
    for requests in (1, 2, 3, 2):
        step = plain.batch(ForwardMode.TARGET_VERIFY, [*range(requests)], [100] * requests, [4] * requests)
        engine.made.init_forward_metadata(step)
        engine.forward(step)
    after = hopper.stats()
    assert (after.loads, after.fast_paths) == (before.loads, before.fast_paths)
    assert len(standin.calls("cuMemAlloc")) == allocations


@pytest.mark.parametrize("model", [Plain, Latent])
def test_one_line_names_the_kernels_of_each_kind_of_layer(
    hopper: Runtime, caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    with caplog.at_level("INFO", "cubin_runtime.integrations.sglang"):
        model()
        model()
    lines = [record.getMessage() for record in caplog.records if "run on" in record.getMessage()]
    assert len(lines) == len({*lines}) == (2 if model is Latent else 1)
    assert any(("decode_e4m3" not in line) and "decode" in line for line in lines)


@pytest.mark.parametrize("model", [Plain, Latent])
def test_the_stream_of_steps_has_scratch_and_a_captured_one_has_its_own(
    hopper: Runtime, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    stream = hopper.driver.create_stream()
    monkeypatch.setattr(model, "stream", SimpleNamespace(cuda_stream=stream))
    scratch = model().made._scratch
    first = scratch.of_launch(1, 1, 1)
    for current, found in ((stream, True), (stream + 1, False)):
        monkeypatch.setattr(hopper.memory, "current_stream", lambda like, current=current: current)
        assert (scratch.of_launch(1, 1, 1) is not None) == found
        assert scratch.of_launch(1, 1, 1) is not first
