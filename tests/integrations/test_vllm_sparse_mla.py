"""vLLM's sparse MLA backend on our operator: its real base classes and metadata, launches on a recording driver.

Skipped where vLLM's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import REGISTERED  # noqa: E402  (first: it imports vLLM)
from tests.integrations.vllm_mla_steps import BF16, BLOCK, BLOCKS, HEADS, LATENT, SCALE  # noqa: E402
from tests.integrations.vllm_mla_steps import builder, configuration, layer_of, reasons, step, use  # noqa: E402

# isort: on
from vllm.model_executor.layers.attention import sparse_mla_attention  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType  # noqa: E402
from vllm.v1.attention.backends.mla import sparse_utils  # noqa: E402
from vllm.v1.attention.ops import flashmla  # noqa: E402

from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, sparse_mla_launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
WIDTH, PACKED = 128, "fp8_ds_mla"


def sparse(**changed: Any) -> Any:
    return configuration(index_topk=WIDTH, **changed)


def to_slots(requests: Any, table: Any, indices: Any, stride: int) -> Any:
    """What vLLM's Triton kernel gives: rows of the cache for positions in a request; -1 stays."""
    slots = table[requests.long()].gather(1, indices.clamp(min=0).long() // BLOCK) * stride
    return torch.where(indices < 0, indices, slots.int() + indices % BLOCK)


def requests_of(starts: Any, out: Any, mapped: int, tokens: int) -> Any:
    """What another Triton kernel of vLLM gives: the request of each token."""
    out[:tokens] = 0
    out[:mapped] = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())[:mapped]
    return out[:tokens]


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, no pinned memory, and torch in place of Triton."""
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    monkeypatch.setattr(sparse_mla_attention, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(sparse_mla_attention, "np_to_pinned_tensor", torch.from_numpy, raising=False)
    if importlib.util.find_spec("vllm.v1.attention.ops.metadata") is not None:
        monkeypatch.setattr("vllm.v1.attention.ops.metadata.compute_token_to_req_indices", requests_of)


def run(monkeypatch: Any, config: Any, metadata: Any, lists: Any, layers: int = 1) -> tuple[Any, Any, Any]:
    """A forward pass of the tokens that attend to lists: what it returned, its metadata, tensors to keep alive."""
    backend = use(monkeypatch, config)
    built = builder(backend, config).build(0, metadata)
    made = layer_of(backend, config, topk_indices_buffer=lists)
    slots: list[Any] = []

    def converted(requests: Any, table: Any, indices: Any, **options: Any) -> Any:
        assert (indices.shape[1], requests.shape[0]) == (options["NUM_TOPK_TOKENS"], indices.shape[0])
        assert options["BLOCK_SIZE"] == BLOCK
        slots.append(to_slots(requests, table, indices, options.get("BLOCK_STRIDE_ROWS", BLOCK)))
        return slots[-1]

    def converted_by_group(indices: Any, step: Any, *, block_stride_rows: int, return_valid_counts: bool) -> Any:
        assert return_valid_counts
        slots.append(to_slots(step.req_id_per_token[: len(indices)], step.block_table, indices, block_stride_rows))
        return slots[-1], None

    monkeypatch.setattr(sparse_utils, "triton_convert_req_index_to_global_index", converted)
    monkeypatch.setattr(made, "_convert_logical_to_physical_topk", converted_by_group, raising=False)
    tokens, heads = built.num_decode_tokens, config.model_config.get_num_attention_heads(None)
    packed = config.cache_config.cache_dtype == PACKED
    kv_caches = torch.zeros(BLOCKS, layers, BLOCK, 656 if packed else 576, dtype=torch.uint8 if packed else BF16)
    kv_cache = kv_caches[:, -1]
    q = torch.zeros(heads, tokens, LATENT, dtype=BF16).transpose(0, 1), torch.zeros(tokens, heads, 64, dtype=BF16)
    return made.forward_mqa(q, kv_cache, built, SimpleNamespace()), built, (made, kv_cache, q, slots)


def lists_of(tokens: int) -> Any:
    """Positions 0, 2, 4, ... of each token's request, then holes, in a buffer for more tokens."""
    lists = torch.full((tokens + 5, WIDTH), -1, dtype=torch.int32)
    lists[:, :40] = torch.arange(40, dtype=torch.int32) * 2
    return lists


def test_models_with_an_indexer_get_the_sparse_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = use(monkeypatch, sparse())
    assert (backend.is_mla(), backend.is_sparse(), backend.get_name()) == (True, True, REGISTERED)
    module, name = backend.full_cls_name()
    assert getattr(importlib.import_module(module), name) is backend
    assert use(monkeypatch, configuration()).is_sparse() is False


@pytest.mark.parametrize("cache", ["auto", "bfloat16", PACKED])
@pytest.mark.parametrize("changed", [{}, {"heads": 128}, {"heads": 8}, {"drafts": 7}])
def test_what_is_supported(monkeypatch: pytest.MonkeyPatch, cache: str, changed: dict[str, Any]) -> None:
    backend = use(monkeypatch, sparse(**changed))
    assert reasons(backend, kv_cache_dtype=cache, use_batch_invariant=True) == []
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert (backend.get_preferred_block_size(16), backend.supports_block_size(128)) == (64, True)


def test_the_shape_of_the_cache_is_that_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = use(monkeypatch, sparse())
    assert backend.get_kv_cache_shape(3, 64, 1, 576) == (3, 64, 576)
    assert backend.get_kv_cache_shape(3, 64, 1, 576, PACKED) == (3, 64, 656)


@pytest.mark.parametrize(
    "changed",
    [
        {"head_size": 512},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 32},
        {"use_mla": False},
        {"has_sink": True},
        {"use_sparse": False},
        {"use_mm_prefix": True},
        {"device_capability": DeviceCapability(10, 0)},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"use_kv_connector": True},
        {"use_pcp": True},
        {"use_per_head_quant_scales": True},
    ],
)
def test_what_the_engine_refuses_at_start(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    backend = use(monkeypatch, sparse())
    if not changed.keys() <= inspect.signature(backend.validate_configuration).parameters.keys():
        pytest.skip("this vLLM does not ask")
    assert len(reasons(backend, **changed)) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kv_lora_rank": 256}, "sparse MLA with kv_lora_rank=256 not supported"),
        ({"qk_rope_head_dim": 32}, "MLA with kv_lora_rank=512, qk_rope_head_dim=32 not supported"),
        ({"heads": 192}, "MLA with 192 heads on a rank not supported"),
        ({"index_topk": 40000}, "sparse MLA with lists of 40000 rows not supported"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism with lists not supported"),
        ({"drafts": 2, "enable_dbo": True}, "drafts in micro-batches not supported"),
    ],
)
def test_models_without_kernels_are_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    config = configuration(**{"index_topk": WIDTH, **changed})
    backend = use(monkeypatch, config)
    assert reasons(backend) == [reason]
    with pytest.raises(UsageError, match=reason):  # vLLM may have the answer of another configuration
        layer_of(backend, config, topk_indices_buffer=lists_of(1))


@pytest.mark.parametrize("cache", ["auto", PACKED])
def test_decodes_attend_to_the_slots_of_their_lists(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, cache: str
) -> None:
    table = torch.tensor([[3, 1, 0, 0], [5, 7, 0, 0], [2, 9, 0, 0]], dtype=torch.int32)
    metadata, lists = step([1, 1, 1], [80, 90, 128], block_table_tensor=table), lists_of(3)
    (out, lse), built, kept = run(monkeypatch, sparse(cache_dtype=cache), metadata, lists)
    (sent,) = sparse_mla_launches(standin)
    assert (out.shape, out.dtype, lse) == ((3, HEADS, LATENT), BF16, None)
    assert (built.num_decodes, built.num_prefills, built.num_decode_tokens) == (3, 0, 3)
    assert (sent["batch"], sent["heads"], sent["width"], sent["rows"]) == (3, HEADS, WIDTH, BLOCKS * BLOCK)
    assert (sent["kv_cache"], sent["out"], sent["topk_lens"]) == (kept[1].data_ptr(), out.data_ptr(), 0)
    assert (sent["q_token_stride"], sent["q_head_stride"]) == (HEADS * 576, 576)
    assert ("scaled_e4m3" in sent["symbol"], sent["row_bytes"]) == (cache == PACKED, 656 if cache == PACKED else 1152)
    expected = [[int(row[p // BLOCK]) * BLOCK + p % BLOCK for p in range(0, 80, 2)] + [-1] * 88 for row in table]
    assert integers(sent["indices"], 3 * WIDTH) == [slot for row in expected for slot in row]
    assert sent["softmax_scale"] == pytest.approx(SCALE)


@pytest.mark.skipif(
    not hasattr(sparse_utils, "flat_kv_row_view"), reason="this vLLM keeps each layer's blocks together"
)
def test_blocks_of_other_layers_may_lie_between(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    table = torch.tensor([[3, 1, 0, 0]], dtype=torch.int32)
    metadata = step([1], [80], block_table_tensor=table)
    _, _, kept = run(monkeypatch, sparse(cache_dtype=PACKED), metadata, lists_of(1), layers=2)
    (sent,) = sparse_mla_launches(standin)
    assert (sent["kv_cache"], sent["rows"]) == (kept[1].data_ptr(), (BLOCKS - 1) * 2 * BLOCK + BLOCK)
    expected = [int(table[0, p // BLOCK]) * 2 * BLOCK + p % BLOCK for p in range(0, 80, 2)]
    assert integers(sent["indices"], 40) == expected


@pytest.mark.parametrize("asked", [False, True])
def test_batch_invariance(monkeypatch: pytest.MonkeyPatch, standin: StandIn, asked: bool) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    run(monkeypatch, sparse(), step([1, 1], [90, 100]), lists_of(2))
    (sent,) = sparse_mla_launches(standin)
    assert sent["grid"] == ("4,2,1" if asked else "1,2,1")  # the CTAs of a cluster, and clusters


def test_drafts_and_short_prompts_are_more_tokens(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    metadata = step([4, 1, 20], [80, 90, 120])
    (out, _), built, kept = run(monkeypatch, sparse(drafts=3), metadata, lists_of(25))
    (sent,) = sparse_mla_launches(standin)
    assert (built.num_decodes, built.num_decode_tokens, sent["batch"], len(out)) == (3, 25, 25, 25)
    table = metadata.block_table_tensor
    assert kept[3][0][4, 1] == table[1, 0] * BLOCK + 2
    assert kept[3][0][5, 1] == table[2, 0] * BLOCK + 2


class EnginePrompts:
    """vLLM's kernel for prompts, which gives ones; ``calls`` are its queries, rows, lists and their lengths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, Any, Any, list[int]]] = []
        monkeypatch.setattr(flashmla, "is_flashmla_sparse_supported", lambda: (True, None))
        monkeypatch.setattr(flashmla, "flash_mla_sparse_fwd", self)

    def __call__(
        self, q: Any, rows: Any, indices: Any, scale: float, *, topk_length: Any, out: Any
    ) -> tuple[Any, None, None]:
        assert scale == SCALE
        self.calls.append((q, rows, indices, topk_length.tolist()))
        made = torch.empty(*q.shape[:2], LATENT, dtype=BF16) if out is None else out
        return made.fill_(1), None, None


def attended(monkeypatch: pytest.MonkeyPatch, decodes: int, **changed: Any) -> Any:
    """What a layer gives for five tokens of which some decode."""
    config = sparse(**changed)
    layer = layer_of(use(monkeypatch, config), config, topk_indices_buffer=lists_of(5))
    packed = config.cache_config.cache_dtype == PACKED
    kv_cache = torch.zeros(BLOCKS, BLOCK, 656 if packed else 576, dtype=torch.uint8 if packed else BF16)
    return layer.attend(torch.ones(5, changed["heads"], 576, dtype=BF16), kv_cache, lists_of(5)[:5], decodes)


@pytest.mark.parametrize("heads", [24, 64, 128])
def test_prompts_over_bf16_rows_go_to_the_kernel_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, heads: int
) -> None:
    prompts = EnginePrompts(monkeypatch)
    out = attended(monkeypatch, 2, heads=heads)
    ((q, rows, indices, entries),) = prompts.calls
    (sent,) = sparse_mla_launches(standin)
    assert (sent["batch"], sent["out"]) == (2, out.data_ptr())
    assert (q.shape, rows.shape) == ((3, -(-heads // 64) * 64, 576), (BLOCKS * BLOCK, 1, 576))
    assert torch.equal(indices[:, 0], lists_of(5)[2:5])
    assert entries == [40, 40, 40]
    assert (out.shape, bool((out[2:] == 1).all())) == ((5, heads, LATENT), True)


@pytest.mark.parametrize("changed", [{"heads": 16}, {"heads": 64, "cache_dtype": PACKED}, {"heads": 64, "alone": True}])
def test_prompts_that_go_to_our_kernel(
    monkeypatch: pytest.MonkeyPatch, standin: StandIn, changed: dict[str, Any]
) -> None:
    prompts = EnginePrompts(monkeypatch)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(changed.pop("alone", False))))
    attended(monkeypatch, 2, **changed)
    (sent,) = sparse_mla_launches(standin)
    assert (sent["batch"], prompts.calls) == (5, [])


def test_prompts_go_to_our_kernel_where_vllm_has_none(monkeypatch: pytest.MonkeyPatch, standin: StandIn) -> None:
    attended(monkeypatch, 0, heads=128)
    (sent,) = sparse_mla_launches(standin)
    assert sent["batch"] == 5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"alibi_slopes": [1.0]}, "alibi_slopes"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": AttentionType.ENCODER}, "attn_type"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"num_heads": 130}, "130 heads"),
        ({"kv_lora_rank": 256}, "kv_lora_rank=256"),
        ({"topk_indices_buffer": None}, "topk_indices_buffer"),
    ],
)
def test_layers_that_are_refused(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], named: str) -> None:
    config = sparse()
    backend = use(monkeypatch, config)
    with pytest.raises(UsageError, match=named):
        layer_of(backend, config, **{"topk_indices_buffer": lists_of(1), **changed})


@pytest.mark.parametrize("changed", [{"heads": 64, "cache_dtype": PACKED}, {"heads": 24}])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_steps_of_any_size_load_and_allocate_nothing(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], batch_invariant: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(batch_invariant)))
    most = 300
    scheduler = SimpleNamespace(max_num_seqs=12, max_num_batched_tokens=most)
    config = sparse(scheduler_config=scheduler, **changed)
    layer = layer_of(use(monkeypatch, config), config, topk_indices_buffer=lists_of(most))
    loads, allocations = hopper.stats().loads, len(standin.calls("cuMemAlloc"))
    assert loads > 0
    assert allocations > 0
    packed, heads = "cache_dtype" in changed, changed["heads"]
    kv_cache = torch.zeros(BLOCKS, BLOCK, 656 if packed else 576, dtype=torch.uint8 if packed else BF16)
    for tokens in range(1, most + 1):
        layer.attend(torch.zeros(tokens, heads, 576, dtype=BF16), kv_cache, lists_of(tokens)[:tokens], tokens)
    assert hopper.stats().loads == loads
    assert len(standin.calls("cuMemAlloc")) == allocations
