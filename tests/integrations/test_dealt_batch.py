"""Steps over keys that are dealt to ranks, on a CPU: two ranks together compute what one with all keys would."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402  (the tests of torch have it)

from cubin_runtime.distributed import KvPartition  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.dealt_batch import Ranks, attend_dealt, check_dealt_layer  # noqa: E402
from cubin_runtime.integrations.paged_batch import DealtBatch, LayerOptions, Part  # noqa: E402
from tests.integrations.dealt_ranks import PAGE, Group, Requests, merged, use_references  # noqa: E402

pytestmark = pytest.mark.torch
WORLD, HEADS, COLUMNS, SCALE = 2, 8, 8, 0.1


def ranks_of(group: Group) -> Ranks:
    def combine(out: Any, lse: Any) -> Any:
        parts = group.exchange((out, lse))
        total, sums = merged(*(torch.stack(each) for each in zip(*parts, strict=True)))
        return group.own_heads(total.to(out.dtype), sums.float())

    return Ranks(lambda q: group.all_gather(q, 1), combine)


def batch_of(requests: Requests, partition: KvPartition, table: Any) -> DealtBatch:
    decodes = next((n for n, q_len in enumerate(requests.q_lens) if q_len > 1), len(requests.q_lens))
    q_lens, kv_lens = (torch.tensor(each, dtype=torch.int32) for each in (requests.q_lens, requests.kv_lens))
    bound = COLUMNS * PAGE
    first = last = None
    if decodes:
        own = partition.own_lens(kv_lens[:decodes])
        first = Part(0, decodes, table[:decodes], own, None, 1, bound)
    context = kv_lens[decodes:] - q_lens[decodes:]
    if len(context):
        sums = torch.tensor([0, *q_lens[decodes:].cumsum(0)], dtype=torch.int32)
        rows, own = int(sums[-1]), partition.own_lens(context)
        last = Part(decodes, rows, table[decodes:], own, sums, int(q_lens[decodes:].max()), bound)
    return DealtBatch(first, last, has_context=bool((context > 0).any()))


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "operators"),
    [
        ([1, 1, 1], [40, 1, 100], {"decode"}),
        ([20, 7], [20, 7], {"new keys"}),
        ([20, 7], [90, 7], {"context", "new keys", "merge"}),
        ([1, 1, 20], [40, 3, 20], {"decode", "new keys"}),
        ([1, 1, 20, 3], [40, 3, 20, 70], {"decode", "context", "new keys", "merge"}),
    ],
)
def test_ranks_compute_what_one_with_all_keys_does(
    q_lens: list[int], kv_lens: list[int], operators: set[str], interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(Requests(q_lens, kv_lens, HEADS, torch.float64), interleave, monkeypatch) == operators


def test_soft_caps_run_on_context_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests([1, 1, 20], [40, 3, 70], HEADS, torch.float64)
    assert run(requests, 4, monkeypatch, soft_cap=2.0) == {"context", "new keys", "merge"}


def run(requests: Requests, interleave: int, monkeypatch: pytest.MonkeyPatch, soft_cap: float = 0.0) -> set[str]:
    called, group = use_references(monkeypatch), Group(WORLD)
    options, ranks = LayerOptions(SCALE, -1, soft_cap, None, False), ranks_of(group)

    def attend(rank: int) -> Any:
        partition = KvPartition(WORLD, rank, interleave)
        pages, table = requests.cache(partition, COLUMNS)
        (q,) = group.own_heads(requests.q)
        out = torch.full_like(q, torch.nan)
        new = requests.new(requests.keys), requests.new(requests.values)
        caches = pages.split(pages.shape[-1] // 2, -1)
        attend_dealt(q, *new, *caches, "HND", batch_of(requests, partition, table), options, ranks, out)
        return out

    out = torch.cat(group.run(attend), 1)
    np.testing.assert_allclose(out.numpy(), requests.expected(SCALE, soft_cap), atol=1e-6)
    return set(called)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ((16, False, False), "sliding_window: expected None"),
        ((None, True, True), "sinks, kv_sharing_target_layer_name: expected None"),
    ],
)
def test_layers_that_are_refused(layer: tuple[Any, bool, bool], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_dealt_layer(*layer)
