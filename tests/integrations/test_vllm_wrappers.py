"""vLLM's wrappers around an attention backend, on ours: they build other steps, and change and copy the metadata."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import BACKEND, BF16, BLOCK, DIM, HEADS, INT32, MAX_LEN, builder, cache, layer, step  # noqa: E402

# isort: on
from vllm.model_executor.layers.attention.chunked_local_attention import (  # noqa: E402
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend  # noqa: E402
from vllm.model_executor.layers.attention.encoder_only_attention import (  # noqa: E402
    create_encoder_only_attention_backend,
)
from vllm.model_executor.layers.attention.static_sink_attention import (  # noqa: E402
    create_static_sink_attention_backend,
)
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.utils import (  # noqa: E402
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
)
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import integers, launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]


@pytest.fixture(autouse=True)
def pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is none that is pinned."""
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    monkeypatch.setattr("vllm.utils.torch_utils.is_pin_memory_available", lambda: False, raising=False)


def with_lengths(q_lens: list[int], kv_lens: list[int], **changed: Any) -> Any:
    """A step with the lengths on the host, which these wrappers read."""
    return step(q_lens, kv_lens, **{"seq_lens_cpu_upper_bound": torch.tensor(kv_lens, dtype=INT32), **changed})


def forward(built: Any, tokens: int) -> tuple[Any, Any]:
    """A layer's pass over a step; its query and output, whose addresses the launches have."""
    query = torch.zeros(tokens, HEADS, DIM, dtype=BF16)
    out = torch.empty_like(query)
    layer(BACKEND).forward(None, query, None, None, cache(), built, out)
    return query, out


def test_chunked_local_attention(standin: StandIn) -> None:
    backend = create_chunked_local_attention_backend(BACKEND, 2 * BLOCK)
    metadata = with_lengths([1, 40], [70, 50])
    built = builder(backend).build(0, metadata)
    table = metadata.block_table_tensor
    # 40 tokens from position 10 on: 22 of the first chunk, 18 of the second.
    assert torch.equal(built.make_virtual_batches_block_table(table)[0], table[0, 4:6])
    _kept = forward(built, 41)
    (first, decode), (second, context) = launches(standin)
    assert (first, integers(decode["seq_lens"], 1), decode["max_seq_len"]) == ("decode", [6], 2 * BLOCK)
    assert integers(decode["page_table"], 2) == table[0, 4:6].tolist()
    assert (second, context["q_len"], context["max_seq_len"]) == ("context", 22, 2 * BLOCK)
    assert integers(context["q_cu_seq_lens"], 3) == [0, 22, 40]
    assert integers(context["seq_lens"], 2) == [32, 18]
    assert integers(context["page_table"], 4) == table[1, :4].tolist()


@pytest.mark.parametrize("armed", [False, True])
def test_fast_prefill_of_layers_that_share_keys(standin: StandIn, armed: bool) -> None:
    given = {"logits_indices_padded": torch.tensor([0, 20]), "num_logits_indices": 2, "max_logits_per_req": 1}
    asked = {name: given[name] for name in given.keys() & {field.name for field in fields(CommonAttentionMetadata)}}
    metadata = with_lengths([1, 20], [40, 20], **(asked if armed else {}))
    made = builder(create_fast_prefill_custom_backend("FastPrefill", BACKEND))
    try:
        built = made.build(0, metadata)
    except AssertionError:
        if armed:
            raise
        pytest.skip("before vLLM 0.30 every step is armed")
    assert isinstance(built, KVSharingFastPrefillMetadata)
    assert built.num_logits_indices == (2 if armed else None)
    _kept = forward(built, 2 if armed else 21)
    sent = launches(standin)
    assert [name for name, _ in sent] == (["decode"] if armed else ["decode", "context"])
    assert integers(sent[0][1]["seq_lens"], 2)[: 1 + armed] == [40, 20][: 1 + armed]


def test_fast_prefill_with_drafts_reads_no_sums_that_are_still_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def late(tensor: Any, *arguments: Any, non_blocking: bool = False, **named: Any) -> Any:
        copied = to(tensor, *arguments, **named)
        return torch.full_like(copied, 7) if non_blocking else copied  # what the memory held before

    monkeypatch.setattr(torch.Tensor, "to", late)
    given = {"logits_indices_padded": torch.tensor([0, 1, 2, 22]), "num_logits_indices": 4, "max_logits_per_req": 3}
    asked = {name: given[name] for name in given.keys() & {field.name for field in fields(CommonAttentionMetadata)}}
    metadata = with_lengths([3, 20], [40, 20], **asked)
    backend = create_fast_prefill_custom_backend("FastPrefill", BACKEND)
    cache_config = SimpleNamespace(block_size=BLOCK, kv_sharing_fast_prefill=True)
    part = builder(backend, drafts=2, cache_config=cache_config).build(0, metadata).decodes
    assert (part.sums.tolist(), part.max_q_len, part.rows, part.table.shape[0]) == ([0, 3, 4], 3, 4, 2)


def test_one_of_two_backends_by_step(standin: StandIn) -> None:
    composite = pytest.importorskip("vllm.v1.attention.backends.composite", reason="from vLLM 0.31 on")
    other = create_chunked_local_attention_backend(BACKEND, 2 * BLOCK)
    routing = type(
        "Routing",
        (),
        {
            "__init__": lambda self, layer_names, config: None,
            "select": lambda self, metadata: int(metadata.max_query_len == 1),
        },
    )
    backend = composite.create_composite_attention_backend(
        other, BACKEND, name="Both", backend_name="BOTH", module=__name__, routing_policy=routing
    )
    made = builder(backend)
    decodes, prompts = (made.build(0, with_lengths(lens, lens)) for lens in ([1, 1], [40, 40]))
    assert (decodes._attention_backend_variant, prompts._attention_backend_variant) == (1, 0)
    assert prompts.prefills.rows == 80


def test_ubatches(standin: StandIn) -> None:
    metadata = with_lengths([1, 1, 20], [40, 30, 50])
    # The prompt is divided between them.
    slices = [UBatchSlice(slice(0, 3), slice(0, 12)), UBatchSlice(slice(2, 3), slice(12, 22))]
    made = builder(BACKEND)
    built = [made.build(0, part) for part in split_attn_metadata(slices, metadata)]
    assert [(part.decodes is not None, part.prefills.rows) for part in built] == [(True, 10), (False, 10)]
    _kept = [forward(part, tokens) for part, tokens in zip(built, (12, 10), strict=True)]
    (_, decode), (_, first), (_, second) = launches(standin)
    assert integers(decode["seq_lens"], 2) == [40, 30]
    assert (integers(first["seq_lens"], 1), integers(second["seq_lens"], 1)) == ([40], [50])
    assert (integers(first["q_cu_seq_lens"], 2), integers(second["q_cu_seq_lens"], 2)) == ([0, 10], [0, 10])


def test_sinks_that_are_keys_make_requests_longer_than_the_model_allows(standin: StandIn) -> None:
    made = builder(
        create_static_sink_attention_backend(BACKEND, 2 * BLOCK),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )
    metadata = with_lengths([1, 1], [MAX_LEN, 3])
    table = metadata.block_table_tensor
    built = made.build(0, metadata)
    _kept = forward(built, 2)
    ((_, sent),) = launches(standin)
    assert integers(sent["seq_lens"], 2) == [MAX_LEN + 2 * BLOCK, 3 + 2 * BLOCK]
    assert sent["max_seq_len"] == MAX_LEN + 2 * BLOCK
    assert integers(sent["page_table"], 4) == [1, 2, *table[0, :2].tolist()]


def test_metadata_can_be_copied_and_the_copy_changed() -> None:
    built = builder(BACKEND).build(0, with_lengths([1, 20], [40, 20]))
    copied = copy.copy(built)
    copied.prefills = None
    assert (built.prefills.rows, copied.decodes is built.decodes) == (20, True)


@pytest.mark.parametrize("wrapper", [create_encoder_only_attention_backend, create_cross_attention_backend])
def test_steps_that_are_not_causal_are_refused(wrapper: Any) -> None:
    lengths = torch.tensor([20], dtype=INT32)
    metadata = with_lengths([20], [20], encoder_seq_lens=lengths, encoder_seq_lens_cpu=lengths.numpy())
    with pytest.raises(UsageError, match="causal"):
        builder(wrapper(BACKEND)).build(0, metadata)
