"""The plain function on torch tensors: its own output and stream, and replays of a captured graph."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cubin_runtime.attention import Runtime, paged_decode

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, COLUMNS = 4, 64, 8, 128, 64, 10


@pytest.fixture
def tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    pages = BATCH * COLUMNS
    return {
        "q": torch.randn(BATCH, Q_HEADS, HEAD_DIM, **options),
        "k_cache": torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, **options),
        "v_cache": torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, **options),
        "page_table": torch.randperm(pages, device="cuda", dtype=torch.int32).view(BATCH, COLUMNS),
        "seq_lens": torch.tensor([1, 640, 300, 0], device="cuda", dtype=torch.int32),
    }


def reference(tensors: dict[str, Any]) -> Any:
    group = Q_HEADS // KV_HEADS
    out = torch.zeros(BATCH, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.float64)
    for b, length in enumerate(tensors["seq_lens"].tolist()):
        if length == 0:
            continue
        pages = tensors["page_table"][b].long()
        k, v = (tensors[n][pages].reshape(-1, KV_HEADS, HEAD_DIM)[:length].double() for n in ("k_cache", "v_cache"))
        q = tensors["q"][b].double().view(KV_HEADS, group, HEAD_DIM)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) / math.sqrt(HEAD_DIM), -1)
        out[b] = torch.einsum("hgn,nhd->hgd", weights, v).reshape(Q_HEADS, HEAD_DIM)
    return out


def error_of(got: Any, tensors: dict[str, Any]) -> float:
    want = reference(tensors)
    return float((got.double() - want).norm() / want.norm())


def test_an_output_is_made_where_none_is_given(runtime: Runtime, tensors: dict[str, Any]) -> None:
    lse = torch.empty(BATCH, Q_HEADS, device="cuda")
    out = paged_decode(**tensors, max_seq_len=640, lse=lse, runtime=runtime)
    assert error_of(out, tensors) < 6e-3
    assert torch.isneginf(lse[3]).all()


def test_torch_s_current_stream_is_taken(runtime: Runtime, tensors: dict[str, Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = paged_decode(**tensors, max_seq_len=640, runtime=runtime)
    stream.synchronize()
    assert error_of(out, tensors) < 6e-3


def test_a_captured_graph_follows_the_lengths(runtime: Runtime, tensors: dict[str, Any]) -> None:
    stream, graph, out = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.empty_like(tensors["q"])
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        paged_decode(**tensors, max_seq_len=640, out=out, runtime=runtime)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        paged_decode(**tensors, max_seq_len=640, out=out, runtime=runtime)
    tensors["seq_lens"].copy_(torch.tensor([5, 64, 65, 639], dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert error_of(out, tensors) < 6e-3
