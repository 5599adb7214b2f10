"""The cases through flash-attention's functions, on tensors of any device."""

from __future__ import annotations

from typing import Any

import torch

from cubin_runtime.compat import flash_attn
from tests.gpu.flash_attn_cases import FlashCase, appended, assert_near, case_values, expected, paged, sums_of

OUT_TOLERANCE, LSE_TOLERANCE = 0.02, 2e-3


def check_ragged(case: FlashCase, device: str) -> None:
    values = case_values(case, device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        values["q"],
        torch.cat(values["k"]),
        torch.cat(values["v"]),
        sums_of(case.q_lens, device),
        sums_of(case.kv_lens, device),
        max(case.q_lens),
        max(case.kv_lens),
        s_aux=values["s_aux"],
        return_attn_probs=True,
        **case.options,
    )
    _check(case, values, out, lse)


def check_even(case: FlashCase, device: str) -> None:
    """Requests of one size, their keys by head, as transformers has them."""
    values = case_values(case, device)
    q = values["q"].view(len(case.q_lens), -1, case.heads, case.head_dim)
    k, v = (torch.stack(values[name]).transpose(1, 2).contiguous().transpose(1, 2) for name in ("k", "v"))
    out = flash_attn.flash_attn_func(q, k, v, s_aux=values["s_aux"], **case.options)
    _check(case, values, out.reshape(values["q"].shape), None)


def check_ragged_over_pages(case: FlashCase, device: str) -> None:
    values = case_values(case, device)
    pages = paged(case, values, device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        values["q"],
        pages["k_cache"],
        pages["v_cache"],
        sums_of(case.q_lens, device),
        sums_of(case.kv_lens, device),
        max(case.q_lens),
        max(case.kv_lens),
        block_table=pages["block_table"],
        s_aux=values["s_aux"],
        return_attn_probs=True,
        **case.options,
    )
    _check(case, values, out, lse)


def check_cache(case: FlashCase, device: str, *, lse: bool) -> None:
    """Over pages; the queries are of one size."""
    values = case_values(case, device)
    q = values["q"].view(len(case.q_lens), -1, case.heads, case.head_dim)
    new = appended(case, values) if case.new else {}
    given = {**paged(case, values, device), **new, **case.options, "s_aux": values["s_aux"]}
    came = flash_attn.flash_attn_with_kvcache(q, **given, return_softmax_lse=lse)
    out, logs = came if lse else (came, None)
    _check(case, values, out.reshape(values["q"].shape), None if logs is None else _by_head(logs))


def check_unpaged_cache(case: FlashCase, device: str, chosen: tuple[int, ...] | None) -> None:
    """Over a cache of 48 tokens of each request; ``chosen`` says which of its requests each one is."""
    values = case_values(case, device)
    q = values["q"].view(len(case.q_lens), -1, case.heads, case.head_dim)
    rows = chosen or tuple(range(len(case.q_lens)))
    caches = {}
    for name in ("k", "v"):
        cache = torch.full((max(rows) + 1, 48, case.kv_heads, case.head_dim), float("nan"), dtype=q.dtype)
        for request, row in enumerate(rows):
            part = values[name][request][: case.kv_lens[request] - case.new]
            cache[row, : len(part)] = part.cpu()
        caches[f"{name}_cache"] = cache.to(device)
    lengths = torch.tensor([length - case.new for length in case.kv_lens], dtype=torch.int32, device=device)
    new = appended(case, values) if case.new else {}
    index = None if chosen is None else torch.tensor(chosen, dtype=torch.int32, device=device)
    more = {**caches, **new, **case.options, "s_aux": values["s_aux"]}
    out = flash_attn.flash_attn_with_kvcache(q, cache_seqlens=lengths, cache_batch_idx=index, **more)
    _check(case, values, out.reshape(values["q"].shape), None)


def _by_head(lse: Any) -> Any:
    """``[batch, heads, q_len]`` as ``[heads, tokens]``."""
    return lse.transpose(0, 1).reshape(lse.shape[1], -1)


def _check(case: FlashCase, values: dict[str, Any], out: Any, lse: Any) -> None:
    wanted, logs = expected(case, values)
    assert_near(out, wanted, OUT_TOLERANCE)
    if lse is not None:
        assert_near(lse, logs, LSE_TOLERANCE)
