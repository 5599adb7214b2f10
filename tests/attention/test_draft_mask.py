"""The operator ``draft_mask``: trees on the host, what it sends for those on a device, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention import Runtime, draft_mask, plan_draft_mask
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.draft_mask.params import DRAFT_MASK
from cubin_runtime.testing import StandIn
from tests.attention.attention_examples import H200
from tests.attention.copying_examples import view

PARENTS = view("int32", 4, 40)
OUT = view("uint16", 4, 40, 4, at=0x7F0000100000)


def words(packed: np.ndarray) -> list[int]:
    """A number for each token."""
    parts = packed.astype(object) * [1 << 16 * part for part in range(packed.shape[-1])]
    return parts.sum(axis=-1).ravel().tolist()


def test_a_tree_on_the_host_becomes_ancestors() -> None:
    packed = draft_mask(parents=[[-1, 0, 0, 1], [-1, -1, 1, 2]])
    assert (packed.shape, packed.dtype) == ((2, 4, 2), np.uint16)
    assert words(packed) == [0b0001, 0b0011, 0b0101, 0b1011, 0b0001, 0b0010, 0b0110, 0b1110]


def test_trees_of_different_size_have_their_tokens_in_a_row() -> None:
    packed = draft_mask(parents=[[-1, 0, 0], [], [-1]])
    assert packed.shape == (4, 2)
    assert words(packed) == [0b001, 0b011, 0b101, 0b1]


def test_a_chain_of_64_is_causal() -> None:
    chain = np.arange(-1, 63)[None]
    causal = np.tril(np.ones((1, 64, 64), bool))
    assert words(draft_mask(parents=chain)) == [(2 << token) - 1 for token in range(64)]
    np.testing.assert_array_equal(draft_mask(parents=chain), draft_mask(allowed=causal))


@pytest.mark.parametrize(("max_q_len", "elements"), [(None, 2), (32, 2), (33, 4), (64, 4)])
def test_the_bound_says_how_many_words_a_token_has(max_q_len: int | None, elements: int) -> None:
    assert draft_mask(parents=[[-1]], max_q_len=max_q_len).shape == (1, 1, elements)
    assert draft_mask(allowed=[[[1]]], max_q_len=max_q_len).tolist() == [[[1] + [0] * (elements - 1)]]


@pytest.mark.parametrize("q_len", [1, 5, 31, 32, 33, 64])
def test_any_pattern_of_booleans_is_packed(q_len: int) -> None:
    allowed = np.random.default_rng(q_len).integers(0, 2, (3, q_len, q_len))
    rows = [int("".join(map(str, row[::-1])), 2) for row in allowed.reshape(-1, q_len).tolist()]
    assert words(draft_mask(allowed=allowed)) == rows
    assert words(draft_mask(allowed=allowed.astype(bool))) == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parents": [[-1, 1]]}, r"parents\[0\]\[1\]=1: expected -1 to 0"),
        ({"parents": [[-1], [0]]}, r"parents\[1\]\[0\]=0: expected -1 to -1"),
        ({"parents": [[-2]]}, r"parents\[0\]\[0\]=-2"),
        ({"parents": []}, "parents: .*expected integers"),
        ({"parents": [-1, 0]}, "parents: .*expected integers"),
        ({"parents": [["a"]]}, "parents: .*expected integers"),
        ({"parents": np.zeros((1, 65), int) - 1}, "max_q_len=65: expected 65.*to 64"),
        ({"parents": [[-1, 0]], "max_q_len": 1}, "max_q_len=1: expected 2"),
        ({"parents": [[-1]], "max_q_len": "1"}, "max_q_len='1': expected an integer"),
        ({"parents": [[-1]], "allowed": [[[1]]]}, "allowed: given with parents"),
        ({"parents": [[-1]], "out": OUT}, "out: given with a tree on the host"),
        ({"allowed": [[[2]]]}, "allowed: .*expected booleans"),
        ({"allowed": [[[-1]]]}, "allowed: .*expected booleans"),
        ({"allowed": np.ones((1, 2, 3), bool)}, "allowed: .*expected booleans"),
        ({"allowed": np.ones((2, 2), bool)}, "allowed: .*expected booleans"),
        ({}, "out: None without parents and allowed"),
        ({"parents": 5}, "parents: "),
        ({"parents": np.int32(5)}, "parents: int32 of shape .*expected integers"),
        ({"parents": view("int32", 4)}, r"parents: shape \(4,\), expected \[batch, q_len, ...\] without"),
        ({"parents": view("int32", 4), "q_cu_seq_lens": view("int32", 3)}, "max_q_len: None"),
        ({"parents": view("int32", 4, 65)}, "max_q_len=65: expected 1 to 64"),
        ({"parents": PARENTS, "allowed": view("bool", 4, 40, 40), "out": OUT}, "allowed: given with parents"),
        ({"parents": PARENTS, "out": view("uint16", 4, 40, 2)}, r"out: shape \(4, 40, 2\), expected \(4, 40, 4\)"),
        ({"parents": PARENTS, "out": view("uint32", 160, 2)}, r"out: shape .*\[batch, q_len, words\] without"),
        ({"parents": PARENTS, "out": view("int32", 4, 40, 2)}, "out: dtype int32"),
        ({"parents": view("int32", 4, 41), "out": OUT}, "parents: shape"),
        ({"parents": view("int64", 4, 40), "out": OUT}, "parents: dtype int64"),
        ({"allowed": view("bool", 4, 40, 41), "out": OUT}, "allowed: shape"),
        ({"out": view("uint16", 4, 65, 6)}, "out: 65 query tokens per request"),
        ({"out": view("uint16", 9, 3), "q_cu_seq_lens": view("int32", 3)}, "out: 3 elements of uint16 per token"),
        ({"out": view("uint32", 9, 3), "q_cu_seq_lens": view("int32", 3)}, "out: 3 elements of uint32 per token"),
        ({"out": view("uint32", 9, 1), "q_cu_seq_lens": view("int32", 1)}, "q_cu_seq_lens: shape"),
    ],
)
def test_what_is_wrong_is_named(stub_runtime: Runtime, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        draft_mask(**given, runtime=stub_runtime)


def test_tensors_and_strides_arrive(stub_runtime: Runtime, standin: StandIn) -> None:
    assert draft_mask(parents=PARENTS, out=OUT, runtime=stub_runtime) is OUT
    (launch,) = standin.calls("cuLaunchKernelEx")
    seen = DRAFT_MASK.unpack(bytes.fromhex(launch.seen["parameter0"]))
    assert (launch.seen["grid"], seen["parents"], seen["out"]) == ("4,1,1", PARENTS.pointer, OUT.pointer)
    assert (seen["allowed"], seen["q_cu_seq_lens"], seen["parents_stride"]) == (0, 0, 1)
    assert (seen["tokens"], seen["q_len"], seen["words"]) == (160, 40, 2)


def test_rows_narrower_than_the_words_bound_the_query_tokens(stub_runtime: Runtime) -> None:
    sums = view("int32", 3)
    plan = plan_draft_mask(
        view("uint32", 9, 2), allowed=view("uint8", 9, 40), q_cu_seq_lens=sums, runtime=stub_runtime, device_facts=H200
    )
    (launch,) = plan.launch_plans()
    assert (launch.grid, launch.values["q_len"], launch.values["words"]) == ((2, 1, 1), 40, 2)
    assert (launch.values["allowed_token_stride"], launch.values["allowed_column_stride"]) == (40, 1)
