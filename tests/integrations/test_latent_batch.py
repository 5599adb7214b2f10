"""Decodes over a latent cache on a CPU: which steps are even, which layers have kernels, and what the operator gets."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from cubin_runtime.errors import UsageError  # noqa: E402  (torch first)
from cubin_runtime.integrations import latent_batch  # noqa: E402
from cubin_runtime.integrations.latent_batch import LatentDecodes, LatentOptions  # noqa: E402
from cubin_runtime.kernels.native.problem import Dealing  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("q_lens", "rows", "q_len"),
    [
        ([1, 1, 1], 3, 1),
        ([4, 4], 8, 4),
        ([4, 4, 0, 0], 16, 4),  # a captured step with requests that pad it
        ([4, 4, 0], 8, 4),  # more requests than rows
        ([0, 0], 0, 0),
        ([4, 1], 5, 0),
        ([4, 0, 4], 8, 0),  # rows that do not follow one another
        ([4, 4], 7, 0),
        ([2, 2], 8, 0),  # more rows than requests
        ([], 0, 0),
    ],
)
def test_steps_with_as_many_tokens_of_each_request(q_lens: list[int], rows: int, q_len: int) -> None:
    assert latent_batch.even_q_len(q_lens, rows) == q_len


def test_a_chunk_fills_a_row_tile() -> None:
    heads = (128, 64, 40, 16, 8, 4, 1)
    assert [latent_batch.chunk_of(each) for each in heads] == [1, 1, 1, 4, 8, 16, 16]


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_chunks_of_requests(chunk: int) -> None:
    chance = random.Random(chunk)
    for _ in range(50):
        q_lens = [chance.choice([0, 1, chunk, chunk + 1, chance.randrange(200)]) for _ in range(chance.randrange(9))]
        sums, requests, behind = [0], [], []
        for request, q_len in enumerate(q_lens):
            for first in range(0, q_len, chunk):
                end = min(first + chunk, q_len)
                sums.append(sums[-1] + end - first)
                requests.append(request)
                behind.append(q_len - end)
        chunks = latent_batch.chunks_of(q_lens, chunk)
        assert [part.tolist() for part in chunks] == [sums, requests, behind]
        assert {str(part.dtype) for part in chunks} == {"int32"}


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        ((512, 64, 128, 16), None),
        ((256, 64, 1, 1), None),
        ((384, 64, 16, 1), "kv_lora_rank=384"),
        ((256, 32, 40, 1), None),
        ((128, 32, 16, 1), None),
        ((512, 32, 16, 1), "qk_rope_head_dim=32"),
        ((512, 0, 16, 1), "qk_rope_head_dim=0"),
        ((512, 64, 129, 1), "129 heads"),
        ((512, 64, 0, 1), "0 heads"),
        ((512, 64, 16, 17), "16 draft tokens"),
    ],
)
def test_layers_with_kernels(layer: tuple[int, int, int, int], named: str | None) -> None:
    assert (latent_batch.unserved(*layer) is None) == (named is None)
    if named is None:
        latent_batch.check_latent_layer(*layer)
        return
    with pytest.raises(UsageError, match=named):
        latent_batch.check_latent_layer(*layer)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of ``mla_decode``, which does nothing."""
    calls: list[Any] = []
    monkeypatch.setattr(latent_batch, "mla_decode", lambda *given, **options: calls.append((given, options)))
    return calls


def attend(sums: Any, q_len: int, options: LatentOptions, totals: Any = None) -> tuple[Any, ...]:
    q, cache = torch.zeros(8, 16, 576), torch.zeros(3, 64, 576)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([40, 9], dtype=torch.int32)
    out, lse = torch.zeros(8, 16, 512), torch.zeros(8, 16)
    decodes = LatentDecodes(table, lengths, sums, q_len, 192, totals)
    latent_batch.attend_latent(q, cache, decodes, options, out, lse)
    return q, cache, table, lengths, out, lse


def test_even_requests_have_a_dimension_of_their_own(asked: list[Any]) -> None:
    q, cache, table, lengths, out, lse = attend(None, 4, LatentOptions(0.5, 2.0, True))
    (((queries, *given), options),) = asked
    assert (queries.shape, queries.data_ptr()) == ((2, 4, 16, 576), q.data_ptr())
    assert given == [cache, table, lengths]
    assert (options["out"].shape, options["out"].data_ptr()) == ((2, 4, 16, 512), out.data_ptr())
    assert (options["lse"].shape, options["lse"].data_ptr()) == ((2, 4, 16), lse.data_ptr())
    assert (options["softmax_scale"], options["output_scale"], options["batch_invariant"]) == (0.5, 2.0, True)
    assert (options["q_cu_seq_lens"], options["max_q_len"], options["max_seq_len"]) == (None, None, 192)
    assert (options["global_seq_lens"], options["cp_world"], options["workspace"]) == (None, 1, None)


def test_requests_with_different_numbers_of_tokens(asked: list[Any]) -> None:
    sums, totals = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([80, 18], dtype=torch.int32)
    q, *_, out, lse = attend(sums, 5, LatentOptions(0.5, 1.0, False, Dealing(2, 1, 16)), totals)
    (((queries, *_), options),) = asked
    assert (queries is q, options["out"] is out, options["lse"] is lse) == (True, True, True)
    assert (options["q_cu_seq_lens"] is sums, options["max_q_len"]) == (True, 5)
    assert options["global_seq_lens"] is totals
    assert (options["cp_world"], options["cp_rank"], options["cp_interleave"]) == (2, 1, 16)
