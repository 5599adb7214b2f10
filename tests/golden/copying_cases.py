"""Calls of KV append and of merging to be recorded, drawn like those of ``cases``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.golden.cases import (
    _STEP_OPTIONS,
    FP8,
    HOPPERS,
    ITEM,
    Draw,
    Tensor,
    caches,
    moved,
    rows_of_tokens,
    scale,
    tensor,
)

_SCALES = (None, 0.7, "[]", "[1]", "[1, 1]")
APPEND_OPTIONS: dict[str, Sequence[Any]] = {
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "call": ("plan", "operator"),
    "types": (
        ("bfloat16", "bfloat16"), ("float16", "float16"), (FP8, FP8), ("bfloat16", FP8), ("float16", FP8),
    ),
    "by": ("offsets", "offsets", "request", "token"),
    "ragged_table": (0, 1),
    "batch": (1, 2, 7, 64, 1500),
    "new": (1, 1, 2, 16, 700),
    "kv_heads": (1, 2, 4, 8, 40),
    "width": (32, 64, 128, 128, 192, 256, 512),
    "page": (1, 3, 16, 64, 256),
    "pages": (1, 2, 100, 100000),
    "layout": ("NHD", "HND"),
    "cache": ("apart", "one tensor", "side by side", "other order", "padded apart", "odd strides of 1", "columns"),
    "rows": ("plain", "padded", "by heads", "in a row"),
    "columns": (1, 5, 130),
    "table_gap": (0, 1, 7),
    "lengths": ("int32", "uint32"),
    "include_new": (True, True, False),
    "k_scale": _SCALES,
    "v_scale": _SCALES,
    "enable_pdl": (False, True),
    "backend": ("auto", "hopper"),
}  # fmt: skip
_ROWS = ("plain", "padded", "by heads")
MERGE_OPTIONS: dict[str, Sequence[Any]] = {
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "call": ("plan", "operator"),
    "dtype": ("bfloat16", "float16", "float32"),
    "out": ("made", "bfloat16", "float16", "float32"),
    "tokens": (1, 2, 33, 1000, 16384),
    "parts": (0, 1, 2, 9),
    "heads": (1, 3, 8, 128),
    "width": (8, 64, 80, 128, 192, 256, 512, 576),
    "other": (0, 1),
    "v_rows": _ROWS,
    "out_rows": _ROWS,
    "lse_rows": (None, *_ROWS),
    "sinks": (0, 1),
    "mask": (None, "bool", "uint8"),
    "base": ("2", "e"),
    "enable_pdl": (False, True),
}


def append(draw: Draw) -> dict[str, Any]:
    """A call of ``append_kv``, or of the function that plans it."""
    source, cache = draw["types"]
    batch, heads, widths = draw["batch"], draw["kv_heads"], (draw["width"], draw["width"])
    tokens, is_nested = batch * draw["new"], draw["by"] == "request"
    if draw["cache"] == "columns":
        heads, widths = 1, (512, 64)
        k = tensor("k", cache, draw["pages"], draw["page"], 576)
        v: Tensor = {**k, "at": k["at"] + 512 * ITEM[cache], "shape": [*k["shape"][:2], 64]}
        k["shape"] = [*k["shape"][:2], 512]
    else:
        k, v = caches(draw, cache, heads, draw["width"], draw["layout"])
    lead = [batch, draw["new"]] if is_nested else [tokens]
    call: dict[str, Any] = {
        "k": rows_of_tokens("q", source, lead, heads, widths[0], draw["rows"]),
        "v": {**rows_of_tokens("out", source, lead, heads, widths[1], draw["rows"])},
        "k_cache": k,
        "v_cache": v,
        "kv_layout": draw["layout"],
        "lengths_include_new": draw["include_new"],
        "enable_pdl": draw["enable_pdl"],
        "backend": draw["backend"],
    }
    if draw["ragged_table"]:
        call["page_table"] = tensor("page_table", "int32", batch * draw["columns"])
        call["page_indptr"] = tensor("kv_cu_seq_lens", draw["lengths"], batch + 1)
    else:
        call["page_table"] = tensor("page_table", "int32", batch, draw["columns"])
        call["page_table"]["strides"][0] += draw["table_gap"]
    if draw["by"] == "token":
        call["positions"] = tensor("seq_lens", draw["lengths"], tokens)
        call["batch_indices"] = tensor("top_k_lens", "int32", tokens)
    else:
        call["seq_lens"] = tensor("seq_lens", draw["lengths"], batch)
    if draw["by"] == "offsets":
        call["q_cu_seq_lens"] = tensor("q_cu_seq_lens", draw["lengths"], batch + 1)
    for name, place in (("k_scale", "k_scales"), ("v_scale", "v_scales")):
        call[name] = scale(place, draw[name]) if source != cache else None
    return call_case(
        draw, call, "append_kv", {name: 0.31 for name in ("k_scale", "v_scale") if type(call[name]) is float}
    )


def merge(draw: Draw) -> dict[str, Any]:
    """A call of ``merge_states``, or of the function that plans it; no parts: one, without their dimension."""
    tokens, parts, heads, width = draw["tokens"], draw["parts"], draw["heads"], draw["width"]
    pad = 16 if draw["v_rows"] == "padded" else 0
    if parts:
        order = (2, 0, 1, 3) if draw["v_rows"] == "by heads" else (0, 1, 2, 3)
        v, s = (
            tensor("q", draw["dtype"], tokens, parts, heads, width, order=order, pad=pad),
            tensor("lse", "float32", tokens, parts, heads, order=order[:3], pad=pad),
        )
    else:
        v = rows_of_tokens("q", draw["dtype"], [tokens], heads, width, draw["v_rows"])
        s = rows_of_tokens("lse", "float32", [tokens], heads, 0, draw["v_rows"])
    call: dict[str, Any] = {"parts": v, "part_lses": s, "lse_base": draw["base"], "enable_pdl": draw["enable_pdl"]}
    if draw["other"]:
        call["other"] = rows_of_tokens("k", draw["dtype"], [tokens], heads, width, "plain")
        call["other_lse"] = rows_of_tokens("v", "float32", [tokens], heads, 0, "plain")
    made = draw["out"] == "made"
    call["out"] = None
    if not made or draw["call"] == "plan":
        dtype = draw["dtype"] if made else draw["out"]
        call["out"] = rows_of_tokens("out", dtype, [tokens], heads, width, draw["out_rows"])
    if draw["lse_rows"]:
        call["lse"] = rows_of_tokens("counters", "float32", [tokens], heads, 0, draw["lse_rows"])
    if draw["sinks"]:
        call["sinks"] = tensor("sinks", "float32", heads)
    if draw["mask"]:
        call["mask"] = tensor("mask", draw["mask"], tokens)
    return call_case(draw, call, "merge_states", {})


def call_case(draw: Draw, call: dict[str, Any], name: str, numbers: dict[str, float]) -> dict[str, Any]:
    """The case of a call, and its second step."""
    steps: list[dict[str, Any]] = [{}]
    if draw["again"] == "moved":
        steps.append(moved(call, *call))
    elif draw["again"] == "caches moved":
        steps.append(moved(call, "k_cache", "v_cache", "v"))
    elif draw["again"] == "numbers":
        steps.append(dict(numbers))
    call_name = f"plan_{name}" if draw["call"] == "plan" else name
    case: dict[str, Any] = {"on": draw["on"], "call": call_name, "with": call, "steps": steps}
    return {**case, **{option: draw[option] for option in ("workspace", "stream", "torch") if draw[option]}}
