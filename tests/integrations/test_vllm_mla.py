"""vLLM's MLA backend on our operator: its real base classes and metadata, and the launches on a recording driver.

Skipped where vLLM's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import BACKEND, REGISTERED  # noqa: E402  (first: it imports vLLM)
from tests.integrations.vllm_mla_steps import BF16, BLOCK, BLOCKS, HEADS, LATENT, MAX_LEN, SCALE  # noqa: E402
from tests.integrations.vllm_mla_steps import builder, configuration, layer_of, reasons, run, step, use  # noqa: E402

# isort: on
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType  # noqa: E402

from cubin_runtime.attention.reference import mla_decode_reference  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.vllm import mla_backend  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, mla_launches  # noqa: E402
from tests.integrations.step_records import array  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
LOG2_E = math.log2(math.e)


def test_one_name_serves_models_with_mla_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration()
    backend = use(monkeypatch, config)
    assert (backend.is_mla(), backend.get_name(), BACKEND.is_mla()) == (True, REGISTERED, False)
    module, name = backend.full_cls_name()
    assert getattr(importlib.import_module(module), name) is backend
    config.model_config.use_mla = False
    assert use(monkeypatch, config) is BACKEND


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"kv_lora_rank": 256},
        {"heads": 128},
        {"heads": 8},
        {"drafts": 7},
        {"heads": 128, "drafts": 15},
    ],
)
def test_what_is_supported(monkeypatch: pytest.MonkeyPatch, cache: str, changed: dict[str, Any]) -> None:
    backend = use(monkeypatch, configuration(**changed))
    head_size = changed.get("kv_lora_rank", LATENT) + 64
    assert reasons(backend, kv_cache_dtype=cache, head_size=head_size, use_batch_invariant=True) == []
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert [size for size in (8, 16, 32, 64, 128) if backend.supports_block_size(size)] == [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("cache", "is_shared", "tokens"),
    [("auto", True, 16), ("bfloat16", True, 16), ("auto", False, 64), ("fp8", True, 64), ("fp8_e4m3", True, 64)],
)
def test_blocks_are_small_where_cached_prompts_share_them(
    monkeypatch: pytest.MonkeyPatch, cache: str, is_shared: bool, tokens: int
) -> None:
    config = configuration(cache_dtype=cache)
    config.cache_config.enable_prefix_caching = is_shared
    backend = use(monkeypatch, config)
    monkeypatch.setattr(mla_backend, "get_current_vllm_config_or_none", lambda: config)
    assert (backend.get_preferred_block_size(16), backend.get_preferred_block_size(128)) == (tokens, 128)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_size": 512},
        {"head_size": 288},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"block_size": 8},
        {"use_mla": False},
        {"has_sink": True},
        {"use_sparse": True},
        {"use_mm_prefix": True},
        {"device_capability": DeviceCapability(10, 0)},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"has_sliding_window": True},
        {"use_non_causal": True},
        {"use_kv_connector": True},
        {"use_pcp": True},
        {"use_adaptive_verification": True},
        {"use_per_head_quant_scales": True},
    ],
)
def test_what_the_engine_refuses_at_start(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    backend = use(monkeypatch, configuration())
    if not changed.keys() <= inspect.signature(backend.validate_configuration).parameters.keys():
        pytest.skip("this vLLM does not ask")
    assert len(reasons(backend, **changed)) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_lora_rank": 128}, "MLA with kv_lora_rank=128, qk_rope_head_dim=64 not supported"),
        ({"qk_rope_head_dim": 0}, "MLA with kv_lora_rank=512, qk_rope_head_dim=0 not supported"),
        ({"heads": 192}, "MLA with 192 heads on a rank not supported"),
        ({"heads": 64, "decode_context_parallel_size": 4}, "MLA with 256 heads on a rank not supported"),
        ({"drafts": 16}, "16 draft tokens not supported"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales not supported"),
        ({"drafts": 2, "enable_dbo": True}, "drafts in micro-batches not supported"),
        ({"decode_context_parallel_size": 2, "enable_dbo": True}, "DCP in micro-batches not supported"),
    ],
)
def test_models_without_kernels_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    config = configuration(**changed)
    backend = use(monkeypatch, config)
    assert reasons(backend) == [reason]
    with pytest.raises(UsageError, match=reason):  # vLLM may have the answer of another configuration
        layer_of(backend, config)


def test_decodes(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    metadata = step([1, 1, 1], [40, 1, 128], block_table_tensor=torch.arange(12, dtype=torch.int32).view(3, 4))
    (out, lse), _, _kept = run(monkeypatch, configuration(), metadata)
    (sent,) = mla_launches(standin)
    assert (out.shape, out.dtype, lse) == ((3, HEADS, LATENT), BF16, None)
    assert (sent["batch"], sent["q_len"], sent["tokens"], sent["heads"]) == (3, 1, 3, HEADS)
    assert integers(sent["seq_lens"], 3) == [40, 1, 128]
    assert (sent["page_table"], sent["out"]) == (metadata.block_table_tensor.data_ptr(), out.data_ptr())
    assert (1 << sent["page_size_log2"], sent["max_seq_len"], sent["q_cu_seq_lens"]) == (BLOCK, MAX_LEN, 0)
    assert sent["softmax_scale_log2"] == pytest.approx(SCALE * LOG2_E)


@pytest.mark.parametrize(("heads", "chunk"), [(128, 1), (16, 4)])
def test_prompts_in_chunks_attend_as_whole_ones_do(monkeypatch: pytest.MonkeyPatch, heads: int, chunk: int) -> None:
    config, q_lens, kv_lens = configuration(heads=heads, kv_lora_rank=256), [1, 1, 5, 23], [40, 200, 130, 87]
    table = torch.randperm(4 * 4).view(4, 4).to(torch.int32) % BLOCKS
    backend = use(monkeypatch, config)
    built = builder(backend, config).build(0, step(q_lens, kv_lens, block_table_tensor=table))
    q, cache = torch.randn(sum(q_lens), heads, 256 + 64).to(BF16), torch.randn(BLOCKS, BLOCK, 256 + 64).to(BF16)
    bounds: list[int] = []

    def attended(lens: Any, pages: Any, sums: Any) -> torch.Tensor:
        out, _ = mla_decode_reference(
            array(q), array(cache), array(pages), array(lens), SCALE, latent=256, q_cu_seq_lens=sums
        )
        return torch.from_numpy(out).to(BF16)

    def decode(_: Any, __: Any, pages: Any, lens: Any, *, out: torch.Tensor, **options: Any) -> None:
        sums = options["q_cu_seq_lens"]
        bounds.append(1 if sums is None else options["max_q_len"])
        out.copy_(attended(lens, pages, None if sums is None else array(sums)))

    monkeypatch.setattr("cubin_runtime.integrations.latent_batch.mla_decode", decode)
    pair = q[..., :256].contiguous(), q[..., 256:].contiguous()
    out, _ = layer_of(backend, config).forward_mqa(pair, cache, built, None)
    whole = attended(torch.tensor(kv_lens), table, np.cumsum([0, *q_lens]))
    assert bounds == [chunk]
    assert torch.equal(out, whole)


def test_blocks_of_32(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    run(monkeypatch, configuration(block_size=32), step([1, 1], [40, 3], block_table_tensor=table))
    (sent,) = mla_launches(standin)
    assert (1 << sent["page_size_log2"], sent["max_seq_len"]) == (32, 6 * 32)


def test_the_queries_of_a_pair_are_side_by_side(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    run(monkeypatch, configuration(), step([1, 1], [40, 3]))
    (sent,) = mla_launches(standin)
    assert (sent["q_token_stride"], sent["q_head_stride"]) == (HEADS * (LATENT + 64), LATENT + 64)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_queries_of_a_captured_pair_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, drafts: int
) -> None:
    monkeypatch.setattr(mla_backend, "is_capturing", lambda _: True)
    new = 1 + drafts
    _, _, (_, _, (latent, rope)) = run(monkeypatch, configuration(drafts=drafts or None), step([new] * 2, [40, 30]))
    (sent,) = mla_launches(standin)
    assert (sent["batch"], sent["q_len"]) == (2, new)
    assert (sent["q"], sent["q_rope"]) == (latent.data_ptr(), rope.data_ptr())
    assert (sent["q_token_stride"], sent["q_head_stride"]) == (LATENT, 2 * new * LATENT)
    assert (sent["q_rope_token_stride"], sent["q_rope_head_stride"]) == (HEADS * 64, 64)


@pytest.mark.parametrize(("latent", "joined_by_vllm"), [(512, True), (256, False)])
def test_queries_on_a_device_are_joined_by_vllm_where_it_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, latent: int, joined_by_vllm: bool
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(mla_backend._custom_ops, "concat_mla_q", lambda *tensors: calls.append(tensors))
    parts = (torch.empty(2, 3, latent, dtype=BF16, device="meta"), torch.empty(2, 3, 64, dtype=BF16, device="meta"))
    q = mla_backend.joined(parts)
    assert (q.shape, q.dtype, q.device.type) == ((2, 3, latent + 64), BF16, "meta")
    assert calls == ([(*parts, q)] if joined_by_vllm else [])


@pytest.mark.parametrize("asked", [False, True])
def test_batch_invariance(monkeypatch: pytest.MonkeyPatch, standin: StandIn, asked: bool) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    run(monkeypatch, configuration(), step([1, 1], [40, 3]))
    (sent,) = mla_launches(standin)
    assert (sent["splits"] > 0) == asked


def test_scales_of_a_quantized_cache(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    scales = SimpleNamespace(_k_scale_float=0.5, _q_scale_float=3.0)
    (out, _), _, _kept = run(monkeypatch, configuration(cache_dtype="fp8"), step([1, 1], [40, 3]), scales)
    (sent,) = mla_launches(standin)
    assert out.dtype == BF16
    assert sent["softmax_scale_log2"] == pytest.approx(SCALE * LOG2_E * 1.5)
    assert sent["output_scale"] == 0.5


def test_a_padded_step_of_a_graph(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    metadata = step([4, 4], [40, 30], padded=2, num_actual_tokens=16)
    (out, _), _, _kept = run(monkeypatch, configuration(drafts=3), metadata)
    (sent,) = mla_launches(standin)
    assert (sent["batch"], sent["q_len"], sent["tokens"], len(out)) == (4, 4, 16, 16)
    assert integers(sent["seq_lens"], 4) == [40, 30, 0, 0]


def test_more_padding_requests_than_tokens(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    _, _, _kept = run(monkeypatch, configuration(), step([1], [40], padded=3, num_actual_tokens=2))
    (sent,) = mla_launches(standin)
    assert (sent["batch"], integers(sent["seq_lens"], 2)) == (2, [40, 0])


def test_drafts_of_different_number(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    metadata = step([4, 1, 2], [40, 3, 9])
    _, built, _kept = run(monkeypatch, configuration(drafts=3), metadata)
    (sent,) = mla_launches(standin)
    assert (built.num_decodes, built.num_prefills) == (3, 0)
    assert (sent["batch"], sent["q_len"], sent["tokens"]) == (3, 4, 7)
    assert integers(sent["q_cu_seq_lens"], 4) == [0, 4, 5, 7]


def test_decodes_in_front_of_prompts(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    config = configuration(drafts=3)
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", False, raising=False)
    prepared: list[Any] = []
    layer = config.compilation_config.static_forward_context["layer"]
    layer.prefill_backend.clone = lambda: SimpleNamespace(prepare_metadata=prepared.append, get_name=lambda: "")
    lengths = torch.tensor([40, 30, 140], dtype=torch.int32)
    metadata = step([4, 2, 140], [40, 30, 140], seq_lens_cpu_upper_bound=lengths)
    _, built, _kept = run(monkeypatch, config, metadata)
    (sent,) = mla_launches(standin)
    assert (built.num_decodes, built.num_prefills, built.num_decode_tokens, len(prepared)) == (2, 1, 6, 1)
    assert (sent["batch"], integers(sent["q_cu_seq_lens"], 3)) == (2, [0, 4, 6])


def seen(decodes: Any, rows: int) -> list[tuple[list[int], int]]:
    """The page ids of each query token and the number of keys that it sees, as ``mla_decode`` has it."""
    requests = len(decodes.lengths)
    sums = range(requests + 1) if decodes.sums is None else decodes.sums.tolist()
    assert (len(decodes.table), len(sums), sums[0]) == (requests, requests + 1, 0)
    assert sums[-1] == rows
    tokens = []
    for number, (table, length) in enumerate(zip(decodes.table.tolist(), decodes.lengths.tolist(), strict=True)):
        q_len = sums[number + 1] - sums[number]
        assert 0 < q_len <= decodes.q_len
        tokens += [(table, length - behind) for behind in reversed(range(q_len))]
    return tokens


@pytest.mark.parametrize("drafts", [None, 3])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("heads", "chunk"), [(128, 1), (16, 4), (2, 16)])
def test_prompts_of_few_new_tokens_are_decoded_in_chunks(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, heads: int, chunk: int, cache: str, drafts: int | None
) -> None:
    config = configuration(heads=heads, cache_dtype=cache, drafts=drafts)
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", False, raising=False)
    layer = config.compilation_config.static_forward_context["layer"]
    layer.prefill_backend.clone = lambda: SimpleNamespace(prepare_metadata=lambda _: None, get_name=lambda: "")
    q_lens, kv_lens = [1, 1, 7, 128, 33, 150], [40, 1, 200, 250, 33, 150]
    table = torch.arange(24, dtype=torch.int32).view(6, 4)
    upper = torch.tensor(kv_lens, dtype=torch.int32)
    metadata = step(q_lens, kv_lens, block_table_tensor=table, seq_lens_cpu_upper_bound=upper)
    (out, _), built, _kept = run(monkeypatch, config, metadata)
    assert (built.num_decodes, built.num_prefills, built.num_decode_tokens) == (5, 1, 170)
    decodes = built.decode.decodes
    assert seen(decodes, 170) == [
        (row, keys + 1)
        for row, new, length in zip(table.tolist()[:5], q_lens[:5], kv_lens[:5], strict=True)
        for keys in range(length - new, length)
    ]
    (sent,) = mla_launches(standin)
    chunks = sum(-(-new // chunk) for new in q_lens[:5])
    assert (sent["batch"], sent["q_len"], sent["tokens"], sent["heads"]) == (chunks, chunk, 170, heads)
    assert (sent["page_table"], sent["seq_lens"]) == (decodes.table.data_ptr(), decodes.lengths.data_ptr())
    assert sent["q_cu_seq_lens"] == (0 if chunk == 1 else decodes.sums.data_ptr())
    assert (sent["out"], sent["max_seq_len"]) == (out.data_ptr(), MAX_LEN)


@pytest.mark.parametrize("heads", [128, 16])
def test_padding_of_a_step_with_chunks_is_not_computed(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, heads: int
) -> None:
    metadata = step([1, 40], [40, 90], padded=2, num_actual_tokens=48)
    (out, _), built, _kept = run(monkeypatch, configuration(heads=heads), metadata)
    (sent,) = mla_launches(standin)
    chunks = 41 if heads == 128 else 11
    assert (sent["batch"], sent["tokens"], len(out)) == (chunks, 48, 48)
    assert integers(sent["q_cu_seq_lens"], chunks + 1)[-1] == 41
    assert len(seen(built.decode.decodes, 41)) == 41


@pytest.mark.parametrize("drafts", [None, 3])
def test_tokens_of_what_is_a_decode(monkeypatch: pytest.MonkeyPatch, drafts: int | None) -> None:
    def threshold(**changed: Any) -> int:
        config = configuration(drafts=drafts, **changed)
        return int(builder(use(monkeypatch, config), config).reorder_batch_threshold)

    least = 1 + (drafts or 0)
    assert threshold() == 128
    assert threshold(decode_context_parallel_size=2) == least
    assert threshold(enable_dbo=True) == least
    assert threshold(max_model_len=1 << 27) == least  # more tiles than a launch may have
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert threshold() == least


def test_a_bound_within_the_pages_of_a_step(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    run(monkeypatch, configuration(), step([1], [40], block_table_tensor=table, max_seq_len=MAX_LEN))
    (sent,) = mla_launches(standin)
    assert sent["max_seq_len"] == 2 * BLOCK


def test_keys_on_several_ranks(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    if hasattr(mla_attention, "MLADCPManager"):
        pytest.skip("this vLLM gathers keys of prompts through a manager that needs ranks")
    group = SimpleNamespace(world_size=2, rank_in_group=1)
    monkeypatch.setattr(mla_attention, "get_dcp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: group)
    config = configuration(drafts=3, decode_context_parallel_size=2, cp_kv_cache_interleave_size=16)
    local = torch.tensor([16, 48], dtype=torch.int32)
    metadata = step([4, 4], [40, 90], dcp_local_seq_lens=local)
    (out, lse), built, _kept = run(monkeypatch, config, metadata)
    (sent,) = mla_launches(standin)
    assert (out.shape, lse.shape, sent["lse"]) == ((8, 2 * HEADS, LATENT), (8, 2 * HEADS), lse.data_ptr())
    assert (integers(sent["seq_lens"], 2), integers(sent["global_seq_lens"], 2)) == ([16, 48], [40, 90])
    assert (sent["cp_begin"], sent["cp_interleave"], sent["q_len"]) == (16, 16, 4)
    assert sent["max_seq_len"] == MAX_LEN // 2
    impl = type(_kept[0])
    assert (impl.lse_base_on_e, impl.can_return_lse_for_decode, impl.supports_dcp) == (False, True, True)
    assert built.num_decodes == 2


def test_a_step_that_is_not_causal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration()
    with pytest.raises(UsageError, match="causal"):
        builder(use(monkeypatch, config), config).build(0, step([1], [40], causal=False))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
        ({"indexer": object()}, "indexer"),
        ({"num_heads": 130}, "130 heads"),
        ({"kv_lora_rank": 128}, "kv_lora_rank=128"),
    ],
)
def test_layers_that_are_refused(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], named: str) -> None:
    config = configuration()
    backend = use(monkeypatch, config)
    with pytest.raises(UsageError, match=named):
        layer_of(backend, config, **changed)
