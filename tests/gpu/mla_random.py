"""MLA cases drawn at random: every option from its whole domain, apart from the others, so that all pairs meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cubin_runtime.kernels.native.mla.select import COLUMNS, SEPARATE_COLUMNS
from tests.gpu.decode_cases import edge_lengths
from tests.gpu.decode_masks import MASKS
from tests.gpu.mla_cases import MlaCase

HEADS = (1, 5, 8, 16, 32, 64, 128)
# Heads and query tokens of requests of few rows, which have kernels of their own.
FEW_ROWS = ((1, 1), (8, 1), (16, 1), (5, 3), (2, 8), (1, 16), (16, 2))
PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
OUT_DTYPES = ("bf16", "fp16", "e4m3")
SPANS = (1, 17, 64, 130, 300, 600, 3500)
SPAN_ODDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.2, 0.05)
# What the reference may take: multiplications of both products.
MOST_PRODUCTS = 600_000_000


def random_mla_case(rng: np.random.Generator, types: Mapping[str, Sequence[str]], **fixed: Any) -> MlaCase:
    """A case drawn from everything that kernels take; ``fixed`` fields are as given.

    ``types`` has for each dtype of the cache those of q.
    """
    draw: dict[str, Any] = {
        "kv_dtype": _one(rng, sorted(types)),
        "heads": _one(rng, HEADS) if rng.random() < 0.7 else int(rng.integers(1, 129)),
        "page_size": _one(rng, PAGE_SIZES),
        "out_dtype": _one(rng, OUT_DTYPES),
        "q_len": 1 if rng.random() < 0.4 else int(rng.integers(2, 17)),
        "mask": _one(rng, MASKS),
        "mask_itemsize": _one(rng, (2, 4)),
        "sinks": _flag(rng),
        "scale": _one(rng, (192**-0.5, 192**-0.5, 0.02, 0.3, -0.05)),
        "output_scale": _one(rng, (1.0, 1.0, 0.37, 2.5)),
        "device_scales": _flag(rng),
        "with_lse": _flag(rng),
        "batch_invariant": _flag(rng),
        "pdl": _flag(rng),
        "strided": bool(rng.random() < 0.3),
        "nested": _flag(rng),
        "flat_q": _flag(rng),
        "unsigned": _flag(rng),
        "spare_columns": _one(rng, (0, 1, 9)),
    }
    if rng.random() < 0.3:
        draw["heads"], draw["q_len"] = _one(rng, FEW_ROWS)
    draw["latent"], draw["rope"] = _one(rng, COLUMNS)
    draw |= fixed
    draw["q_dtype"] = fixed.get("q_dtype") or _one(rng, types[draw["kv_dtype"]])
    draw["portable"] = fixed.get("portable", draw["q_dtype"] == "e4m3" and _flag(rng))
    takes_separate = (draw["latent"], draw["rope"]) == SEPARATE_COLUMNS and draw["q_dtype"] == draw[
        "kv_dtype"
    ] == "e4m3"
    draw["separate_values"] = fixed.get(
        "separate_values", takes_separate and not draw["portable"] and bool(rng.random() < 0.3)
    )
    draw["separate_rope"] = fixed.get("separate_rope", draw["rope"] > 0 and bool(rng.random() < 0.3))
    span = int(rng.choice(SPANS, p=SPAN_ODDS))
    edges = edge_lengths(draw["page_size"], span)
    lengths = tuple(
        _one(rng, edges) if _flag(rng) else int(rng.integers(0, span + 1)) for _ in range(_one(rng, (1, 2, 3, 4, 9)))
    )
    case = MlaCase(lengths=lengths, max_seq_len=max(lengths) + _one(rng, (0, 1, 70, 700)), **draw)
    return _affordable(_ragged(rng, case) if _flag(rng) else case)


def _ragged(rng: np.random.Generator, case: MlaCase) -> MlaCase:
    q_lens = [int(n) for n in rng.integers(0, case.q_len + 1, size=case.batch)]
    if not sum(q_lens):
        q_lens[-1] = 1
    # The bound may be more than any request has.
    bound = _one(rng, (max(q_lens), case.q_len, 16))
    return replace(case, q_lens=tuple(q_lens), max_q_len=bound, spare_tokens=_one(rng, (0, 0, 3)))


def _affordable(case: MlaCase) -> MlaCase:
    """Fewer, then shorter requests, until host and reference take it in their stride."""
    while _products(case) > MOST_PRODUCTS:
        slack = case.max_seq_len - max(case.lengths)
        if case.batch > 2:
            count = case.batch // 2
            q_lens = None if case.q_lens is None else (max(1, case.q_lens[0]), *case.q_lens[1:count])
            lengths = case.lengths[:count]
            case = replace(case, lengths=lengths, max_seq_len=max(lengths) + slack, q_lens=q_lens)
        else:
            # Odd lengths stay odd.
            lengths = tuple(length // 4 * 2 + length % 2 for length in case.lengths)
            case = replace(case, lengths=lengths, max_seq_len=max(lengths) + slack)
    return case


def _products(case: MlaCase) -> int:
    pairs = sum(length * queries for length, queries in zip(case.lengths, case.query_lens, strict=True))
    return pairs * case.heads * (case.width + case.latent)


def _one(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _flag(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))
