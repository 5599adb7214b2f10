"""FlashInfer's context parallelism on torch tensors: the counts that are made on the device. Its CPU build serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, torch_memory
from cubin_runtime.attention.reference import paged_decode_reference
from cubin_runtime.compat import flashinfer
from cubin_runtime.testing import StandIn
from tests.attention.host_tensors import memory_of_host_tensors
from tests.attention.xqa_calls import sent

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
INT32, BF16 = torch.int32, torch.bfloat16
KV_HEADS, HEADS, DIM, PAGE, SCALE = 2, 4, 64, 16, 0.3
PREFIXES = (0, 1, 5, 40)


@pytest.fixture(autouse=True)
def runtime(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One for whose calls host tensors are on device 0."""
    hopper.memory = memory_of_host_tensors(monkeypatch)
    return hopper


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors that calls make, on fast paths too."""
    made: list[Any] = []
    original = torch_memory.note_made

    def note_made(tensor: Any, make: Any, sources: Any = ()) -> Any:
        def keeping(*given: Any) -> Any:
            made.append(make(*given))
            return made[-1]

        made.append(tensor)
        return original(tensor, keeping, sources)

    monkeypatch.setattr(torch_memory, "note_made", note_made)
    return made


def arguments(q_lens: tuple[int, ...], world: int, rank: int) -> dict[str, Any]:
    """Of requests with these query tokens behind ``PREFIXES``, whose keys are those of one rank."""
    own = [len(range(rank, prefix + q_len, world)) for prefix, q_len in zip(PREFIXES, q_lens, strict=True)]
    tokens, batch = sum(q_lens), len(q_lens)
    generator = torch.Generator().manual_seed(1)
    return {
        "query": torch.randn(tokens, HEADS, DIM, generator=generator).to(BF16),
        "kv_cache": tuple(torch.randn(batch * 4, PAGE, KV_HEADS, DIM, generator=generator).to(BF16) for _ in "kv"),
        "workspace_buffer": torch.zeros(16 << 20, dtype=torch.uint8),
        "block_tables": torch.arange(batch * 4, dtype=INT32).view(batch, 4),
        "seq_lens": torch.tensor(own, dtype=INT32),
        "max_seq_len": 64,
        "kv_layout": "NHD",
        "out": torch.zeros(tokens, HEADS, DIM, dtype=BF16),
        "lse": torch.zeros(tokens, HEADS),
        "cp_world": world,
        "cp_rank": rank,
        "causal_seqlens_kv_global": torch.tensor(PREFIXES, dtype=INT32),
    }


def flashinfer_bounds(given: dict[str, Any], q_lens: tuple[int, ...]) -> tuple[Any, Any]:
    """Output and log-sum-exp where row j sees max(0, floor((S + j - rank) / world) + 1) of the rank's keys."""
    parts, begin = [], 0
    k, v = (cache.double().numpy() for cache in given["kv_cache"])
    for request, (prefix, q_len) in enumerate(zip(PREFIXES, q_lens, strict=True)):
        for row in range(q_len):
            seen = max(0, (prefix + row - given["cp_rank"]) // given["cp_world"] + 1)
            q = given["query"][begin : begin + 1].double().numpy()
            parts.append(paged_decode_reference(q, k, v, given["block_tables"][request : request + 1], [seen], SCALE))
            begin += 1
    outs, lses = zip(*parts, strict=True)
    return np.concatenate(outs), np.concatenate(lses)


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (8, 7)])
@pytest.mark.parametrize("q_lens", [(3, 3, 3, 3), (2, 0, 8, 1)], ids=["equal", "ragged"])
def test_query_tokens_see_the_keys_that_flashinfer_says(
    standin: StandIn, counts: list[Any], q_lens: tuple[int, ...], world: int, rank: int
) -> None:
    given = arguments(q_lens, world, rank)
    sums = np.cumsum((0, *q_lens))
    ragged = {"cum_seq_lens_q": torch.tensor(sums, dtype=INT32), "max_q_len": 8, "q_len_per_req": None}
    flashinfer.trtllm_batch_decode_with_kv_cache(
        **given, **({"q_len_per_req": q_lens[0]} if len(set(q_lens)) == 1 else ragged)
    )
    (made,), seen = counts, sent(standin)
    assert (seen["global_seq_lens"], made.dtype) == (made.data_ptr(), INT32)
    out, lse = paged_decode_reference(
        given["query"].double().numpy(),
        *(cache.double().numpy() for cache in given["kv_cache"]),
        given["block_tables"],
        given["seq_lens"],
        SCALE,
        q_cu_seq_lens=sums,
        global_seq_lens=made,
        cp_world=seen["cp_round"].divisor,
        cp_rank=seen["cp_begin"],
    )
    expected = flashinfer_bounds(given, q_lens)
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_query_token_sees_the_keys_of_the_lengths(standin: StandIn, counts: list[Any], rank: int) -> None:
    given = arguments((1, 1, 1, 1), 4, rank)
    flashinfer.trtllm_batch_decode_with_kv_cache(**given)
    assert (sent(standin)["global_seq_lens"], counts) == (0, [])
    caches = [cache.double().numpy() for cache in given["kv_cache"]]
    query, table = given["query"].double().numpy(), given["block_tables"]
    out, lse = paged_decode_reference(query, *caches, table, given["seq_lens"], SCALE)
    expected = flashinfer_bounds(given, (1, 1, 1, 1))
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], atol=1e-12)


def test_each_call_counts_again(standin: StandIn, counts: list[Any]) -> None:
    given = arguments((3, 3, 3, 3), 2, 0)
    for added in range(3):  # from the second on, the fast path
        given["causal_seqlens_kv_global"].copy_(torch.tensor(PREFIXES) + added)
        flashinfer.trtllm_batch_decode_with_kv_cache(**given, q_len_per_req=3)
        assert counts[-1].tolist() == [prefix + added + 3 for prefix in PREFIXES]
        assert sent(standin)["global_seq_lens"] == counts[-1].data_ptr()
    assert len(counts) == 3
