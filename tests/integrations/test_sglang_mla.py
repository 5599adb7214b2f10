"""SGLang's MLA backend on our operators: its real base class, pools, layers and batches on a recording driver.

Skipped where SGLang's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.sglang_steps import NAME, batch, branching, server_flags  # noqa: E402  (first: it imports SGLang)
from tests.integrations.sglang_mla_steps import BF16, FP8, HEADS, LATENT, MAX_LEN, PAGE, backend, forward, layer_of  # noqa: E402
from tests.integrations.sglang_mla_steps import pool_of, prompt_layer, runner  # noqa: E402

# isort: on
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import (  # noqa: E402
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.sglang.versions import forward_method  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, launches, mla_launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
LOG2_E = math.log2(math.e)


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang's server sets from its arguments."""
    return server_flags(monkeypatch)


def with_drafts(flags: SimpleNamespace, tokens: int, topk: int = 1) -> None:
    flags.speculative_algorithm = "EAGLE"
    flags.speculative_num_draft_tokens, flags.speculative_eagle_topk = tokens, topk


def last(standin: StandIn) -> dict[str, Any]:
    return mla_launches(standin)[-1]


def test_decodes(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1, 2], [40, 130])
    made.init_forward_metadata(step)
    out = forward(made, step)
    sent = last(standin)
    assert (out.shape, out.dtype, sent["out"]) == ((2, HEADS * LATENT), BF16, out.data_ptr())
    assert (sent["batch"], sent["q_len"], sent["heads"], sent["max_seq_len"]) == (2, 1, HEADS, MAX_LEN)
    assert integers(sent["seq_lens"], 2) == [40, 130]
    assert integers(sent["page_table"], 4) == [7, 6, 5, 4]
    assert sent["softmax_scale_log2"] == pytest.approx(192**-0.5 * LOG2_E)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_new_rows_are_written_to_their_slots(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False, attn_dcp_size=1))
    pool = pool_of(dtype)
    made, step = backend(token_to_kv_pool=pool), batch(ForwardMode.DECODE, [1, 2], [40, 130])
    made.init_forward_metadata(step)
    forward(made, step, save=True)
    rows = pool.get_key_buffer(1).float()
    assert rows[step.out_cache_loc].min() == 1
    assert rows.count_nonzero() == 2 * (LATENT + 64)


def test_draft_tokens_are_verified_as_several_tokens_of_a_request(standin: StandIn, flags: SimpleNamespace) -> None:
    with_drafts(flags, 4)
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [1, 2], [40, 130], [4, 4])
    made.init_forward_metadata(step)
    out = forward(made, step)
    sent = last(standin)
    assert (sent["batch"], sent["q_len"], sent["tokens"], out.shape[0]) == (2, 4, 8, 8)
    assert (integers(sent["seq_lens"], 2), sent["mask"], sent["q_cu_seq_lens"]) == ([44, 134], 0, 0)


def test_ngrams_are_verified_as_the_branches_that_they_are(standin: StandIn, flags: SimpleNamespace) -> None:
    with_drafts(flags, 4)
    flags.speculative_algorithm = "NGRAM"
    made, step = backend(), batch(ForwardMode.TARGET_VERIFY, [1, 2], [40, 130], [4, 4])
    bits = branching(step, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    made.init_forward_metadata(step)
    forward(made, step)
    sent = last(standin)
    assert (sent["q_len"], integers(sent["seq_lens"], 2), integers(sent["mask"], 8)) == (4, [44, 134], bits)


@pytest.mark.parametrize("drafts", [0, 4])
def test_a_captured_step_reads_tables_that_stay_where_they_are(
    standin: StandIn, flags: SimpleNamespace, drafts: int
) -> None:
    if drafts:
        with_drafts(flags, drafts)
    mode, new = (ForwardMode.TARGET_VERIFY, [drafts] * 3) if drafts else (ForwardMode.DECODE, None)
    made, step = backend(), batch(mode, [0, 0, 0], [1, 1, 1], new)
    made.init_cuda_graph_state(4, 16)
    made.init_forward_metadata_out_graph(step, in_capture=True)
    made.init_forward_metadata_in_graph(step)
    forward(made, step)
    sent = last(standin)
    step.req_pool_indices.copy_(torch.tensor([2, 1, 0]))
    step.seq_lens.copy_(torch.tensor([40, 128, 1]))
    made.init_forward_metadata_out_graph(step)
    made.init_forward_metadata_in_graph(step)
    assert integers(sent["seq_lens"], 3) == [40 + drafts, 128 + drafts, 1 + drafts]
    assert integers(sent["page_table"], 2) == [11, 10]
    assert sent["max_seq_len"] >= MAX_LEN


@pytest.mark.parametrize("merged", [False, True])
def test_new_tokens_of_prompts_run_on_projected_keys(standin: StandIn, merged: bool) -> None:
    made, step = backend(), batch(ForwardMode.EXTEND, [1, 2], [20, 50], [20, 7])
    step.attn_attend_prefix_cache, step.mha_return_lse = False, merged
    made.init_forward_metadata(step)
    layer = prompt_layer()
    q, k, v = (torch.zeros(27, HEADS * size, dtype=BF16) for size in (192, 192, 128))
    result = made.forward(q, k.view(27, HEADS, 192), v.view(27, HEADS, 128), layer, step, save_kv_cache=False)
    name, sent = launches(standin)[-1]
    assert (name, sent["batch"], sent["q_len"], sent["tokens"]) == ("context", 2, 20, 27)
    assert integers(sent["q_cu_seq_lens"], 3) == integers(sent["kv_cu_seq_lens"], 3) == [0, 20, 27]
    out = result[0] if merged else result
    assert out.data_ptr() == sent["out"]
    assert (sent["lse"] != 0) == merged
    if merged:
        assert (result[0].shape, result[1].shape) == ((27, HEADS, 128), (27, HEADS))


def test_a_chunk_of_what_was_cached_is_seen_by_all_new_tokens(standin: StandIn) -> None:
    made, step = backend(), batch(ForwardMode.EXTEND, [1, 2], [60, 50], [20, 7])
    step.attn_attend_prefix_cache, step.mha_return_lse, step.prefix_chunk_idx = True, True, 1
    sums = [torch.zeros(3, dtype=torch.int32), torch.tensor([0, 40, 83], dtype=torch.int32)]
    step.prefix_chunk_cu_seq_lens = sums
    made.init_forward_metadata(step)
    q, k, v = (torch.zeros(rows, HEADS, size, dtype=BF16) for rows, size in ((27, 192), (83, 192), (83, 128)))
    out, lse = made.forward(q.view(27, -1), k, v, prompt_layer(), step, save_kv_cache=False)
    _, sent = launches(standin)[-1]
    assert (integers(sent["q_cu_seq_lens"], 3), sent["kv_cu_seq_lens"]) == ([0, 20, 27], sums[1].data_ptr())
    assert (out.shape, lse.shape, lse.dtype) == ((27, HEADS, 128), (27, HEADS), torch.float32)


def test_how_layers_run_a_step() -> None:
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert forward_method(None, SimpleNamespace(forward_mode=mode)).name == "MHA_CHUNKED_KV"
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE):
        assert forward_method(None, SimpleNamespace(forward_mode=mode)).name == "MLA"
    backend()
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    assert AttentionBackendRegistry.get_handler(NAME) is forward_method


@pytest.mark.parametrize(("lens", "is_replayed"), [([0, 0], True), (None, True), ([0, 64], False)])
def test_prompts_behind_cached_keys_run_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, lens: list[int] | None, is_replayed: bool
) -> None:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    name = "can_replay_locally" if hasattr(PrefillCudaGraphRunner, "can_replay_locally") else "can_run_graph"
    monkeypatch.setattr(PrefillCudaGraphRunner, name, lambda *_, **__: True)
    made = backend()
    backend()
    steps = [] if name == "can_replay_locally" else [SimpleNamespace(extend_prefix_lens_cpu=lens)]
    named = {} if steps else {"prefix_lens": lens}
    others = SimpleNamespace()
    for attn_backend, expected in (
        (made, is_replayed),
        (SimpleNamespace(prefill_backend=made), is_replayed),
        (others, True),
    ):
        graphs = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=attn_backend))
        assert getattr(PrefillCudaGraphRunner, name)(graphs, *steps, **named) is expected


def test_the_engine_finds_its_pools_by_the_backend_of_a_step() -> None:
    made = runner()
    with forward_context(ForwardContext(attn_backend=ATTENTION_BACKENDS[NAME](made))):
        assert get_token_to_kv_pool() is made.token_to_kv_pool
        assert get_req_to_token_pool() is made.req_to_token_pool


def test_prefixes_in_chunks_are_not_turned_off_for_our_name() -> None:
    from sglang.srt.server_args import CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS

    assert CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1


def test_prompts_in_the_latent_space_are_refused() -> None:
    made, step = backend(), batch(ForwardMode.EXTEND, [1], [20], [20])
    made.init_forward_metadata(step)
    with pytest.raises(UsageError, match="prompts in the latent space"):
        forward(made, step)


class Subclass(type(pool_of())):  # type: ignore[misc]
    """Another pool, whose rows may be others."""


def other_pool() -> Any:
    pool = pool_of()
    pool.__class__ = Subclass
    return pool


def scaled_layer() -> Any:
    layer = layer_of()
    layer.k_scale_float = 0.5
    return layer


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"page_size": 32}, "page_size=32"),
        ({"dtype": torch.float16}, "dtype: torch.float16"),
        ({"token_to_kv_pool": SimpleNamespace()}, "token_to_kv_pool: a SimpleNamespace of None"),
        ({"token_to_kv_pool": pool_of(torch.float16)}, "a MLATokenToKVPool of torch.float16"),
        ({"token_to_kv_pool": other_pool()}, "token_to_kv_pool: a Subclass"),
        ({"server_args": SimpleNamespace(enable_hierarchical_cache=True)}, "enable_hierarchical_cache"),
        ({"server_args": SimpleNamespace(disaggregation_mode="decode")}, "disaggregation_mode"),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "dcp_size=2"),
        ({"server_args": SimpleNamespace(enable_prefill_cp=True)}, "enable_prefill_cp"),
        ({"model": torch.nn.ModuleList([layer_of(num_heads=130)])}, "130 heads"),
        ({"model": torch.nn.ModuleList([layer_of(128)])}, "kv_lora_rank=128"),
        ({"model": torch.nn.ModuleList([layer_of(logit_cap=30.0)])}, "logit_cap"),
        ({"model": torch.nn.ModuleList([scaled_layer()])}, "k_scale=0.5"),
    ],
)
def test_runners_that_are_refused_at_start(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        backend(**changed)


@pytest.mark.parametrize(("tokens", "topk"), [(17, 1), (4, 2)])
def test_drafts_that_are_refused_at_start(flags: SimpleNamespace, tokens: int, topk: int) -> None:
    with_drafts(flags, tokens, topk)
    with pytest.raises(UsageError, match=f"speculative_num_draft_tokens={tokens}, speculative_eagle_topk={topk}"):
        backend()


def test_deterministic_inference(standin: StandIn, flags: SimpleNamespace) -> None:
    flags.enable_deterministic_inference = True
    with pytest.raises(UsageError, match="enable_deterministic_inference"):
        backend()
    server = SimpleNamespace(attention_backend=NAME, prefill_attention_backend="triton")
    made, step = backend(server_args=server), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    forward(made, step)
    assert last(standin)["splits"] > 0


@pytest.mark.parametrize("rope", [64, 32])
def test_the_smaller_latent(standin: StandIn, rope: int) -> None:
    layer = layer_of(256, rope, num_heads=32)
    model = torch.nn.ModuleList([layer, prompt_layer(head_dim=128, num_heads=32, num_kv_heads=32)])
    made = backend(token_to_kv_pool=pool_of(latent=256, rope=rope), model=model)
    step = batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    assert forward(made, step, layer).shape == (1, 32 * 256)
    assert (last(standin)["heads"], 1 << last(standin)["page_size_log2"]) == (32, PAGE)
