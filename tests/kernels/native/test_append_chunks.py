"""How an append divides tokens into chunks."""

from __future__ import annotations

import pytest

from cubin_runtime.kernels.native.append.plan import chunk_tokens
from cubin_runtime.kernels.native.constants import CONSTANTS

BATCH_UNITS, CTAS = 512, 792


@pytest.mark.parametrize("token_units", [4, 72, 256, 640, CONSTANTS.append_max_units])
@pytest.mark.parametrize("tokens", [1, 64, 528, 529, 1000, 16384, 65536, 1 << 20])
def test_no_chunk_is_larger_than_the_kernel_takes(tokens: int, token_units: int) -> None:
    chosen = chunk_tokens(tokens, token_units, BATCH_UNITS, min(tokens, CTAS))
    assert 1 <= chosen <= CONSTANTS.append_chunk_tokens


def test_each_token_has_a_cta_while_there_are_enough() -> None:
    assert [chunk_tokens(tokens, 256, BATCH_UNITS, tokens) for tokens in (1, 64, CTAS)] == [1, 1, 1]


def test_batches_are_full_where_chunks_allow_it() -> None:
    # Of 72 units, 28 tokens fill two batches and 16 would need two for little more than one.
    chosen = chunk_tokens(1 << 20, 72, BATCH_UNITS, CTAS)
    assert chosen * 72 % BATCH_UNITS > BATCH_UNITS * 0.9
