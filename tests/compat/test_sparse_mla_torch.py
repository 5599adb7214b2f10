"""FlashInfer's MLA over lists on torch tensors: the keys that are counted on the device. Its CPU build serves."""

from __future__ import annotations

from typing import Any

import pytest

from cubin_runtime.attention import Runtime, torch_memory
from cubin_runtime.compat.flashinfer import trtllm_batch_decode_with_kv_cache_mla
from cubin_runtime.kernels.native.sparse_mla.params import SPARSE_MLA_DECODE
from cubin_runtime.testing import StandIn
from tests.attention.host_tensors import memory_of_host_tensors

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
INT32, BF16 = torch.int32, torch.bfloat16
BATCH, HEADS, WIDTH = 3, 4, 64


@pytest.fixture(autouse=True)
def runtime(hopper: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """One for whose calls host tensors are on device 0."""
    hopper.memory = memory_of_host_tensors(monkeypatch)
    return hopper


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The integers that calls make, on fast paths too."""
    made: list[Any] = []
    for name in ("_causal", "_causal_ragged"):
        plain = getattr(torch_memory, name)

        def keeping(*given: Any, plain: Any = plain, **more: Any) -> Any:
            made.append(plain(*given, **more))
            return made[-1]

        monkeypatch.setattr(torch_memory, name, keeping)
    return made


def arguments(*lead: int, **changes: Any) -> dict[str, Any]:
    given = {
        "query": torch.zeros(*lead, HEADS, 576, dtype=BF16),
        "kv_cache": torch.zeros(20, 64, 576, dtype=BF16),
        "workspace_buffer": torch.zeros(16 << 20, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(*lead, WIDTH, dtype=INT32),
        "seq_lens": torch.tensor([1, 70, 30], dtype=INT32),
        "max_seq_len": 70,
        "sparse_mla_top_k": WIDTH,
        "bmm1_scale": 0.1,
    }
    return {**given, **changes}


def sent(standin: StandIn) -> dict[str, Any]:
    return SPARSE_MLA_DECODE.unpack(bytes.fromhex(standin.calls("cuLaunchKernelEx")[-1].seen["parameter0"]))


def test_each_call_counts_again(standin: StandIn, counts: list[Any]) -> None:
    given = arguments(BATCH, 2)
    for added in range(5):  # at last, the fast path
        given["seq_lens"] = torch.tensor([1, 70, 30], dtype=INT32) + added
        out = trtllm_batch_decode_with_kv_cache_mla(**given)
        assert counts[-1].tolist() == [added + seen for seen in (0, 1, 69, 70, 29, 30)]
        assert (sent(standin)["topk_lens"], sent(standin)["out"]) == (counts[-1].data_ptr(), out.data_ptr())
    assert (tuple(out.shape), out.dtype, len(counts)) == ((BATCH, 2, HEADS, 512), BF16, 5)


def test_each_call_of_ragged_queries_counts_again(standin: StandIn, counts: list[Any]) -> None:
    given = arguments(4, max_q_len=3)
    for sums, seen in (((0, 3, 3, 4), [-1, 0, 1, 30]), ((0, 1, 2, 4), [1, 70, 29, 30])) * 3:
        given["cum_seq_lens_q"] = torch.tensor(sums, dtype=INT32)
        trtllm_batch_decode_with_kv_cache_mla(**given)
        assert (counts[-1].tolist(), sent(standin)["topk_lens"]) == (seen, counts[-1].data_ptr())
    assert len(counts) == 6


def test_one_query_token_per_request_takes_the_lengths_as_they_are(standin: StandIn, counts: list[Any]) -> None:
    for _ in range(5):
        given = arguments(BATCH, 1)
        trtllm_batch_decode_with_kv_cache_mla(**given)
        assert (sent(standin)["topk_lens"], sent(standin)["batch"]) == (given["seq_lens"].data_ptr(), BATCH)
    assert counts == []
