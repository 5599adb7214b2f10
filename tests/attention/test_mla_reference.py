"""Latent attention in float64, against one token, one head and one key at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.reference import mla_decode_reference

HEADS, LATENT, ROPE, PAGE = 3, 6, 2, 4
WIDTH = LATENT + ROPE
SCALE, FACTOR = 0.4, 0.7
SINKS = np.array([0.3, -1.0, 2.0])


@dataclass(frozen=True)
class Case:
    q: np.ndarray
    cache: np.ndarray
    table: np.ndarray
    lens: np.ndarray
    cu: np.ndarray


def make_case(q_lens: list[int], kv_lens: list[int]) -> Case:
    rng = np.random.default_rng(5)
    columns = max(1, -(-max(kv_lens) // PAGE))
    pages = columns * len(kv_lens)
    return Case(
        q=rng.standard_normal((sum(q_lens), HEADS, WIDTH)),
        cache=rng.standard_normal((pages, PAGE, WIDTH)),
        table=rng.permutation(pages).reshape(len(kv_lens), columns),
        lens=np.array(kv_lens),
        cu=np.cumsum([0, *q_lens]),
    )


def slow(case: Case, mask: Any = None, sinks: Any = None) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.zeros((len(case.q), HEADS, LATENT)), np.full((len(case.q), HEADS), -math.inf)
    for b, length in enumerate(case.lens):
        q_len = case.cu[b + 1] - case.cu[b]
        for row in range(q_len):
            token = case.cu[b] + row
            word = (2 << row) - 1 if mask is None else int(mask[token])
            drafts = [key - (length - q_len) for key in range(length)]
            keys = [key for key, draft in enumerate(drafts) if draft < 0 or word >> draft & 1]
            if row < q_len - length:
                keys = []
            for head in range(HEADS):
                rows = [case.cache[case.table[b, key // PAGE], key % PAGE] for key in keys]
                weights = [math.exp(SCALE * (case.q[token, head] @ key)) for key in rows]
                total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[head]))
                if total:
                    lse[token, head] = math.log2(total)
                for weight, key in zip(weights, rows, strict=True):
                    out[token, head] += FACTOR * weight / total * key[:LATENT]
    return out, lse


def assert_same(case: Case, uniform: bool = False, **options: Any) -> None:
    got = mla_decode_reference(
        case.q,
        case.cache,
        case.table,
        case.lens,
        SCALE,
        latent=LATENT,
        output_scale=FACTOR,
        q_cu_seq_lens=None if uniform else case.cu,
        **options,
    )
    for ours, theirs in zip(got, slow(case, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def test_one_token_a_request() -> None:
    assert_same(make_case([1, 1, 1], [9, 4, 1]), uniform=True)


def test_rope_columns_in_memory_of_their_own() -> None:
    case = make_case([2, 2], [9, 4])
    others = (case.cache, case.table, case.lens, SCALE)
    joined = mla_decode_reference(case.q, *others, latent=LATENT)
    apart = mla_decode_reference(case.q[..., :LATENT], *others, latent=LATENT, q_rope=case.q[..., LATENT:])
    for ours, theirs in zip(apart, joined, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_several_tokens_see_one_another_causally() -> None:
    assert_same(make_case([3, 3], [9, 14]), uniform=True)


def test_requests_differ_in_query_tokens_down_to_none() -> None:
    assert_same(make_case([0, 3, 0, 16], [5, 9, 0, 17]))


@pytest.mark.parametrize("kv_len", [0, 1, 3])
def test_fewer_keys_than_query_tokens(kv_len: int) -> None:
    assert_same(make_case([4, 1], [kv_len, 6]), sinks=SINKS)


def test_masks_and_sinks() -> None:
    case = make_case([3, 16, 1], [20, 16, 5])
    words = np.random.default_rng(3).integers(0, 1 << 32, len(case.q), dtype=np.uint32)
    assert_same(case, mask=words, sinks=SINKS)
