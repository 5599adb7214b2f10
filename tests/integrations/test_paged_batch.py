"""The steps of engines on a CPU: recorded ones, and the float64 references in place of the kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402  (the tests of torch have it)
from step_records import RECORDS, array, expected, made_again  # noqa: E402

from cubin_runtime.attention.context_reference import context_attention_reference  # noqa: E402
from cubin_runtime.attention.reference import paged_decode_reference  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations import paged_batch  # noqa: E402

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
        ((128, 128, 130, 2), "num_heads=130"),
    ],
)
def test_layers_without_kernels_are_refused(sizes: tuple[int, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        paged_batch.check_layer(*sizes)
