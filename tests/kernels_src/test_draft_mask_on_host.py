"""Packing of draft masks, planned as the operator does and compiled for the host, against a walk up the tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import plan_draft_mask
from cubin_runtime.kernels.native.constants import StatusBit
from tests.kernels_src.host_operators import SMALL, HostOperators, aligned, view_on

RANDOM_CASES = 40


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostOperators:
    return HostOperators(tmp_path_factory.mktemp("host"))


def draw_tree(rng: np.random.Generator, tokens: int) -> list[int]:
    in_line = rng.random() < 0.3
    return [token - 1 if in_line else int(rng.integers(-1, token)) if token else -1 for token in range(tokens)]


def ancestors(tree: Sequence[int], token: int) -> int:
    word = 0
    while token >= 0:
        word |= 1 << token
        token = tree[token]
    return word


def words_of(rows: Sequence[int], bound: int) -> np.ndarray:
    words = [[row >> 32 * word & 0xFFFFFFFF for word in range(-(-bound // 32))] for row in rows]
    return np.array(words, dtype=np.uint32).reshape(len(rows), -1)


def pack(host: HostOperators, out: np.ndarray, **tensors: Any) -> int:
    views = {name: view_on(array, "uint8" if array.dtype == np.uint8 else None) for name, array in tensors.items()}
    views["out"] = view_on(out, str(out.dtype))
    return host.run(plan_draft_mask(**views, runtime=host.runtime, device_facts=SMALL), views)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_trees_of_different_size_become_their_ancestors(host: HostOperators, index: int) -> None:
    rng = np.random.default_rng((31, index))
    bound = int(rng.integers(1, 65))
    trees = [draw_tree(rng, int(rng.integers(0, bound + 1))) for _ in range(int(rng.integers(1, 9)))] + [[-1]]
    sums = np.cumsum([0, *map(len, trees)]).astype(np.int32)
    wanted = words_of([ancestors(tree, token) for tree in trees for token in range(len(tree))], bound)
    # Every second element, and two tokens behind the last request, which are left alone.
    parents = np.repeat(np.array([*chain.from_iterable(trees), 9, 9], dtype=np.int32), 2)[::2]
    out = aligned((sums[-1] + 2, wanted.shape[1]), np.uint32)
    assert pack(host, out, parents=parents, q_cu_seq_lens=sums) == 0
    np.testing.assert_array_equal(out[:-2], wanted)
    assert (out[-2:] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("q_len", [1, 2, 16, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_rows_of_booleans_become_bits(host: HostOperators, q_len: int, dtype: Any) -> None:
    rng = np.random.default_rng((32, q_len))
    seen = rng.integers(0, 2, (5, q_len, q_len))
    allowed = np.ascontiguousarray((seen * 3).astype(dtype).transpose(0, 2, 1)).transpose(0, 2, 1)
    if q_len > 1:
        allowed = np.ascontiguousarray(allowed)  # one stride between all tokens
    out = aligned((5, q_len, 2 * -(-q_len // 32)), np.uint16)
    assert pack(host, out, allowed=allowed) == 0
    rows = [int("".join(map(str, row[::-1])), 2) for row in seen.reshape(-1, q_len).tolist()]
    np.testing.assert_array_equal(out.view(np.uint32).reshape(5 * q_len, -1), words_of(rows, q_len))


def test_rows_of_requests_of_different_size_end_with_them(host: HostOperators) -> None:
    allowed, sums = np.ones((9, 40), np.uint8), np.array([0, 2, 2, 9], np.int32)
    out = aligned((9, 2), np.uint32)
    assert pack(host, out, allowed=allowed, q_cu_seq_lens=sums) == 0
    assert out[:, 0].tolist() == [0b11] * 2 + [0b1111111] * 7
    assert not out[:, 1].any()


@pytest.mark.parametrize("q_len", [1, 7, 32, 33, 64])
def test_without_a_tree_tokens_see_the_earlier_ones(host: HostOperators, q_len: int) -> None:
    out = aligned((3, q_len, -(-q_len // 32)), np.uint32)
    assert pack(host, out) == 0
    wanted = words_of([(2 << token) - 1 for token in range(q_len)] * 3, q_len)
    np.testing.assert_array_equal(out.reshape(3 * q_len, -1), wanted)


@pytest.mark.parametrize("parent", [2, 5, -2, 2**31 - 1, -(2**31)])
def test_a_parent_that_does_not_come_before_its_token_counts_as_none(host: HostOperators, parent: int) -> None:
    parents = np.array([[-1, 0, parent, 2]], np.int32)
    out = aligned((1, 4, 1), np.uint32)
    assert pack(host, out, parents=parents) == StatusBit.DRAFT_PARENT
    assert out.ravel().tolist() == [0b0001, 0b0011, 0b0100, 0b1100]


@pytest.mark.parametrize("sums", [[0, 5, 3], [0, 33, 40], [-1, 2, 3], [0, 2, 41]])
def test_sums_that_are_wrong_are_recorded(host: HostOperators, sums: list[int]) -> None:
    parents, out = np.full(40, -1, np.int32), aligned((40, 1), np.uint32)
    assert pack(host, out, parents=parents, q_cu_seq_lens=np.array(sums, np.int32)) == StatusBit.QUERIES
