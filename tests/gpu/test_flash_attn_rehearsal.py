"""The GPU tests of flash-attention's functions on the host: operators in float64 stand in for the launches."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch
from cubin_runtime.attention.context_reference import context_attention_reference  # noqa: E402
from tests.gpu.flash_attn_cases import CACHED, CASES, EVEN  # noqa: E402  (they need torch)
from tests.gpu.flash_attn_runs import (  # noqa: E402
    check_cache,
    check_even,
    check_ragged,
    check_ragged_over_pages,
    check_unpaged_cache,
)


def _numpy(tensor: Any) -> Any:
    return tensor.double().nan_to_num(1e30).numpy()


def context(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """``context_attention`` by its reference."""
    sums, table, lengths = given.get("q_cu_seq_lens"), given.get("page_table"), given.get("seq_lens")
    q_lens = [q.shape[1]] * q.shape[0] if sums is None else sums.diff().tolist()
    flat = q.reshape(-1, *q.shape[-2:])
    keys, values = k, v
    if table is not None:
        kv_lens = lengths.tolist()
    elif given.get("kv_cu_seq_lens") is not None:
        kv_lens = given["kv_cu_seq_lens"].diff().tolist()
    else:
        kv_lens = [k.shape[1]] * k.shape[0] if lengths is None else lengths.tolist()
        keys, values = (torch.cat([x[row, :n] for row, n in enumerate(kv_lens)]) for x in (k, v))
    assert max(kv_lens) <= given["max_seq_len"]
    sinks = given.get("sinks")
    out, lse = context_attention_reference(
        _numpy(flat),
        _numpy(keys),
        _numpy(values),
        q_lens,
        kv_lens,
        given["softmax_scale"] or q.shape[-1] ** -0.5,
        page_table=None if table is None else table.numpy(),
        causal=given["causal"],
        window_left=given["window_left"],
        window_right=given.get("window_right", -1),
        logit_soft_cap=given.get("logit_soft_cap", 0.0),
        sinks=None if sinks is None else sinks.numpy(),
        lse_base="e",
    )
    if given.get("lse") is not None:
        given["lse"].copy_(torch.from_numpy(lse).view(given["lse"].shape))
    return torch.from_numpy(out).view(q.shape)


def decode(q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, **given: Any) -> Any:
    """``paged_decode`` by the same: its drafts are causal."""
    assert q.shape[1] <= 16
    return context(q, k_cache, v_cache, page_table=page_table, seq_lens=seq_lens, causal=True, **given)


def append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, *, q_cu_seq_lens: Any, **given: Any
) -> None:
    """``append_kv``, token by token."""
    assert q_cu_seq_lens is None
    assert given == {"lengths_include_new": False}
    size = k_cache.shape[1]
    for request, start in enumerate(lengths.tolist()):
        for token in range(k.shape[1]):
            at = start + token
            page = int(table[request, at // size])
            k_cache[page, at % size], v_cache[page, at % size] = k[request, token], v[request, token]


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubin_runtime.compat.flash_attn.attention.context_attention", context)
    monkeypatch.setattr("cubin_runtime.compat.flash_attn.cache.paged_decode", decode)
    monkeypatch.setattr("cubin_runtime.compat.flash_attn.cache.append_kv", append)
    monkeypatch.setattr("cubin_runtime.compat.flash_attn.functions.check_before_append", lambda *_: None)  # by plans


@pytest.mark.parametrize("name", CASES)
def test_ragged(name: str) -> None:
    check_ragged(CASES[name], "cpu")


@pytest.mark.parametrize("name", EVEN)
def test_requests_of_one_size(name: str) -> None:
    check_even(EVEN[name], "cpu")


@pytest.mark.parametrize("name", CASES)
def test_ragged_over_pages(name: str) -> None:
    check_ragged_over_pages(CASES[name], "cpu")


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_cache(name: str, lse: bool) -> None:
    check_cache(CACHED[name], "cpu", lse=lse)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_unpaged_cache(name: str, chosen: bool) -> None:
    rows = (3, 0, 2)[: len(CACHED[name].q_lens)] if chosen else None
    check_unpaged_cache(CACHED[name], "cpu", rows)
