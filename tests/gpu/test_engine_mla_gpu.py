"""Decodes of engines over a latent cache: steps of the plug-ins, and vLLM's backend class where vLLM is there."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_values import KINDS
from tests.gpu.mla_cases import MlaCase, MlaHost, mla_host, mla_reference_of

torch = pytest.importorskip("torch", reason="torch is not installed")
from cubin_runtime.integrations.latent_batch import LatentDecodes, LatentOptions, attend_latent  # noqa: E402
from tests.gpu.torch_cases import device_tensor  # noqa: E402  (it needs torch)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("mla_backend")]

LENGTHS = (300, 17, 1, 512, 64, 65)
PLAIN = MlaCase(LENGTHS, 512, heads=16)
PADDED = replace(PLAIN, lengths=(300, 17, 130, 0, 0), q_len=5)
RAGGED = replace(PLAIN, lengths=(300, 17, 9, 512), q_lens=(3, 1, 8, 2), max_q_len=8)
CASES = {
    "one token": PLAIN,
    "128 heads": replace(PLAIN, heads=128),
    "8 heads, 256 columns": replace(PLAIN, heads=8, latent=256),
    "5 tokens and padding": PADDED,
    "8 tokens, 128 heads": replace(PLAIN, lengths=(300, 40), heads=128, q_len=8),
    "tokens of different number": RAGGED,
    "tokens of different number, 128 heads": replace(RAGGED, heads=128),
    "e4m3": replace(PLAIN, kv_dtype="e4m3", q_dtype="e4m3", scale=0.05, output_scale=0.5),
    "e4m3, tokens of different number": replace(RAGGED, kv_dtype="e4m3", q_dtype="e4m3", scale=0.05),
    "e4m3 cache": replace(PLAIN, kv_dtype="e4m3", heads=128),
    "invariant": replace(PADDED, batch_invariant=True),
}


@pytest.fixture(autouse=True)
def default(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


def decodes_of(case: MlaCase, host: MlaHost) -> LatentDecodes:
    sums = None if host.q_cu_seq_lens is None else torch.from_numpy(host.q_cu_seq_lens).cuda()
    tables = torch.from_numpy(host.page_table).cuda(), torch.from_numpy(host.seq_lens).cuda()
    return LatentDecodes(*tables, sums, case.q_bound, case.max_seq_len)


def assert_right(case: MlaCase, host: MlaHost, out: Any, lse: Any = None) -> None:
    bits = out.contiguous().view(torch.int16).cpu().numpy().view(KINDS["bf16"].bits)
    kept = None if lse is None else lse.cpu().numpy()
    assert_close(case, (bits, kept), mla_reference_of(case, host), case.of_scores)


@pytest.mark.parametrize("name", list(CASES))
def test_a_step(rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    host = mla_host(case, rng)
    q, cache = device_tensor(case.q_dtype, host.q), device_tensor(case.kv_dtype, host.pool)
    out = torch.full((case.tokens, case.heads, case.latent), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full(out.shape[:2], torch.nan, device="cuda")
    options = LatentOptions(case.scale, case.output_scale, case.batch_invariant)
    attend_latent(q, cache, decodes_of(case, host), options, out, lse)
    assert_right(case, host, out, lse)


@pytest.mark.parametrize("apart", [False, True])
def test_a_captured_step_follows_its_lengths(rng: np.random.Generator, apart: bool) -> None:
    case = replace(PLAIN, lengths=(300, 130), q_len=4)
    host = mla_host(case, rng)
    q, cache, decodes = device_tensor("bf16", host.q), device_tensor("bf16", host.pool), decodes_of(case, host)
    out, options = torch.empty(8, 16, 512, dtype=torch.bfloat16, device="cuda"), LatentOptions(case.scale, 1.0, False)
    rope = None
    if apart:  # as projections give them
        q, rope = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), q[..., 512:]
    lengths = decodes.lengths.clone()
    decodes.lengths.fill_(4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend_latent(q, cache, decodes, options, out, None, rope)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attend_latent(q, cache, decodes, options, out, None, rope)
    decodes.lengths.copy_(lengths)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(case, host, out)


@pytest.fixture
def vllm_steps() -> Any:
    """The steps of ``tests/integrations``, which import vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not importable")
    from tests.integrations import vllm_mla_steps

    return vllm_mla_steps


@pytest.mark.parametrize(
    ("name", "in_chunks"),
    [
        *((name, False) for name in CASES if name not in ("e4m3 cache", "invariant")),
        *((name, True) for name in CASES if "of different number" in name or name.startswith("8 tokens")),
    ],
)
def test_the_class_of_vllm(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, vllm_steps: Any, name: str, in_chunks: bool
) -> None:
    case = CASES[name]
    host, steps = mla_host(case, rng), vllm_steps
    quantized = case.kv_dtype == "e4m3"
    scheduler = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
    config = steps.configuration(
        heads=case.heads,
        kv_lora_rank=case.latent,
        drafts=None if in_chunks else case.q_bound - 1 or None,
        cache_dtype="fp8" if quantized else "auto",
        max_model_len=case.max_seq_len,
        scheduler_config=scheduler,
    )
    backend = steps.use(monkeypatch, config)
    made = steps.layer_of(backend, config, "cuda", scale=case.scale / 2 if quantized else case.scale)
    filled = [tokens if length else 0 for tokens, length in zip(case.query_lens, case.lengths, strict=True)]
    metadata = steps.step(filled, list(case.lengths), num_actual_tokens=case.tokens)
    metadata.block_table_tensor = torch.from_numpy(host.page_table).cuda()
    metadata.seq_lens, metadata.query_start_loc = metadata.seq_lens.cuda(), metadata.query_start_loc.cuda()
    built = steps.builder(backend, config, "cuda").build(0, metadata)
    q = device_tensor(case.q_dtype, host.q)
    if not quantized:
        latent = q[..., : case.latent].transpose(0, 1).contiguous().transpose(0, 1)
        q = latent, q[..., case.latent :].contiguous()
    scales = SimpleNamespace(_k_scale_float=case.output_scale, _q_scale_float=2.0 / case.output_scale)
    out, lse = made.forward_mqa(q, device_tensor(case.kv_dtype, host.pool), built, scales)
    assert lse is None
    assert_right(case, host, out)
