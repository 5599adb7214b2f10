"""flash-attention's functions and FlashInfer's context operators on a GPU, against float64; captured and traced."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu
from cubin_runtime.compat import flash_attn, flashinfer  # noqa: E402
from tests.gpu.flash_attn_cases import (  # noqa: E402  (they need torch)
    CACHED,
    CASES,
    EVEN,
    FlashCase,
    assert_near,
    case_values,
    expected,
    paged,
    sums_of,
)
from tests.gpu.flash_attn_runs import (  # noqa: E402
    LSE_TOLERANCE,
    OUT_TOLERANCE,
    check_cache,
    check_even,
    check_ragged,
    check_ragged_over_pages,
    check_unpaged_cache,
)

# What FlashInfer's context operators have; sinks there are float32.
WITH_PEERS_OPTIONS = {name: case for name, case in CASES.items() if set(case.options) <= {"causal"} or name == "window"}


@pytest.mark.parametrize("name", CASES)
def test_ragged(name: str) -> None:
    check_ragged(CASES[name], "cuda")


@pytest.mark.parametrize("name", EVEN)
def test_requests_of_one_size(name: str) -> None:
    check_even(EVEN[name], "cuda")


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("name", CASES)
def test_ragged_over_pages(name: str, page_size: int) -> None:
    check_ragged_over_pages(replace(CASES[name], page_size=page_size), "cuda")


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_cache(name: str, lse: bool) -> None:
    check_cache(CACHED[name], "cuda", lse=lse)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_unpaged_cache(name: str, chosen: bool) -> None:
    rows = (3, 0, 2)[: len(CACHED[name].q_lens)] if chosen else None
    check_unpaged_cache(CACHED[name], "cuda", rows)


def _context(case: FlashCase, values: dict[str, Any], ragged: bool, **more: Any) -> tuple[Any, Any]:
    """One of FlashInfer's two; log-sum-exp ``[heads, tokens]`` in base e."""
    device, options = "cuda", case.options
    pages = paged(case, values, device)
    common = {
        "workspace_buffer": torch.full((1 << 20,), 255, dtype=torch.uint8, device=device),
        "seq_lens": torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        "max_q_len": max(case.q_lens),
        "max_kv_len": max(case.kv_lens),
        "bmm1_scale": 1 / math.sqrt(case.head_dim),
        "bmm2_scale": 1.0,
        "batch_size": len(case.q_lens),
        "window_left": options.get("window_size", (-1, -1))[0],
        "cum_seq_lens_q": sums_of(case.q_lens, device),
        "cum_seq_lens_kv": sums_of(case.kv_lens, device),
        "return_lse": True,
        **more,
    }
    if ragged:
        out, lse = flashinfer.trtllm_ragged_attention_deepseek(
            values["q"],
            torch.cat(values["k"]),
            torch.cat(values["v"]),
            o_sf_scale=-1.0,
            enable_pdl=True,
            is_causal=options.get("causal", False),
            **common,
        )
    else:
        out, lse = flashinfer.trtllm_batch_context_with_kv_cache(
            values["q"],
            (pages["k_cache"], pages["v_cache"]),
            block_tables=pages["block_table"],
            kv_layout="NHD",
            causal=options.get("causal", False),
            **common,
        )
    return out, lse.T * math.log(2)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", WITH_PEERS_OPTIONS)
def test_the_context_operators_of_flashinfer(name: str, ragged: bool) -> None:
    case = WITH_PEERS_OPTIONS[name]
    values = case_values(case, "cuda")
    out, lse = _context(case, values, ragged)
    wanted, logs = expected(case, values)
    assert_near(out, wanted, OUT_TOLERANCE)
    assert_near(lse, logs, LSE_TOLERANCE)


@pytest.mark.parametrize("scale", [0.2, None], ids=["number", "on the device"])
def test_scales_of_the_context_operators(scale: float | None) -> None:
    case = FlashCase((5, 1), (40, 33), {"causal": True, "softmax_scale": 0.2})
    values = case_values(case, "cuda")
    given = scale if scale is not None else torch.tensor([0.2], device="cuda")
    out, _ = _context(case, values, False, bmm1_scale=given, bmm2_scale=0.5)
    assert_near(out * 2, expected(case, values)[0], OUT_TOLERANCE)


def test_two_graphs_captured_on_one_stream_replay_with_other_lengths() -> None:
    case = CACHED["appended"]
    values = case_values(case, "cuda")
    pages = paged(case, values, "cuda")
    q = values["q"].view(2, 1, case.heads, case.head_dim)
    new = {name: torch.stack([part[-1:] for part in values[name]]) for name in ("k", "v")}
    given = {**pages, **new, "causal": True}
    flash_attn.flash_attn_with_kvcache(q, **given, return_softmax_lse=True)  # loads the kernels
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(flash_attn.flash_attn_with_kvcache(q, **given, return_softmax_lse=True))
        graphs.append(graph)
    for change in (0, -8):
        pages["cache_seqlens"].add_(change)
        wanted = flash_attn.flash_attn_with_kvcache(q, **given, return_softmax_lse=True)
        for graph, (out, lse) in zip(graphs, outs, strict=True):
            out.zero_()
            graph.replay()
            assert torch.equal(out, wanted[0])
            assert torch.equal(lse, wanted[1])


def test_compiled_calls_give_the_same_bits() -> None:
    case = CASES["causal"]
    values = case_values(case, "cuda")
    k, v = torch.cat(values["k"]), torch.cat(values["v"])
    sums, kv_sums = sums_of(case.q_lens, "cuda"), sums_of(case.kv_lens, "cuda")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flash_attn.flash_attn_varlen_func(q, k, v, sums, kv_sums, 9, 40, causal=True, return_attn_probs=True)[:2]

    eager, compiled = attend(values["q"], k, v), torch.compile(attend, fullgraph=True)(values["q"], k, v)
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


E4M3, INT32 = torch.float8_e4m3fn, torch.int32


def random_pages(kv_heads: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    """K and V in 20 pages of 64 tokens, of numbers that e4m3 has."""
    k, v = (torch.randn(20, 64, kv_heads, dim, device="cuda").to(E4M3).to(dtype) for _ in range(2))
    return k, v


@pytest.mark.parametrize("over_pages", [False, True])
@pytest.mark.parametrize("descaled", [False, True])
def test_query_tokens_that_are_not_used(over_pages: bool, descaled: bool) -> None:
    begins, used, lengths = [0, 100, 103, 180], [60, 3, 0], [200, 70, 320]
    q = torch.randn(180, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = random_pages(2, 128, E4M3 if descaled else q.dtype)
    table = torch.randperm(20, device="cuda", dtype=INT32)[:15].view(3, 5)
    scales = {}
    if descaled:
        scales = {f"{name}_descale": torch.rand(3, 2, device="cuda") + 0.5 for name in "kv"}
    keys = torch.tensor(lengths, dtype=INT32, device="cuda")
    ragged = (k.flatten(0, 1)[:590], v.flatten(0, 1)[:590])
    where: dict[str, Any] = {"cu_seqlens_k": sums_of(lengths, "cuda")}
    if over_pages:
        where = {"cu_seqlens_k": None, "block_table": table, "seqused_k": keys}
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q,
        *((k, v) if over_pages else ragged),
        cu_seqlens_q=torch.tensor(begins, dtype=INT32, device="cuda"),
        max_seqlen_q=100,
        max_seqlen_k=320,
        seqused_q=torch.tensor(used, dtype=INT32, device="cuda"),
        causal=True,
        return_attn_probs=True,
        **where,
        **scales,
    )
    for request, count in enumerate(used):
        first, start = begins[request], sum(lengths[:request])
        part = slice(start, start + lengths[request])
        own: dict[str, Any] = {"cu_seqlens_k": sums_of(lengths[request : request + 1], "cuda")}
        if over_pages:
            own |= {"block_table": table[request : request + 1], "seqused_k": keys[request : request + 1]}
        if count:
            alone, logs, _ = flash_attn.flash_attn_varlen_func(
                q[first : first + count],
                *((k, v) if over_pages else (ragged[0][part], ragged[1][part])),
                cu_seqlens_q=sums_of([count], "cuda"),
                max_seqlen_q=count,
                max_seqlen_k=320,
                causal=True,
                return_attn_probs=True,
                **own,
                **{name: scale[request : request + 1] for name, scale in scales.items()},
            )
            assert torch.equal(out[first : first + count], alone)
            assert torch.equal(lse[:, first : first + count], logs)
        assert not out[first + count : begins[request + 1]].any()


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("descaled", [False, True])
def test_rows_of_a_block_table_are_chosen(q_len: int, descaled: bool) -> None:
    k, v = random_pages(2, 128, E4M3 if descaled else torch.bfloat16)
    table = torch.randperm(20, device="cuda", dtype=INT32).view(5, 4)
    rows = torch.tensor([3, 0, 4], dtype=INT32, device="cuda")
    lengths = torch.tensor([200, 41, 256], dtype=INT32, device="cuda")
    q = torch.randn(3, q_len, 8, 128, device="cuda", dtype=torch.bfloat16)
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "rotary_seqlens": lengths}
    if descaled:
        given |= {f"{name}_descale": torch.rand(3, 2, device="cuda") + 0.5 for name in "kv"}
    out = flash_attn.flash_attn_with_kvcache(q, k, v, block_table=table, cache_batch_idx=rows, **given)
    assert torch.equal(out, flash_attn.flash_attn_with_kvcache(q, k, v, block_table=table[rows], **given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 4, 70])
def test_descales_of_requests_and_heads(dtype: Any, dim: int, q_len: int) -> None:
    k, v = random_pages(2, dim, E4M3)
    table = torch.randperm(20, device="cuda", dtype=INT32).view(5, 4)
    q = torch.randn(5, q_len, 8, dim, device="cuda", dtype=dtype)
    lengths = torch.tensor([200, 71, 256, 100, 90], dtype=INT32, device="cuda")
    scales = torch.rand(2, 5, 4, device="cuda")[..., ::2] + 0.5
    more = {"k_descale": scales[0], "v_descale": scales[1], "causal": True}
    out = flash_attn.flash_attn_with_kvcache(q, k, v, block_table=table, cache_seqlens=lengths, **more)
    for request, length in enumerate(lengths.tolist()):
        keys, values = (
            (side[table[request].long()].flatten(0, 1)[:length].double() * by[request][:, None].double())
            .repeat_interleave(4, dim=1)
            .transpose(0, 1)
            for side, by in zip((k, v), scales, strict=True)
        )
        scores = q[request].double().transpose(0, 1) @ keys.transpose(1, 2) / dim**0.5
        behind = torch.arange(length, device="cuda") > torch.arange(q_len, device="cuda")[:, None] + length - q_len
        weights = scores.masked_fill(behind, -math.inf).softmax(-1)
        assert_near(out[request], (weights @ values).transpose(0, 1).cpu(), OUT_TOLERANCE)
