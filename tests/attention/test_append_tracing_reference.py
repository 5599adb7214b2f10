"""The reference that recorded definitions of KV appends carry, run in torch, against ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.operator import Call
from cubin_runtime.attention.operators.append_kv import APPEND_KV, AppendOptions
from cubin_runtime.debug.tracing.append import traced_append
from tests.attention.append_reference import append_kv_reference, token_positions

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from tests.attention.test_tracing_reference import view_of  # noqa: E402  (it needs torch)

KV_HEADS, DIM, PAGE, PAGES, COLUMNS, TOKENS = 2, 32, 8, 30, 6, 12
LENGTHS, BEGINS = (21, 2, 9, 40), (0, 5, 5, 9, 11)


def run(given: dict[str, Any], **options: Any) -> Any:
    """``run`` of the definition of a call with these tensors."""
    views = {arg.name: view_of(given[arg.name]) if arg.name in given else None for arg in APPEND_KV.tensors}
    chosen = AppendOptions(**options)
    call = traced_append(Call(APPEND_KV.read(views, chosen), chosen))
    space: dict[str, Any] = {}
    exec(call.definition()["reference"], space)
    values = {**given, **options}
    return space["run"](*(values[part.name] for part in call.inputs))


def tensors(*tokens: int, cache_dtype: Any = None) -> dict[str, Any]:
    made_by = torch.Generator().manual_seed(1)
    cache = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, generator=made_by)
    new = torch.randn(2, *tokens, KV_HEADS, DIM, generator=made_by)
    cache, new = cache.to(cache_dtype or torch.bfloat16), new.to(torch.bfloat16)
    table = torch.randperm(PAGES, generator=made_by)[:24].reshape(4, COLUMNS).int()
    return {"k": new[0], "v": new[1], "k_cache": cache[0], "v_cache": cache[1], "page_table": table}


def expected(given: dict[str, Any], positions: Any, requests: Any, **more: Any) -> list[Any]:
    names = ("k", "v", "k_cache", "v_cache")
    arrays = [given[name].float().numpy().copy() for name in names]
    arrays[:2] = [side.reshape(-1, KV_HEADS, DIM) for side in arrays[:2]]
    append_kv_reference(*arrays, given["page_table"].numpy(), positions=positions, batch_indices=requests, **more)
    return arrays[2:]


def check(found: Any, wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.float().numpy(), other)


@pytest.mark.parametrize("includes_new", [True, False])
def test_tokens_by_offsets(includes_new: bool) -> None:
    given = tensors(TOKENS)
    more = {"seq_lens": torch.tensor(LENGTHS).int(), "q_cu_seq_lens": torch.tensor(BEGINS).int()}
    where = token_positions(LENGTHS, BEGINS, TOKENS, lengths_include_new=includes_new)
    check(run({**given, **more}, lengths_include_new=includes_new), expected(given, *where))


def test_tokens_of_equal_number() -> None:
    given = tensors(4, 3)
    where = token_positions(LENGTHS, range(0, 15, 3), 12)
    check(run({**given, "seq_lens": torch.tensor(LENGTHS).int()}), expected(given, *where))


def test_positions_with_a_ragged_table() -> None:
    given = tensors(TOKENS)
    given["page_table"] = given["page_table"].flatten()
    positions, requests, rows = (
        [3, 0, -1, 47, 9, 5, 5, 1, 2, 3, 16, 900],
        [0, 1, 2, 3, -1, 2, 3, 1, 2, 1, 0, 0],
        (0, 4, 9, 10, 24),
    )
    more = {"positions": torch.tensor(positions).int(), "batch_indices": torch.tensor(requests).int()}
    found = run({**given, **more, "page_indptr": torch.tensor(rows).int()})
    check(found, expected(given, positions, requests, page_indptr=rows))


def test_quantised_by_a_number_and_by_a_scale_on_the_device() -> None:
    given = tensors(TOKENS, cache_dtype=torch.float8_e4m3fn)
    more = {"seq_lens": torch.tensor(LENGTHS).int(), "q_cu_seq_lens": torch.tensor(BEGINS).int()}
    found = run({**given, **more, "v_scale": torch.tensor([0.001])}, k_scale=0.5)
    stored = {
        name: (given[name].float() * (1 / torch.tensor(scale))).clamp(-448, 448).to(torch.float8_e4m3fn)
        for name, scale in (("k", 0.5), ("v", 0.001))
    }
    check(found, expected({**given, **stored}, *token_positions(LENGTHS, BEGINS, TOKENS)))
    assert found[1].float().abs().max() == 448


def test_quantised_by_scales_of_requests_and_heads() -> None:
    given = tensors(TOKENS, cache_dtype=torch.float8_e4m3fn)
    more = {"seq_lens": torch.tensor(LENGTHS).int(), "q_cu_seq_lens": torch.tensor(BEGINS).int()}
    positions, requests = token_positions(LENGTHS, BEGINS, TOKENS)
    kv_heads = given["k"].shape[-2]
    by_head = torch.rand(kv_heads) + 0.5
    by_request = torch.rand(len(LENGTHS), kv_heads) + 0.5
    found = run({**given, **more, "k_scale": by_head, "v_scale": by_request})
    stored = {
        name: (given[name].float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        for name, scale in (("k", by_head[:, None]), ("v", by_request[requests][:, :, None]))
    }
    check(found, expected({**given, **stored}, positions, requests))
