"""XQA's names on torch tensors: against float64, and against the peer where it is installed, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat import flashinfer as ours
from tests.gpu.decode_cases import DecodeCase, make_host, reference_of
from tests.gpu.decode_compare import assert_close
from tests.gpu.decode_values import values_of

torch = pytest.importorskip("torch", reason="torch is not installed")
from tests.gpu.torch_cases import OnTorch, bits_of_tensor, on_torch  # noqa: E402  (it needs torch)

pytestmark = pytest.mark.gpu

WORKSPACE_BYTES = 256 << 20
SEMAPHORE_BYTES = 8 << 20
PLAIN = DecodeCase((300, 17, 1, 512), 512, kv_heads=4, combined=False)
# What the peer runs on Hopper too: a mask with every draft, chains where it has no other.
CASES = {
    "bf16": PLAIN,
    "bf16 in one cache": replace(PLAIN, combined=True),
    "fp16 in HND": replace(PLAIN, kv_dtype="fp16", group=4, kv_layout="HND", page_size=16),
    "drafts with a chain": replace(PLAIN, lengths=(300, 17, 9, 512), q_len=4, mask="chain"),
    "drafts with a tree": replace(PLAIN, lengths=(300, 17, 9, 512), q_len=4, mask="tree"),
    "fp8 caches": replace(PLAIN, kv_dtype="e4m3", q_dtype="bf16", scale=0.5 / 128**0.5, output_scale=0.5),
    "fp8 caches and drafts": replace(
        PLAIN, lengths=(300, 17, 9, 512), kv_dtype="e4m3", q_dtype="bf16", q_len=4, mask="chain"
    ),
    "sinks": replace(PLAIN, sinks=True),
    "a window": replace(PLAIN, window_left=100),
    "head 64": replace(PLAIN, head_dim=64, sinks=True, window_left=127),
}
# What the peer has no kernel for.
OURS_ALONE = {
    "drafts, tree and sinks": replace(PLAIN, lengths=(300, 17, 9, 512), q_len=4, mask="tree", sinks=True),
    "drafts, chain, sinks and window": replace(
        PLAIN, lengths=(300, 17, 9, 512), q_len=4, mask="chain", sinks=True, window_left=60
    ),
    "fp8 with all of it": replace(
        PLAIN,
        lengths=(300, 17, 9, 512),
        q_len=7,
        mask="chain",
        sinks=True,
        window_left=60,
        kv_dtype="e4m3",
        q_dtype="fp16",
    ),
    "fp8 queries, page 256": replace(PLAIN, kv_dtype="e4m3", page_size=256, group=32),
    "head 512": replace(PLAIN, head_dim=512, group=3, kv_heads=5),
    "pages of 1024": replace(PLAIN, page_size=1024, combined=True),
    "any mask in a window": replace(
        PLAIN, lengths=(300, 17, 9, 512), q_len=6, mask="any", window_left=60, draft_position="index"
    ),
    "invariant": replace(PLAIN, batch_invariant=True, lengths=(300, 0, 1, 512)),
}


def run_xqa(package: Any, on: OnTorch, **more: Any) -> Any:
    """``xqa``: a beam of one, lengths of two dimensions, scales apart."""
    case = on.case
    shape = (case.batch, 1, *((case.q_len,) if case.q_len > 1 else ()), case.q_heads, case.head_dim)
    package.xqa(
        on.q.view(shape),
        on.k,
        on.v,
        on.table,
        on.lens.view(torch.uint32).view(case.batch, 1),
        on.out.view(shape),
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8, device="cuda"),
        case.kv_heads,
        case.page_size,
        sinks=None if on.sinks is None else on.sinks.view(case.kv_heads, case.group),
        q_scale=case.softmax_scale * case.head_dim**0.5 / case.output_scale,
        kv_scale=case.output_scale,
        sliding_win_size=case.window_left + 1,
        kv_layout=case.kv_layout,
        q_seq_len=case.q_len,
        mask=on.mask,
        **more,
    )
    return on.out


def run_xqa_batch_decode(package: Any, on: OnTorch, **more: Any) -> Any:
    return batch_decode(package.xqa_batch_decode_with_kv_cache, on, **more)


def run_trtllm_batch_decode(package: Any, on: OnTorch, **more: Any) -> Any:
    return batch_decode(package.trtllm_batch_decode_with_kv_cache, on, backend="xqa", **more)


def run_trtllm_auto(package: Any, on: OnTorch, **more: Any) -> Any:
    return batch_decode(package.trtllm_batch_decode_with_kv_cache, on, **more)


def batch_decode(operator: Callable[..., Any], on: OnTorch, **more: Any) -> Any:
    """The operators that take all tokens in a row."""
    case = on.case
    return operator(
        on.q,
        on.combined,
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        on.table,
        on.lens,
        case.max_seq_len,
        bmm1_scale=case.softmax_scale,
        bmm2_scale=case.output_scale,
        window_left=case.window_left,
        sinks=on.sinks,
        kv_layout=case.kv_layout,
        q_len_per_req=case.q_len,
        mask=on.mask,
        **more,
    )


OPERATORS = {
    "xqa": run_xqa,
    "xqa_batch_decode": run_xqa_batch_decode,
    "trtllm_batch_decode": run_trtllm_batch_decode,
    "trtllm_batch_decode, auto": run_trtllm_auto,
}


@pytest.fixture(autouse=True)
def elsewhere(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    if runtime.driver.device(0).capability[0] != 9:
        pytest.skip("our measured kernels are for compute capability 9.0")
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)


@pytest.fixture(scope="module")
def peer() -> Any:
    """The peer's operators under the names that ours have."""
    decode = pytest.importorskip("flashinfer.decode", reason="flashinfer is not installed, so there is no peer here")
    from flashinfer.xqa import xqa

    return SimpleNamespace(
        xqa=xqa,
        xqa_batch_decode_with_kv_cache=decode.xqa_batch_decode_with_kv_cache,
        trtllm_batch_decode_with_kv_cache=decode.trtllm_batch_decode_with_kv_cache,
    )


@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("name", [*CASES, *OURS_ALONE])
def test_our_operators_match_float64(runtime: Runtime, rng: np.random.Generator, name: str, operator: str) -> None:
    case = {**CASES, **OURS_ALONE}[name]
    if case.q_type == "e4m3":
        case = replace(case, out_dtype="e4m3")  # as the peer: the dtype of the queries
    host = make_host(case, rng)
    more = {"batch_invariant": True} if case.batch_invariant else {}
    out = OPERATORS[operator](ours, on_torch(case, host, clean=False), **more)
    torch.cuda.synchronize()
    assert_close(case, (bits_of_tensor(case, out), None), reference_of(case, host))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("operator", ["xqa", "xqa_batch_decode", "trtllm_batch_decode"])
@pytest.mark.parametrize("name", list(CASES))
def test_our_operators_agree_with_the_peer(
    runtime: Runtime, rng: np.random.Generator, peer: Any, name: str, operator: str
) -> None:
    case = CASES[name]
    if operator == "xqa" and case.combined:
        pytest.skip("the peer's xqa takes whole caches")
    host = make_host(case, rng)
    results = []
    for package in (ours, peer):
        out = OPERATORS[operator](package, on_torch(case, host, clean=True))
        torch.cuda.synchronize()
        results.append(values_of(case.out_type, bits_of_tensor(case, out)).astype(np.float64))
    want, _ = reference_of(case, host)
    mine, theirs = (np.linalg.norm(result - want) / np.linalg.norm(want) for result in results)
    print(f"relative error: ours {mine:.2e}, the peer's {theirs:.2e}")
    apart = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(want)
    # The peer keeps its partials, and with fp8 caches its probabilities, in fewer bits.
    assert apart <= (6e-2 if case.kv_dtype == "e4m3" else 1.2e-2), f"{apart:.2e} apart"


def test_ragged_queries_match_float64(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(
        PLAIN, lengths=(300, 17, 9, 512), q_lens=(3, 0, 7, 1), max_q_len=8, mask="chain", sinks=True, window_left=90
    )
    host = make_host(case, rng)
    on = on_torch(case, host, clean=False)
    sums = torch.from_numpy(host.q_cu_seq_lens).cuda()
    out = ours.xqa_batch_decode_with_kv_cache(
        on.q,
        on.combined,
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        on.table,
        on.lens,
        case.max_seq_len,
        bmm1_scale=case.softmax_scale,
        window_left=case.window_left,
        sinks=on.sinks,
        q_len_per_req=case.q_bound,
        mask=on.mask,
        q_cu_seq_lens=sums,
    )
    torch.cuda.synchronize()
    assert_close(case, (bits_of_tensor(case, out), None), reference_of(case, host))


@pytest.mark.parametrize("q_len", [1, 5])
def test_values_have_pages_of_their_own(runtime: Runtime, rng: np.random.Generator, q_len: int) -> None:
    case = replace(PLAIN, combined=True, separate=True, q_len=q_len, window_left=200, kv_layout="HND")
    host = make_host(case, rng)
    out = run_trtllm_auto(ours, on_torch(case, host, clean=False), uses_shared_paged_kv_idx=False)
    torch.cuda.synchronize()
    assert_close(case, (bits_of_tensor(case, out), None), reference_of(case, host))


def test_a_log_sum_exp_comes_with_the_output(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(PLAIN, lengths=(300, 17, 9, 512), q_len=4, mask="tree", sinks=True)
    host = make_host(case, rng)
    out, lse = run_trtllm_batch_decode(ours, on_torch(case, host, clean=False), return_lse=True)
    torch.cuda.synchronize()
    assert_close(case, (bits_of_tensor(case, out), lse.cpu().numpy()), reference_of(case, host))


def test_a_workspace_serves_again_and_again(runtime: Runtime, rng: np.random.Generator) -> None:
    case = replace(PLAIN, lengths=(4000, 17, 9, 512), max_seq_len=4096)
    host = make_host(case, rng)
    on = on_torch(case, host, clean=False)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    workspace[SEMAPHORE_BYTES:] = 0xFF
    for _ in range(20):
        out = ours.xqa_batch_decode_with_kv_cache(
            on.q, on.combined, workspace, on.table, on.lens, case.max_seq_len, bmm1_scale=case.softmax_scale
        )
    torch.cuda.synchronize()
    assert not workspace[:SEMAPHORE_BYTES].any()
    assert_close(case, (bits_of_tensor(case, out), None), reference_of(case, host))
