"""Cases of flash-attention's functions: tensors by torch on any device, and what must come of them in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

BF16 = torch.bfloat16
POISON = float("nan")


@dataclass(frozen=True)
class FlashCase:
    """Requests of ``q_lens`` query tokens over ``kv_lens`` keys; ``new`` of each are appended by the call."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    new: int = 0
    sinks: bool = False


def case_values(case: FlashCase, device: str) -> dict[str, Any]:
    """Queries, and keys and values of each request, by a fixed seed."""
    torch.manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float32).to(BF16).to(device)  # noqa: E731
    row = (case.kv_heads, case.head_dim)
    return {
        "q": draw(sum(case.q_lens), case.heads, case.head_dim),
        "k": [draw(length, *row) for length in case.kv_lens],
        "v": [draw(length, *row) for length in case.kv_lens],
        "s_aux": draw(case.heads) if case.sinks else None,
    }


def sums_of(lengths: tuple[int, ...], device: str) -> Any:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=device)


def paged(case: FlashCase, values: dict[str, Any], device: str) -> dict[str, Any]:
    """Keys and values in pages of a permuted pool that is otherwise NaN, the table, lengths without the new tokens."""
    size, lengths = case.page_size, case.kv_lens
    columns = max(1, -(-max(lengths) // size)) + 1
    order = torch.randperm(columns * len(lengths), dtype=torch.int32)
    table = order.view(len(lengths), columns)
    pools = []
    for name in ("k", "v"):
        pool = torch.full((order.numel(), size, case.kv_heads, case.head_dim), POISON, dtype=BF16)
        for request, length in enumerate(lengths):
            for token in range(length - case.new):
                pool[int(table[request, token // size]), token % size] = values[name][request][token].cpu()
        pools.append(pool.to(device))
    kept = torch.tensor([length - case.new for length in lengths], dtype=torch.int32, device=device)
    return {"k_cache": pools[0], "v_cache": pools[1], "block_table": table.to(device), "cache_seqlens": kept}


def appended(case: FlashCase, values: dict[str, Any]) -> dict[str, Any]:
    """The new tokens, the last of each request."""
    return {name: torch.stack([part[part.shape[0] - case.new :] for part in values[name]]) for name in ("k", "v")}


def expected(case: FlashCase, values: dict[str, Any]) -> tuple[Any, Any]:
    """Output ``[tokens, heads, head_dim]`` and log-sum-exp ``[heads, tokens]``, one row after another in float64."""
    options = {"causal": False, "window_size": (-1, -1), "softcap": 0.0, **case.options}
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    group, scale = case.heads // case.kv_heads, options.get("softmax_scale") or 1 / math.sqrt(case.head_dim)
    out = torch.zeros(sum(case.q_lens), case.heads, case.head_dim, dtype=torch.float64)
    lse = torch.full((case.heads, sum(case.q_lens)), -math.inf, dtype=torch.float64)
    row = 0
    for q_len, kv_len, keys, heads_values in zip(case.q_lens, case.kv_lens, values["k"], values["v"], strict=True):
        for token in range(q_len):
            own = kv_len - q_len + token
            first = 0 if left < 0 else max(0, own - left)
            last = kv_len if right < 0 else min(kv_len, own + right + 1)
            for head in range(case.heads):
                query = values["q"][row, head].double().cpu()
                scores = keys[first : max(first, last), head // group].double().cpu() @ query * scale
                if options["softcap"]:
                    scores = options["softcap"] * torch.tanh(scores / options["softcap"])
                sink = [] if values["s_aux"] is None else [values["s_aux"][head].double().cpu().view(1)]
                total = torch.logsumexp(torch.cat([scores, *sink]), 0) if len(scores) or sink else lse[head, row]
                lse[head, row] = total
                if len(scores):
                    weights = torch.exp(scores - total)
                    out[row, head] = weights @ heads_values[first:last, head // group].double().cpu()
            row += 1
    return out, lse


def assert_near(came: Any, wanted: Any, tolerance: float) -> None:
    """Every element is within ``tolerance``, absolute and relative; infinities are the same."""
    torch.testing.assert_close(came.double().cpu(), wanted, atol=tolerance, rtol=tolerance)


CASES = {
    "causal": FlashCase((5, 1, 0, 9), (40, 33, 7, 9), {"causal": True}),
    "not causal": FlashCase((5, 1, 3), (40, 0, 20)),
    "more queries than keys": FlashCase((9, 4), (3, 4), {"causal": True}),
    "window": FlashCase((20, 1), (60, 33), {"causal": True, "window_size": (7, 0)}),
    "window to both sides": FlashCase((20, 3), (60, 33), {"window_size": (7, 2)}),
    "sinks, softcap and scale": FlashCase((5, 1), (40, 33), {"softcap": 2.0, "softmax_scale": 0.2}, sinks=True),
    "head 64": FlashCase((5, 1), (40, 33), {"causal": True}, head_dim=64, heads=6),
}
# Requests of one size.
EVEN = {
    "few keys": FlashCase((3, 3), (40, 40), {"causal": True}),
    "a token over many keys": FlashCase((1, 1), (2051, 2051)),
    "a token with window and sinks": FlashCase((1, 1), (2500, 2500), {"window_size": (900, 0)}, sinks=True),
    "drafts over many keys": FlashCase((8, 8), (2100, 2100), {"causal": True}, head_dim=64),
    "a chunk over many keys": FlashCase((9, 9), (2100, 2100), {"causal": True}),
}
CACHED = {
    "one token": FlashCase((1, 1, 1), (40, 33, 1), {"causal": True}),
    "one token, sinks and window": FlashCase((1, 1), (40, 33), {"window_size": (9, 4)}, sinks=True),
    "drafts": FlashCase((4, 4), (40, 33), {"causal": True}),
    "drafts without causality": FlashCase((4, 4), (40, 33)),
    "a chunk": FlashCase((20, 20), (40, 33), {"causal": True}),
    "appended": FlashCase((1, 1), (40, 33), {"causal": True}, new=1),
    "appended chunk": FlashCase((20, 20), (40, 20), {"causal": True}, new=20),
    "appended beyond the queries": FlashCase((2, 2), (40, 33), {"causal": True}, new=5),
}
