"""The steps of engines on a CPU: recorded ones, and the float64 references in place of the kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402  (the tests of torch have it)

from cubin_runtime.attention.context_reference import context_attention_reference  # noqa: E402
from cubin_runtime.attention.reference import paged_decode_reference  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations import paged_batch  # noqa: E402
from tests.integrations.step_records import RECORDS, array, expected, made_again  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = [
    pytest.param(record, id=f"{engine}: {name}")
    for engine, steps in json.loads(RECORDS.read_text()).items()
    for name, record in steps.items()
]


def optional(tensor: Any) -> Any:
    return None if tensor is None else array(tensor)


def decode(q: Any, k: Any, v: Any, table: Any, lengths: Any, *, out: Any, **options: Any) -> None:
    assert options["kv_layout"] in ("NHD", "HND")
    pages = [array(half.transpose(1, 2) if options["kv_layout"] == "HND" else half) for half in (k, v)]
    result, _ = paged_decode_reference(
        array(q),
        *pages,
        array(table),
        array(lengths),
        options["softmax_scale"],
        sinks=optional(options["sinks"]),
        window_left=options["window_left"],
    )
    assert int(lengths.max()) <= options["max_seq_len"] <= table.shape[1] * pages[0].shape[1]
    out.copy_(torch.from_numpy(result))


def context(q: Any, k: Any, v: Any, *, page_table: Any, seq_lens: Any, out: Any, **options: Any) -> None:
    pages = [array(half.transpose(1, 2) if options["kv_layout"] == "HND" else half) for half in (k, v)]
    sums = options["q_cu_seq_lens"]
    q_lens = [q.shape[1]] * q.shape[0] if sums is None else sums.diff().tolist()
    assert options["max_q_len"] is None or options["max_q_len"] >= max(q_lens)
    result, _ = context_attention_reference(
        array(q.reshape(-1, *q.shape[-2:])),
        *pages,
        q_lens,
        seq_lens.tolist(),
        options["softmax_scale"],
        page_table=array(page_table),
        causal=True,
        window_left=options["window_left"],
        logit_soft_cap=options["logit_soft_cap"],
        sinks=optional(options["sinks"]),
    )
    out.copy_(torch.from_numpy(result).view(out.shape))


@pytest.mark.parametrize("record", STEPS)
def test_a_recorded_step(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_batch, "paged_decode", decode)
    monkeypatch.setattr(paged_batch, "context_attention", context)
    *given, out = made_again(record, "cpu")
    paged_batch.attend(*given, out)
    np.testing.assert_allclose(array(out), expected(*given), atol=4e-3, rtol=8e-3)
    assert array(out).any()


@pytest.mark.parametrize("record", STEPS)
@pytest.mark.parametrize("head_size", [128, 256])
def test_batch_invariance_uses_operators_that_give_a_token_the_same_bits(
    record: Any, head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def operator(name: str) -> Any:
        return lambda *given, **options: called.append((name, options["batch_invariant"]))

    monkeypatch.setattr(paged_batch, "paged_decode", operator("decode"))
    monkeypatch.setattr(paged_batch, "context_attention", operator("context"))
    q, k, v, kv_layout, batch, options, _ = made_again(record, "cpu")
    q = q.new_zeros(*q.shape[:2], head_size)
    paged_batch.attend(q, k, v, kv_layout, batch, options._replace(batch_invariant=True), torch.empty_like(q))
    assert called
    assert all(invariant for _, invariant in called)
    # At head_dim 256 a decode's bits are not those of prefill.
    decodes = batch.decodes is not None and batch.decodes.rows > 0 and options.soft_cap == 0
    assert (("decode", True) in called) == (decodes and head_size == 128)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((96, 96, 8, 2), "head_size=96"),
        ((128, 64, 8, 2), "values of 64"),
        ((128, 128, 7, 2), "num_heads=7"),
        ((128, 128, 130, 2), "num_heads=130, num_kv_heads=2: expected 1 to 64 query heads"),
        ((128, 128, 65, 1), "num_heads=65"),
        ((128, 128, 8, 0), "num_kv_heads=0"),
        ((128, 128, 8, -1), "num_kv_heads=-1"),
    ],
)
def test_layers_without_kernels_are_refused(sizes: tuple[int, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        paged_batch.check_layer(*sizes)


@pytest.mark.parametrize("sizes", [(64, 64, 1, 1), (128, 128, 8, 2), (256, 256, 64, 1), (128, 128, 128, 2)])
def test_layers_with_kernels(sizes: tuple[int, ...]) -> None:
    paged_batch.check_layer(*sizes)


class Called:
    """Names and arguments of the operators that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        for name in ("paged_decode", "context_attention"):
            monkeypatch.setattr(paged_batch, name, self._operator(name))

    def _operator(self, name: str) -> Any:
        return lambda *given, **options: self.calls.append((name, given, options))


OPTIONS = paged_batch.LayerOptions(0.125, -1, 0.0, None, False)


def part(rows: int, sums: Any = None, first_row: int = 0, max_q_len: int = 1) -> paged_batch.Part:
    table, lengths = torch.zeros(rows, 4, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    return paged_batch.Part(first_row, rows, table, lengths, sums, max_q_len, 64)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("heads", "operator"), [(64, "paged_decode"), (66, "context_attention")])
def test_the_most_heads_that_are_decoded(
    heads: int, operator: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, q = Called(monkeypatch), torch.zeros(3, heads, 128)
    cache = torch.zeros(8, 2, 16, 128) if layout == "HND" else torch.zeros(8, 16, 2, 128)
    paged_batch.attend(q, cache, cache, layout, paged_batch.PagedBatch(part(3), None), OPTIONS, torch.empty_like(q))
    assert [name for name, _, _ in called.calls] == [operator]


def test_parts_without_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    called, q = Called(monkeypatch), torch.zeros(3, 8, 128)
    cache = torch.zeros(8, 2, 16, 128)
    sums = torch.zeros(2, dtype=torch.int32)
    for batch in (paged_batch.PagedBatch(None, None), paged_batch.PagedBatch(part(0), part(0, sums))):
        paged_batch.attend(q, cache, cache, "HND", batch, OPTIONS, torch.empty_like(q))
    assert called.calls == []


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_e4m3_caches(monkeypatch: pytest.MonkeyPatch, invariant: bool, head_dim: int) -> None:
    called, q = Called(monkeypatch), torch.zeros(3, 8, head_dim)
    cache = torch.zeros(8, 2, 16, head_dim).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(())}
    options = OPTIONS._replace(batch_invariant=invariant, **scales)
    paged_batch.attend(q, cache, cache, "HND", paged_batch.PagedBatch(part(3), None), options, torch.empty_like(q))
    ((name, _, given),) = called.calls
    # Whose bits differ at other head dimensions than 64 and 128.
    assert name == ("context_attention" if invariant and head_dim == 256 else "paged_decode")
    assert (given["k_scale"] is scales["k_scale"], given["v_scale"] is scales["v_scale"]) == (True, True)


@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
def test_every_argument_arrives(soft_cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    called, q = Called(monkeypatch), torch.arange(9.0).expand(8, 128, 9).permute(2, 0, 1)
    k, v, out, sinks = torch.zeros(8, 2, 16, 128), torch.ones(8, 2, 16, 128), torch.empty(9, 8, 128), torch.ones(8)
    sums = torch.tensor([0, 4, 7], dtype=torch.int32)
    decodes, prefills = part(2), part(7, sums, first_row=2, max_q_len=17)
    options = paged_batch.LayerOptions(0.25, 17, soft_cap, sinks, False)
    paged_batch.attend(q, k, v, "HND", paged_batch.PagedBatch(decodes, prefills), options, out)
    shared = {"max_seq_len": 64, "softmax_scale": 0.25, "window_left": 17, "kv_layout": "HND", "batch_invariant": False}
    (first, some, ours), (second, rest, theirs) = called.calls
    assert (first, second) == ("context_attention" if soft_cap else "paged_decode", "context_attention")
    for given in (ours, theirs):
        assert {name: given[name] for name in shared} == shared
        assert given["sinks"] is sinks
    assert (some[1] is k, some[2] is v, rest[1] is k, rest[2] is v) == (True,) * 4
    assert (rest[0][:, 0, 0].tolist(), theirs["out"].data_ptr()) == (list(range(2, 9)), out[2:].data_ptr())
    assert (theirs["q_cu_seq_lens"] is sums, theirs["max_q_len"], theirs["logit_soft_cap"]) == (True, 17, soft_cap)
    assert (theirs["page_table"] is prefills.table, theirs["seq_lens"] is prefills.lengths) == (True, True)
    assert ours["out"].data_ptr() == out.data_ptr()
    if soft_cap:
        assert (some[0].shape, ours["out"].shape) == ((2, 1, 8, 128), (2, 1, 8, 128))
        assert (ours["q_cu_seq_lens"], ours["max_q_len"], ours["logit_soft_cap"]) == (None, None, soft_cap)
        assert (ours["page_table"] is decodes.table, ours["seq_lens"] is decodes.lengths) == (True, True)
    else:
        assert (some[0][:, 0, 0].tolist(), some[3] is decodes.table, some[4] is decodes.lengths) == ([0, 1], True, True)


@pytest.mark.parametrize(
    ("heads", "head_dim", "most", "bound"),
    [
        ((8, 2), 128, 1, 16),
        ((8, 2), 128, 16, 16),
        ((8, 2), 128, 17, None),
        ((2, 2), 64, 1, 16),
        ((2, 2), 64, 17, None),
        ((16, 2), 64, 8, 8),
        ((16, 2), 64, 9, None),
        ((64, 2), 64, 2, 2),
        ((66, 2), 64, 1, None),
        ((4, 2), 256, 16, 16),
        ((8, 2), 256, 9, None),
        ((64, 2), 256, 1, 1),
        ((64, 2), 256, 2, None),
    ],
)
def test_few_new_tokens_are_launched_as_decodes(
    heads: tuple[int, int], head_dim: int, most: int, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, q = Called(monkeypatch), torch.zeros(9, heads[0], head_dim)
    cache, out = torch.zeros(8, heads[1], 16, head_dim), torch.empty(9, heads[0], head_dim)
    sums = torch.tensor([0, 4, 7], dtype=torch.int32)
    prefills = part(7, sums, first_row=2, max_q_len=most)
    paged_batch.attend(q, cache, cache, "HND", paged_batch.PagedBatch(None, prefills), OPTIONS, out)
    ((name, states, given),) = called.calls
    assert (given["q_cu_seq_lens"] is sums, given["out"].data_ptr()) == (True, out[2:].data_ptr())
    assert (states[0].shape, given["max_q_len"]) == ((7, heads[0], head_dim), bound or most)
    if bound is None:
        assert name == "context_attention"
        assert given["page_table"] is prefills.table
    else:
        assert name == "paged_decode"
        assert (states[3] is prefills.table, states[4] is prefills.lengths) == (True, True)


@pytest.mark.parametrize(
    ("requests", "keys", "window_left", "name"),
    [
        (8, 8192, -1, "paged_decode"),
        (7, 8192, -1, "context_attention"),
        (7, 4096, -1, "paged_decode"),
        (1, 8192, 4095, "paged_decode"),
        (1, 8192, 4096, "context_attention"),
        (8192, 1 << 20, -1, "paged_decode"),
        (8193, 1 << 20, -1, "context_attention"),
        (8193, 1 << 20, 100, "context_attention"),
    ],
)
def test_few_new_tokens_behind_few_or_too_many_long_contexts_run_on_context_attention(
    requests: int, keys: int, window_left: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, q = Called(monkeypatch), torch.zeros(requests, 8, 128)
    cache, sums = torch.zeros(8, 1, 16, 128), torch.arange(requests + 1, dtype=torch.int32)
    prefills, options = part(requests, sums)._replace(max_seq_len=keys), OPTIONS._replace(window_left=window_left)
    paged_batch.attend(q, cache, cache, "HND", paged_batch.PagedBatch(None, prefills), options, torch.empty_like(q))
    assert [each for each, _, _ in called.calls] == [name]


def test_of_prompts_with_many_new_tokens_no_layer_asks_for_the_sizes_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    called, q = Called(monkeypatch), torch.zeros(17, 8, 128)
    monkeypatch.setattr(paged_batch, "few_tokens", lambda *_: pytest.fail("asked"))
    cache, sums = torch.zeros(8, 2, 16, 128), torch.tensor([0, 17], dtype=torch.int32)
    batch = paged_batch.PagedBatch(None, part(17, sums, max_q_len=17))
    paged_batch.attend(q, cache, cache, "HND", batch, OPTIONS, torch.empty_like(q))
    assert [name for name, _, _ in called.calls] == ["context_attention"]


def test_under_batch_invariance_few_new_tokens_are_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    called, q = Called(monkeypatch), torch.zeros(4, 8, 128)
    cache, sums = torch.zeros(8, 2, 16, 128), torch.arange(5, dtype=torch.int32)
    options = OPTIONS._replace(batch_invariant=True)
    batch = paged_batch.PagedBatch(None, part(4, sums))
    paged_batch.attend(q, cache, cache, "HND", batch, options, torch.empty_like(q))
    assert [name for name, _, _ in called.calls] == ["context_attention"]
