from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.mask import causal_mask, pack_mask, tree_mask


def test_packs_bit_j_of_row_i_into_little_endian_words() -> None:
    mask = pack_mask([[[True, False], [True, True]]])
    assert mask.data.hex() == "01000000" + "03000000"


@pytest.mark.parametrize(("q_len", "words"), [(1, 2), (32, 2), (33, 4), (64, 4), (65, 6)])
def test_rows_are_whole_32_bit_words(q_len: int, words: int) -> None:
    assert causal_mask(2, q_len).shape == (2, q_len, words)


def test_numpy_view_has_uint16_words_in_the_documented_shape() -> None:
    array = causal_mask(1, 33).to_numpy()
    assert (array.dtype, array.shape) == (numpy.dtype("uint16"), (1, 33, 4))
    assert array[0, 32].tolist() == [0xFFFF, 0xFFFF, 1, 0]


@given(st.integers(1, 3), st.integers(1, 40), st.randoms(use_true_random=False))
def test_visible_gives_back_what_was_packed(batch: int, q_len: int, random: object) -> None:
    allowed = numpy.random.default_rng(random.getrandbits(32)).random((batch, q_len, q_len)) < 0.5  # type: ignore[attr-defined]
    mask = pack_mask(allowed)
    for b in range(batch):
        for i in range(q_len):
            assert mask.visible(b, i) == tuple(numpy.flatnonzero(allowed[b, i]).tolist())


@given(st.integers(1, 70))
def test_causal_is_the_lower_triangle(q_len: int) -> None:
    assert causal_mask(2, q_len) == pack_mask(numpy.tril(numpy.ones((2, q_len, q_len), bool)))


def test_a_chain_of_parents_is_causal() -> None:
    assert tree_mask([[-1, 0, 1, 2]]) == causal_mask(1, 4)


def test_a_tree_row_sees_itself_and_its_ancestors_only() -> None:
    mask = tree_mask([[-1, 0, 0, 1, 2]])
    assert [mask.visible(0, row) for row in range(5)] == [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4)]


@pytest.mark.parametrize("parents", [[], [[]], [[0]], [[-1, 1]], [[-1, -2]], [[-1], [-1, 0]]])
def test_parents_must_come_before_their_children(parents: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="parents"):
        tree_mask(parents)


@pytest.mark.parametrize("allowed", [[], [[]], [[[1, 0]]], [[[1]], [[1], [1]]], [[1]], 5, [[[2]]]])
def test_anything_but_square_booleans_is_refused(allowed: object) -> None:
    with pytest.raises(UsageError, match="allowed"):
        pack_mask(allowed)


@pytest.mark.parametrize(("batch", "q_len"), [(0, 1), (1, 0)])
def test_an_empty_causal_mask_is_refused(batch: int, q_len: int) -> None:
    with pytest.raises(UsageError, match=f"batch={batch}, q_len={q_len}"):
        causal_mask(batch, q_len)
