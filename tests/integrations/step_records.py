"""Steps of engines as ``attend`` got them: written down as JSON, and made again of tensors on any device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cubin_runtime.attention.context_reference import context_attention_reference
from cubin_runtime.integrations.paged_batch import LayerOptions, PagedBatch, Part

RECORDS = Path(__file__).parent / "engine_steps.json"


def written(q: Any, k: Any, v: Any, kv_layout: str, batch: PagedBatch, options: LayerOptions, out: Any) -> Any:
    """The arguments of an ``attend`` without the values of queries, keys and sinks."""
    one_storage = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    return {
        "q": list(q.shape),
        "out": list(out.shape),
        "kv_layout": kv_layout,
        "one_storage": one_storage,
        "storage": k.untyped_storage().nbytes() // k.element_size(),
        "k": _form(k),
        "v": _form(v),
        "parts": [None if part is None else _part(part) for part in (batch.decodes, batch.prefills)],
        "options": {**_recorded(options), "sinks": options.sinks is not None},
    }


def _recorded(options: LayerOptions) -> dict[str, Any]:
    """Options without what no recorded step has."""
    return {name: value for name, value in options._asdict().items() if name not in ("scratch", "k_scale", "v_scale")}


def _form(half: Any) -> list[Any]:
    return [list(half.shape), list(half.stride()), half.storage_offset()]


def _part(part: Part) -> dict[str, Any]:
    values = {name: value for name, value in part._asdict().items() if name != "mask"}  # which no recorded step has
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}


def made_again(record: Any, device: str) -> tuple[Any, ...]:
    """The arguments of ``attend``, with random values."""
    torch.manual_seed(0)
    on: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    first = torch.randn(record["storage"], **on)
    second = first if record["one_storage"] else torch.randn(record["storage"], **on)
    k, v = (torch.as_strided(whole, *record[half]) for whole, half in ((first, "k"), (second, "v")))
    q = torch.randn(record["q"], **on)
    options = LayerOptions(**record["options"])
    sinks = torch.randn(q.shape[1], device=device) if options.sinks else None
    parts = [None if part is None else _remade(part, device) for part in record["parts"]]
    return q, k, v, record["kv_layout"], PagedBatch(*parts), options._replace(sinks=sinks), torch.zeros_like(q)


def _remade(part: dict[str, Any], device: str) -> Part:
    return Part(
        **{
            name: torch.tensor(value, dtype=torch.int32, device=device) if isinstance(value, list) else value
            for name, value in part.items()
        }
    )


def array(tensor: Any) -> Any:
    return tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def expected(q: Any, k: Any, v: Any, kv_layout: str, batch: Any, options: Any) -> Any:
    """The output in float64; rows of no part are 0."""
    result = np.zeros(q.shape)
    pages = [array(half.transpose(1, 2) if kv_layout == "HND" else half) for half in (k, v)]
    for part in (batch.decodes, batch.prefills):
        if part is None:
            continue
        rows = slice(part.first_row, part.first_row + part.rows)
        sums = torch.arange(part.rows + 1) if part.sums is None else part.sums.cpu()
        result[rows], _ = context_attention_reference(
            array(q[rows]),
            *pages,
            sums.diff().tolist(),
            part.lengths.tolist(),
            options.softmax_scale,
            page_table=array(part.table),
            causal=True,
            window_left=options.window_left,
            logit_soft_cap=options.soft_cap,
            sinks=None if options.sinks is None else array(options.sinks),
        )
    return result


def compare(engine: str, steps: dict[str, Any]) -> None:
    """Compare an engine's steps with the recorded ones; ``CUBIN_RUNTIME_RECORD=1`` records them.

    Where K and V lie in memory is the engine's affair, and differs between its versions.
    """
    known = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    if os.environ.get("CUBIN_RUNTIME_RECORD") == "1":
        RECORDS.write_text(json.dumps({**known, engine: steps}, sort_keys=True) + "\n")
    else:
        assert _apart_from_places(known[engine]) == _apart_from_places(json.loads(json.dumps(steps)))


def _apart_from_places(steps: dict[str, Any]) -> dict[str, Any]:
    places = ("storage", "one_storage")
    return {
        name: {key: value[:2] if key in "kv" else value for key, value in step.items() if key not in places}
        for name, step in steps.items()
    }
