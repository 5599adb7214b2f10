"""MLA under FlashInfer's names and ours on torch tensors, against float64: dense, ragged, outputs of both forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, mla_decode
from cubin_runtime.compat import flashinfer as ours
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_values import KINDS
from tests.gpu.mla_cases import MlaCase, MlaHost, mla_host, mla_reference_of

torch = pytest.importorskip("torch", reason="torch is not installed")
from tests.gpu.torch_cases import device_tensor  # noqa: E402  (it needs torch)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

WORKSPACE_BYTES = 256 << 20
SEMAPHORE_BYTES = 8 << 20
PLAIN = MlaCase((300, 17, 1, 512), 512, heads=128)
DENSE = {
    "bf16": PLAIN,
    "16 heads, 4-dimensional cache": replace(PLAIN, heads=16, nested=True, page_size=32),
    "two tokens": replace(PLAIN, heads=64, q_len=2),
    "no rope columns": replace(PLAIN, rope=0),
    "256 columns and sinks": replace(PLAIN, latent=256, heads=8, sinks=True),
    "e4m3 cache": replace(PLAIN, kv_dtype="e4m3", output_scale=0.5),
    "e4m3 queries": replace(PLAIN, kv_dtype="e4m3", q_dtype="e4m3", heads=32, page_size=128),
    "invariant": replace(PLAIN, heads=32, batch_invariant=True),
}
RAGGED = replace(PLAIN, heads=16, q_lens=(3, 0, 1, 16), max_q_len=16, sinks=True)


@pytest.fixture(autouse=True)
def default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


def tensors_of(case: MlaCase, host: MlaHost) -> dict[str, Any]:
    """The tensors by the names of the batch operators."""
    cache = device_tensor(case.kv_dtype, host.pool)
    lead = (case.tokens,) if case.q_lens is not None else (case.batch, case.q_len)
    return {
        "query": device_tensor(case.q_dtype, host.q).view(*lead, case.heads, case.width),
        "kv_cache": cache[:, None] if case.nested else cache,
        "block_tables": torch.from_numpy(host.page_table).cuda(),
        "seq_lens": torch.from_numpy(host.seq_lens).cuda(),
        "sinks": None if host.sinks is None else torch.from_numpy(host.sinks).cuda(),
    }


def batch_arguments(case: MlaCase, host: MlaHost) -> dict[str, Any]:
    return tensors_of(case, host) | {
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": case.latent,
        "qk_rope_head_dim": case.rope,
        "max_seq_len": case.max_seq_len,
        "bmm1_scale": case.scale,
        "bmm2_scale": case.output_scale,
        "batch_invariant": case.batch_invariant,
    }


def assert_right(case: MlaCase, host: MlaHost, out: Any, lse: Any = None) -> None:
    kind = KINDS[case.out_dtype]
    assert str(out.dtype) == f"torch.{kind.view}"
    bits = out.contiguous().view(torch.int16).cpu().numpy().view(kind.bits)
    found = bits.reshape(case.tokens, case.heads, case.latent)
    kept = None if lse is None else lse.cpu().numpy().reshape(case.tokens, case.heads)
    assert_close(case, (found, kept), mla_reference_of(case, host), case.of_scores)


@pytest.mark.parametrize("name", list(DENSE))
def test_the_batch_operators(runtime: Runtime, rng: np.random.Generator, name: str) -> None:
    case = DENSE[name]
    host = mla_host(case, rng)
    given = batch_arguments(case, host)
    out, lse = ours.trtllm_batch_decode_with_kv_cache_mla(**given, return_lse=True, return_lse_base="base2")
    assert out.shape == (case.batch, case.q_len, case.heads, case.latent)
    assert_right(case, host, out, lse)
    assert_right(case, host, ours.xqa_batch_decode_with_kv_cache_mla(**given))


def test_an_output_without_the_one_token(runtime: Runtime, rng: np.random.Generator) -> None:
    host = mla_host(PLAIN, rng)
    out = torch.full((PLAIN.batch, PLAIN.heads, PLAIN.latent), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert ours.xqa_batch_decode_with_kv_cache_mla(**batch_arguments(PLAIN, host), out=out) is out
    assert_right(PLAIN, host, out)


@pytest.mark.parametrize("max_q_len", [None, 16])
def test_ragged_queries(runtime: Runtime, rng: np.random.Generator, max_q_len: int | None) -> None:
    host = mla_host(RAGGED, rng)
    given = batch_arguments(RAGGED, host)
    given["cum_seq_lens_q"] = torch.from_numpy(host.q_cu_seq_lens).cuda()
    out, lse = ours.trtllm_batch_decode_with_kv_cache_mla(**given, max_q_len=max_q_len, return_lse=True)
    assert_right(RAGGED, host, out, lse / np.log(2))  # FlashInfer's kernel for ragged queries gives it in base e


SEPARATE = replace(PLAIN, kv_dtype="e4m3", q_dtype="e4m3", heads=128, separate_values=True, output_scale=0.5)


@pytest.mark.parametrize("name", ["bf16", "16 heads, 4-dimensional cache", "e4m3 cache", "values elsewhere"])
def test_the_lowest_operator(runtime: Runtime, rng: np.random.Generator, name: str) -> None:
    case = {**DENSE, "values elsewhere": SEPARATE}[name]
    host = mla_host(case, rng)
    given = tensors_of(case, host)
    values = given["kv_cache"][..., : case.latent]
    if host.value_pool is not None:
        values = device_tensor(case.kv_dtype, host.value_pool)
    out = torch.full((case.batch, 1, case.heads, case.latent), torch.nan, dtype=torch.bfloat16, device="cuda")
    ours.xqa_mla(
        given["query"],
        given["kv_cache"],
        values,
        given["block_tables"],
        given["seq_lens"].view(torch.uint32)[:, None],
        out,
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8, device="cuda"),
        case.page_size,
        q_scale=case.scale / case.output_scale,
        kv_scale=case.output_scale,
    )
    assert_right(case, host, out)


def test_the_plain_function_and_a_graph(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(PLAIN, heads=16, q_len=3)
    host = mla_host(case, rng)
    given = tensors_of(case, host)
    arguments = (given["query"], given["kv_cache"], given["block_tables"], given["seq_lens"])
    options = {"max_seq_len": case.max_seq_len, "softmax_scale": case.scale, "runtime": runtime}
    out = mla_decode(*arguments, **options)
    assert_right(case, host, out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mla_decode(*arguments, **options, out=out)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        mla_decode(*arguments, **options, out=out)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(case, host, out)
