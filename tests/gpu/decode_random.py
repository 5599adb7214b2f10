"""Decode cases drawn at random: every option from its whole domain, apart from the others, so that all pairs meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.gpu.decode_cases import DecodeCase, edge_lengths
from tests.gpu.decode_masks import MASKS
from tests.gpu.kv_scales import FORMS, NUMBER

Q_DTYPES = {"bf16": ("bf16",), "fp16": ("fp16",), "e4m3": ("bf16", "fp16", "e4m3")}
HEAD_DIMS = (32, 64, 128, 256, 512)
PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
WINDOWS = (-1, -1, -1, 0, 1, 17, 64, 1000, 2**31 - 1)
SPANS = (1, 17, 64, 130, 300, 600, 3500)
SPAN_ODDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.22, 0.03)
# What the reference and the transfers may take: KV elements of one cache, multiplications of one product.
MOST_ELEMENTS = 3_000_000
MOST_PRODUCTS = 300_000_000


def random_case(rng: np.random.Generator, spans: Sequence[int] = SPANS, **fixed: Any) -> DecodeCase:
    """A case drawn from everything that the kernels take; ``fixed`` fields are as given."""
    draw: dict[str, Any] = {
        "kv_dtype": _one(rng, ("bf16", "fp16", "e4m3")),
        "head_dim": _one(rng, HEAD_DIMS),
        "group": int(rng.integers(1, 33)),
        "kv_heads": _one(rng, (1, 2, 3, 4, 5, 8)),
        "page_size": _one(rng, PAGE_SIZES),
        "out_dtype": _one(rng, ("", "bf16", "fp16", "e4m3")),
        "q_len": 1 if rng.random() < 0.3 else int(rng.integers(2, 17 if rng.random() < 0.7 else 65)),
        "mask": _one(rng, MASKS),
        "mask_itemsize": _one(rng, (2, 4)),
        "sinks": _flag(rng),
        "window_left": _one(rng, WINDOWS),
        "draft_position": _one(rng, ("depth", "index")),
        "scale": _one(rng, (None, None, 0.3, 1.0)),
        "output_scale": _one(rng, (1.0, 1.0, 0.37, 2.5)),
        "device_scales": _flag(rng),
        "with_lse": _flag(rng),
        "batch_invariant": _flag(rng),
        "pdl": _flag(rng),
        "kv_layout": _one(rng, ("NHD", "HND")),
        "combined": _flag(rng),
        "separate": _flag(rng),
        "whole_pages": bool(rng.random() < 0.1),
        "strided": bool(rng.random() < 0.3),
        "flat_q": _flag(rng),
        "unsigned": _flag(rng),
        "spare_columns": _one(rng, (0, 1, 9)),
        "rows": _one(rng, (None, None, None, None, None, 8, 16, 32, 64, 128)),
        "clusters": _one(rng, (None, False, True)),
    }
    draw |= fixed
    forms = ("", *FORMS) if draw["kv_dtype"] == "e4m3" else ("", "", NUMBER)
    draw["kv_scales"] = fixed.get("kv_scales", _one(rng, forms))
    draw["q_dtype"] = fixed.get("q_dtype") or _one(rng, Q_DTYPES[draw["kv_dtype"]])
    lengths = _lengths(rng, draw["page_size"], spans)
    slack = _one(rng, (0, 1, 70, 700))
    case = DecodeCase(lengths=lengths, max_seq_len=max(lengths) + slack, **draw)
    return _affordable(_ragged(rng, case) if _flag(rng) else case)


def _lengths(rng: np.random.Generator, page_size: int, spans: Sequence[int]) -> tuple[int, ...]:
    odds = np.array([dict(zip(SPANS, SPAN_ODDS, strict=True)).get(span, 0.1) for span in spans])
    span = int(rng.choice(spans, p=odds / odds.sum()))
    edges = edge_lengths(page_size, span)
    batch = _one(rng, (1, 2, 3, 4, 4, 9))
    return tuple(_one(rng, edges) if _flag(rng) else int(rng.integers(0, span + 1)) for _ in range(batch))


def _ragged(rng: np.random.Generator, case: DecodeCase) -> DecodeCase:
    q_lens = [int(n) for n in rng.integers(0, case.q_len + 1, size=case.batch)]
    if not sum(q_lens):
        q_lens[-1] = 1
    # The bound may be more than any request has.
    bound = _one(rng, (max(q_lens), case.q_len, 16 if case.q_len <= 16 else 64))
    return replace(case, q_lens=tuple(q_lens), max_q_len=bound, spare_tokens=_one(rng, (0, 0, 3)))


def _affordable(case: DecodeCase) -> DecodeCase:
    """Fewer KV heads, then fewer and shorter requests, until host and reference take it in their stride."""
    while _elements(case) > MOST_ELEMENTS or _products(case) > MOST_PRODUCTS:
        if case.kv_heads > 1:
            case = replace(case, kv_heads=case.kv_heads // 2)
        elif case.batch > 2:
            case = _first_requests(case, case.batch // 2)
        else:
            # Odd lengths stay odd.
            shorter = tuple(length // 4 * 2 + length % 2 for length in case.lengths)
            case = replace(case, lengths=shorter, max_seq_len=max(shorter) + case.max_seq_len - max(case.lengths))
    return case


def _first_requests(case: DecodeCase, count: int) -> DecodeCase:
    q_lens = None if case.q_lens is None else (max(1, case.q_lens[0]), *case.q_lens[1:count])
    slack = case.max_seq_len - max(case.lengths)
    lengths = case.lengths[:count]
    return replace(case, lengths=lengths, max_seq_len=max(lengths) + slack, q_lens=q_lens)


def _elements(case: DecodeCase) -> int:
    return sum(case.lengths) * case.kv_heads * case.head_dim


def _products(case: DecodeCase) -> int:
    pairs = sum(length * queries for length, queries in zip(case.lengths, case.query_lens, strict=True))
    return pairs * case.q_heads * case.head_dim


def _one(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _flag(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))
