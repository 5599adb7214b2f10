"""The reference that recorded definitions of context attention carry, run in torch, against ours in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.attention.attention_operator import AttentionCall
from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.attention.operators.context_attention import CONTEXT_ATTENTION, ContextOptions
from cubin_runtime.debug.tracing.context import traced_context

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from tests.attention.test_tracing_reference import agree, view_of  # noqa: E402  (it needs torch)

KV_HEADS, GROUP, DIM, PAGE, COLUMNS, PAGES = 2, 3, 16, 16, 6, 30
HEADS = KV_HEADS * GROUP
Q_LENS, KV_LENS = (5, 0, 9, 3), (21, 7, 0, 40)
NUMBERS = {"softmax_scale": 0.3, "output_scale": 0.7, "max_seq_len": 64}
DEFAULTS = {"window_left": -1, "window_right": -1, "logit_soft_cap": 0.0}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window_left": 4},
    {"causal": False, "window_left": 3, "window_right": 2},
    {"logit_soft_cap": 2.0},
    {"lse_base": "e"},
]


def random(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def sums(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def with_outputs(given: dict[str, Any]) -> dict[str, Any]:
    leading = given["q"].shape[:-1]
    return {**given, "out": torch.empty(*leading, given["v"].shape[-1]), "lse": torch.empty(*leading)}


def ragged(value_dim: int = DIM) -> dict[str, Any]:
    keys = sum(KV_LENS)
    made = {"q": random(sum(Q_LENS), HEADS, DIM), "k": random(keys, KV_HEADS, DIM)}
    made |= {"v": random(keys, KV_HEADS, value_dim), "q_cu_seq_lens": sums(Q_LENS), "kv_cu_seq_lens": sums(KV_LENS)}
    return with_outputs(made)


def paged(tables: int = 1) -> dict[str, Any]:
    made = {"q": random(sum(Q_LENS), HEADS, DIM), "q_cu_seq_lens": sums(Q_LENS)}
    made |= {name: random(PAGES, PAGE, KV_HEADS, DIM + at) for at, name in enumerate("kv")}
    made["v"] = made["v"][..., 1:]
    table = torch.randint(0, PAGES, (4, 2, COLUMNS), generator=torch.Generator().manual_seed(3)).int()
    made |= {"page_table": table if tables == 2 else table[:, 0], "seq_lens": torch.tensor(KV_LENS).int()}
    return with_outputs(made)


def run(given: dict[str, Any], **options: Any) -> Any:
    """``run`` of the definition of a call with these tensors."""
    views = {arg.name: view_of(given[arg.name]) if arg.name in given else None for arg in CONTEXT_ATTENTION.tensors}
    chosen = ContextOptions(**{**NUMBERS, **options})
    call = traced_context(AttentionCall(CONTEXT_ATTENTION.read(views, chosen), chosen))
    space: dict[str, Any] = {}
    exec(call.definition()["reference"], space)
    values = {**NUMBERS, **DEFAULTS, **options, **given}
    for name in ("softmax_scale", "output_scale"):
        if name in given:
            values |= {f"{name}_device": given[name], name: 1.0}
    return space["run"](*(values[part.name] for part in call.inputs))


def expected(given: dict[str, Any], q_lens: Any = Q_LENS, kv_lens: Any = KV_LENS, **options: Any) -> Any:
    q, k, v = (given[name].numpy() for name in ("q", "k", "v"))
    table = given["page_table"].numpy() if "page_table" in given else None
    if table is None:
        k, v = (side.reshape(-1, *side.shape[-2:]) for side in (k, v))
    options = {"output_scale": 0.7, "page_table": table, **options}
    return context_attention_reference(q.reshape(-1, HEADS, DIM), k, v, q_lens, kv_lens, 0.3, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_keys(options: dict[str, Any]) -> None:
    given = ragged(value_dim=24)
    agree(run(given, **options), expected(given, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_keys_in_pages(options: dict[str, Any]) -> None:
    given = paged()
    agree(run(given, **options), expected(given, **options))


def test_tables_of_keys_and_of_values() -> None:
    given = paged(tables=2)
    agree(run(given), expected(given))


def test_table_entries_in_front_of_a_window_and_behind_a_length_are_not_read() -> None:
    given = paged()
    wanted = expected(given, window_left=4)
    given["page_table"] = given["page_table"].clone()
    given["page_table"][0, 2:] = given["page_table"][3, 0] = 1 << 20
    agree(run(given, window_left=4), wanted)


def test_requests_of_one_size_of_which_some_keys_are_used() -> None:
    lengths = (9, 0, 4)
    given = with_outputs({"q": random(3, 5, HEADS, DIM), **{name: random(3, 9, KV_HEADS, DIM) for name in "kv"}})
    agree(run(given), expected(given, (5,) * 3, (9,) * 3))
    flat = {name: torch.cat([side[:used] for side, used in zip(given[name], lengths, strict=True)]) for name in "kv"}
    found = run({**given, "seq_lens": torch.tensor(lengths).int()})
    agree(found, expected({**given, **flat}, (5,) * 3, lengths))


@pytest.mark.parametrize("lse_sink", [True, False])
def test_sinks_and_scales_on_the_device(lse_sink: bool) -> None:
    given, sinks = ragged(), torch.linspace(-1, 1, HEADS)
    scales = {"softmax_scale": torch.tensor([0.3]), "output_scale": torch.tensor([0.7])}
    found = run({**given, **scales, "sinks": sinks}, lse_sink=lse_sink, softmax_scale=1.0, output_scale=1.0)
    agree(found, expected(given, sinks=sinks.numpy(), lse_sink=lse_sink))
