"""The plain function on torch tensors with every option: dtypes, drafts, masks, sums read back, scales, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, paged_decode
from cubin_runtime.errors import UsageError
from tests.gpu.decode_cases import DecodeCase, HostTensors, make_host, reference_of
from tests.gpu.decode_compare import assert_close

torch = pytest.importorskip("torch", reason="torch is not installed")
from tests.gpu.torch_cases import bits_of_tensor, on_torch  # noqa: E402  (it needs torch)

pytestmark = pytest.mark.gpu

PLAIN = DecodeCase((300, 17, 0, 512), 512, kv_heads=4)
CASES = {
    "bf16": PLAIN,
    "drafts": replace(PLAIN, q_len=5, mask="tree", sinks=True, window_left=60),
    "fp8 caches": replace(PLAIN, kv_dtype="e4m3", q_dtype="bf16", q_len=2),
    "fp8 queries": replace(PLAIN, kv_dtype="e4m3", q_len=3, mask="any"),
    "fp16, head 256": replace(PLAIN, kv_dtype="fp16", head_dim=256, kv_layout="HND"),
    "ragged": replace(PLAIN, q_lens=(3, 0, 1, 7), mask="any", sinks=True),
    "invariant": replace(PLAIN, q_lens=(3, 0, 1, 7), batch_invariant=True),
}


def arguments(case: DecodeCase, host: HostTensors) -> dict[str, Any]:
    """A call of ``paged_decode`` that makes its own output."""
    on = on_torch(case, host, clean=False)
    return {
        "q": on.q.view(case.q_shape),
        "k_cache": on.k,
        "v_cache": on.v,
        "page_table": on.table,
        "seq_lens": on.lens,
        "max_seq_len": case.max_seq_len,
        "kv_layout": case.kv_layout,
        "q_cu_seq_lens": None if host.q_cu_seq_lens is None else torch.from_numpy(host.q_cu_seq_lens).cuda(),
        "mask": on.mask,
        "sinks": on.sinks,
        "window_left": case.window_left,
        "draft_position": case.draft_position,
        "batch_invariant": case.batch_invariant,
    }


@pytest.mark.parametrize("name", list(CASES))
def test_an_output_is_made_of_the_queries_dtype(runtime: Runtime, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    host = make_host(case, rng)
    lse = torch.full(case.q_shape[:-1], float("nan"), device="cuda")
    out = paged_decode(**arguments(case, host), lse=lse, runtime=runtime)
    torch.cuda.synchronize()
    assert out.shape == case.q_shape
    got = bits_of_tensor(case, out), lse.cpu().numpy().reshape(case.tokens, case.q_heads)
    assert_close(case, got, reference_of(case, host))


def test_scales_may_be_tensors(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(CASES["drafts"], scale=0.2, output_scale=1.5)
    host = make_host(case, rng)
    scales = {"softmax_scale": torch.tensor([0.2], device="cuda"), "output_scale": torch.tensor(1.5, device="cuda")}
    out = paged_decode(**arguments(case, host), **scales, runtime=runtime)
    torch.cuda.synchronize()
    assert_close(case, (bits_of_tensor(case, out), None), reference_of(case, host))


@pytest.mark.parametrize("sums", [[0, 3, 2, 4, 11], [1, 3, 3, 4, 11], [0, 3, 3, 4, 10]])
def test_sums_that_are_read_back_are_checked(runtime: Runtime, rng: np.random.Generator, sums: list[int]) -> None:
    case = CASES["ragged"]
    given = arguments(case, make_host(case, rng))
    given["q_cu_seq_lens"] = torch.tensor(sums, dtype=torch.int32, device="cuda")
    with pytest.raises(UsageError, match="q_cu_seq_lens"):
        paged_decode(**given, runtime=runtime)


@pytest.mark.parametrize("name", ["drafts", "ragged", "fp8 caches", "invariant"])
def test_a_captured_graph_replays(runtime: Runtime, rng: np.random.Generator, name: str) -> None:
    case = CASES[name]
    host = make_host(case, rng)
    given = arguments(case, host) | {"max_q_len": case.q_bound if case.q_lens is not None else None}
    given["out"] = torch.empty_like(given["q"])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        paged_decode(**given, runtime=runtime)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        paged_decode(**given, runtime=runtime)
    for _ in range(3):
        given["out"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(case, (bits_of_tensor(case, given["out"]), None), reference_of(case, host))
