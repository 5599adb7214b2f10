"""MLA over lists under FlashInfer's name on torch tensors, against float64: forms of rows, lengths, ragged queries."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat.flashinfer import trtllm_batch_decode_with_kv_cache_mla
from cubin_runtime.testing.compare import assert_attention_close
from tests.gpu.decode_values import KINDS, values_of
from tests.gpu.sparse_mla_cases import LATENT, SparseMlaCase, SparseMlaHost, sparse_mla_host, sparse_mla_reference

torch = pytest.importorskip("torch", reason="torch is not installed")
from tests.gpu.torch_cases import device_tensor  # noqa: E402  (it needs torch)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

WORKSPACE_BYTES = 256 << 20
BATCH, Q_LEN, WIDTH = 5, 2, 300
PLAIN = SparseMlaCase(BATCH * Q_LEN, 16, WIDTH, "bf16")
CASES = {
    "bf16": PLAIN,
    "128 heads, sinks, a scale of the output": replace(PLAIN, heads=128, sinks=True, output_scale=0.5),
    "no rope": replace(PLAIN, cache="bf16_nope", page_size=32),
    "holes, invariant": replace(PLAIN, heads=6, holes="random", batch_invariant=True),
    "rows of 656 bytes": replace(PLAIN, cache="scaled_e4m3", holes="tail"),
    "scales on the device": replace(PLAIN, device_scales=True, lse_base="e"),
}
SEQ_LENS = (1, 2, 100, WIDTH, 5000)
SEEN = (0, 1, 1, 2, 99, 100, WIDTH - 1, WIDTH, WIDTH, WIDTH)  # of both query tokens of these requests


@pytest.fixture(autouse=True)
def default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


def on_cuda(values: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values)).cuda()


def arguments(case: SparseMlaCase, host: SparseMlaHost, lead: tuple[int, ...]) -> dict[str, Any]:
    """All but the lengths."""
    cache = on_cuda(host.memory) if case.cache == "scaled_e4m3" else device_tensor("bf16", host.memory.view(np.uint16))

    def scale(value: float) -> Any:
        return torch.tensor([value], device="cuda") if case.device_scales else value

    return {
        "query": device_tensor("bf16", host.q).view(*lead, case.heads, case.columns),
        "kv_cache": cache[:, None],
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": case.columns - LATENT,
        "block_tables": on_cuda(host.indices).view(*lead, case.width),
        "max_seq_len": max(SEQ_LENS),
        "sparse_mla_top_k": case.width,
        "bmm1_scale": scale(case.scale),
        "bmm2_scale": scale(case.output_scale),
        "sinks": None if host.sinks is None else [on_cuda(host.sinks)],
        "batch_invariant": case.batch_invariant,
        "return_lse": True,
        "return_lse_base": "basee" if case.lse_base == "e" else None,
    }


def assert_right(case: SparseMlaCase, host: SparseMlaHost, result: tuple[Any, Any]) -> None:
    out, lse = result
    bits = out.view(torch.int16).cpu().numpy().view(KINDS["bf16"].bits)
    expected, expected_lse = sparse_mla_reference(case, host)
    assert_attention_close(
        values_of("bf16", bits.reshape(case.tokens, case.heads, LATENT)),
        expected,
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn" if case.cache == "scaled_e4m3" else "bfloat16",
        lse=lse.cpu().numpy(),
        expected_lse=expected_lse,
        output_scale=case.output_scale,
    )


@pytest.mark.parametrize("name", CASES)
def test_lists_with_lengths_of_their_own(rng: np.random.Generator, name: str) -> None:
    case = replace(CASES[name], lens=tuple(int(length) for length in rng.integers(0, WIDTH + 1, BATCH * Q_LEN)))
    host = sparse_mla_host(case, rng)
    given = arguments(case, host, (BATCH, Q_LEN))
    for _ in range(4):  # the fast path at last
        result = trtllm_batch_decode_with_kv_cache_mla(**given, seq_lens=on_cuda(host.lens).view(BATCH, Q_LEN))
        assert result[0].shape == (BATCH, Q_LEN, case.heads, LATENT)
        assert_right(case, host, result)


def test_lists_count_as_far_as_a_query_token_sees_keys(rng: np.random.Generator) -> None:
    case = replace(PLAIN, lens=SEEN)
    host = sparse_mla_host(case, rng)
    given = arguments(case, host, (BATCH, Q_LEN))
    for _ in range(4):
        lengths = on_cuda(np.array(SEQ_LENS, np.int32))
        assert_right(case, host, trtllm_batch_decode_with_kv_cache_mla(**given, seq_lens=lengths))


@pytest.mark.parametrize("cache", ["bf16", "scaled_e4m3"])
def test_one_query_token_sees_all_keys(rng: np.random.Generator, cache: str) -> None:
    case = replace(PLAIN, tokens=BATCH, cache=cache, lens=SEQ_LENS)
    host = sparse_mla_host(case, rng)
    lengths = on_cuda(np.array(SEQ_LENS, np.int32))
    assert_right(
        case, host, trtllm_batch_decode_with_kv_cache_mla(**arguments(case, host, (BATCH, 1)), seq_lens=lengths)
    )


@pytest.mark.parametrize("max_q_len", [None, 4])
def test_ragged_queries(rng: np.random.Generator, max_q_len: int | None) -> None:
    q_lens, seq_lens = (3, 0, 1, 4), (2, 9, 50, 301)
    seen = [keys - behind for keys, tokens in zip(seq_lens, q_lens, strict=True) for behind in reversed(range(tokens))]
    case = replace(PLAIN, tokens=sum(q_lens), lens=tuple(seen), heads=17)
    host = sparse_mla_host(case, rng)
    given = arguments(case, host, (case.tokens,))
    sums = on_cuda(np.array([0, *accumulate(q_lens)], np.int32))
    lengths = on_cuda(np.array(seq_lens, np.int32))
    result = trtllm_batch_decode_with_kv_cache_mla(**given, seq_lens=lengths, cum_seq_lens_q=sums, max_q_len=max_q_len)
    assert_right(case, host, result)
