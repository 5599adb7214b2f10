"""Calls of sparse MLA decode to be recorded, drawn like those of ``cases``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.golden.cases import _STEP_OPTIONS, FP8, HOPPERS, Draw, rows_of_tokens, scale, tensor
from tests.golden.copying_cases import call_case

OPTIONS: dict[str, Sequence[Any]] = {
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "call": ("plan", "operator"),
    "cache": (("uint8", 656), (FP8, 656), ("bfloat16", 576), ("bfloat16", 512)),
    "form": ("pages", "one head after", "one head before", "rows", "padded"),
    "page": (1, 48, 64),
    "pages": (1, 2, 1000),
    "tokens": (1, 2, 33, 64, 300, 4096),
    "heads": (1, 8, 16, 17, 32, 64, 128),
    "width": (1, 63, 64, 2048, 32768),
    "lengths": (0, 1),
    "out": ("made", "bfloat16", "float16", FP8),
    "q_rows": ("plain", "padded"),
    "lse_rows": (None, "plain", "by heads"),
    "sinks": (0, 1),
    "scale": (0.1, -0.3, "[]", "[1]"),
    "factor": (1.0, 0.7, "[1]"),
    "base": ("2", "e"),
    "lse_sink": (True, False),
    "batch_invariant": (False, True),
    "enable_pdl": (False, True),
}


def sparse_mla(draw: Draw) -> dict[str, Any]:
    """A call of ``sparse_mla_decode``, or of the function that plans it."""
    (dtype, width), pages, page = draw["cache"], draw["pages"], draw["page"]
    tokens, heads = draw["tokens"], draw["heads"]
    shape = {
        "one head after": (pages, page, 1, width),
        "one head before": (pages, 1, page, width),
        "rows": (pages * page, width),
    }.get(draw["form"], (pages, page, width))
    cache = tensor("k", dtype, *shape)
    if draw["form"] == "padded":
        cache["strides"][0] += 3 * width
    columns = 512 if width == 512 else 576
    call: dict[str, Any] = {
        "q": rows_of_tokens("q", "bfloat16", [tokens], heads, columns, draw["q_rows"]),
        "kv_cache": cache,
        "indices": tensor("page_table", "int32", tokens, draw["width"]),
        "softmax_scale": scale("k_scales", draw["scale"]),
        "output_scale": scale("v_scales", draw["factor"]),
        "lse_base": draw["base"],
        "lse_sink": draw["lse_sink"],
        "batch_invariant": draw["batch_invariant"],
        "enable_pdl": draw["enable_pdl"],
        "out": None,
    }
    made = draw["out"] == "made"
    if not made or draw["call"] == "plan":
        call["out"] = rows_of_tokens("out", "bfloat16" if made else draw["out"], [tokens], heads, 512, "plain")
    if draw["lengths"]:
        call["topk_lens"] = tensor("top_k_lens", "int32", tokens)
    if draw["lse_rows"]:
        call["lse"] = rows_of_tokens("lse", "float32", [tokens], heads, 0, draw["lse_rows"])
    if draw["sinks"]:
        call["sinks"] = tensor("sinks", "float32", heads)
    return call_case(draw, call, "sparse_mla_decode", {"softmax_scale": 0.31} if type(draw["scale"]) is float else {})
