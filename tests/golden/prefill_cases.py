"""Calls of context attention to be recorded, drawn like those of ``cases``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.golden.cases import _STEP_OPTIONS, HOPPERS, SCALES, Draw, moved, rows_of_tokens, scale, tensor

_ROWS = ("plain", "padded", "by heads", "in a row")
CONTEXT_OPTIONS: dict[str, Sequence[Any]] = {
    **_STEP_OPTIONS,
    "on": HOPPERS,
    "call": ("plan", "operator"),
    "keys": ("ragged", "paged", "even", "even with lengths"),
    "dtype": ("bfloat16", "float16"),
    "width": (64, 128, 192, 256),
    "batch": (1, 2, 7, 64),
    "q_len": (1, 16, 300, 4096),
    "kv_len": (1, 130, 2000, 16384),
    "kv_heads": (1, 2, 8),
    "group": (1, 3, 4, 6, 8, 64),
    "page": (16, 32, 64, 128, 256),
    "layout": ("NHD", "HND"),
    "q_rows": _ROWS,
    "out_rows": ("made", *_ROWS[:3]),
    "kv_rows": ("plain", "padded", "in a row"),
    "lse_rows": (None, *_ROWS[:3]),
    "table_gap": (0, 1, 7),
    "lengths": ("int32", "uint32"),
    "q_bound": (0, 1),
    "causal": (True, False),
    "left": (-1, 0, 100, 1 << 30),
    "right": (-1, 0, 100),
    "cap": (0.0, 0.0, 30.0),
    "sinks": (None, "flat", "by kv head"),
    "softmax_scale": SCALES,
    "output_scale": (1.0, *SCALES[1:]),
    "base": ("2", "e"),
    "lse_sink": (True, False),
    "enable_pdl": (False, True),
    "backend": ("auto", "hopper"),
}
E4M3_OPTIONS: dict[str, Sequence[Any]] = {
    **CONTEXT_OPTIONS,
    "kv_dtype": ("float8_e4m3fn",),
    "k_scale": (None, 0.5, "one", "heads", "requests"),
    "v_scale": (None, 2.0, "one", "heads", "requests"),
    "batch_invariant": (False, True),
}
# Few query tokens over many keys.
SPLIT_OPTIONS: dict[str, Sequence[Any]] = {
    **CONTEXT_OPTIONS,
    "batch": (1, 2),
    "q_len": (1, 16, 64),
    "kv_len": (2000, 16384),
    "group": (1, 3, 4, 8),
    "left": (-1,),
    "cap": (0.0, 30.0),
    "lse_sink": (True,),
    "kv_dtype": (None, "float8_e4m3fn"),
}
INVARIANT_OPTIONS: dict[str, Sequence[Any]] = {**CONTEXT_OPTIONS, "width": (64, 128), "batch_invariant": (True,)}


def context_attention(draw: Draw) -> dict[str, Any]:  # noqa: C901, PLR0912, PLR0915
    """A call of ``context_attention``, or of the function that plans it."""
    batch, heads, kv_heads, kv_len = draw["batch"], draw["group"] * draw["kv_heads"], draw["kv_heads"], draw["kv_len"]
    widths = {"k": draw["width"], "v": 128 if draw["width"] == 192 else draw["width"]}
    kv_dtype = draw.get("kv_dtype") or draw["dtype"]
    even = draw["keys"].startswith("even")
    lead = [batch, draw["q_len"]] if even else [batch * draw["q_len"]]
    call: dict[str, Any] = {
        "q": rows_of_tokens("q", draw["dtype"], lead, heads, widths["k"], draw["q_rows"]),
        "max_seq_len": kv_len,
        "causal": draw["causal"],
        "window_left": draw["left"],
        "window_right": -1 if draw["causal"] else draw["right"],
        "logit_soft_cap": draw["cap"],
        "lse_base": draw["base"],
        "lse_sink": draw["lse_sink"],
        "enable_pdl": draw["enable_pdl"],
        "backend": draw["backend"],
    }
    if "batch_invariant" in draw:
        call["batch_invariant"] = draw["batch_invariant"]
    for name, width in widths.items():
        if draw["keys"] == "ragged":
            call[name] = rows_of_tokens(name, kv_dtype, [batch * kv_len], kv_heads, width, draw["kv_rows"])
            continue
        tokens, count = (
            (draw["page"], batch * -(-kv_len // draw["page"])) if draw["keys"] == "paged" else (kv_len, batch)
        )
        order = (0, 1, 2, 3) if draw["layout"] == "NHD" else (0, 2, 1, 3)
        made = tensor(name, kv_dtype, count, tokens, kv_heads, width, order=order, pad=16 * (draw["table_gap"] > 0))
        call[name] = {**made, **{part: [made[part][axis] for axis in order] for part in ("shape", "strides")}}
    if draw["keys"] != "ragged":
        call["kv_layout"] = draw["layout"]
    if draw["keys"] == "paged":
        call["page_table"] = tensor("page_table", "int32", batch, -(-kv_len // draw["page"]))
        call["page_table"]["strides"][0] += draw["table_gap"]
    if draw["keys"] in ("paged", "even with lengths"):
        call["seq_lens"] = tensor("seq_lens", draw["lengths"], batch)
    if draw["keys"] == "ragged":
        call["kv_cu_seq_lens"] = tensor("kv_cu_seq_lens", draw["lengths"], batch + 1)
    if not even:
        call["q_cu_seq_lens"] = tensor("q_cu_seq_lens", draw["lengths"], batch + 1)
        if draw["q_bound"]:
            call["max_q_len"] = draw["q_len"]
    made = draw["out_rows"] == "made"
    call["out"] = None
    if not made or draw["call"] == "plan":
        rows = "plain" if made else draw["out_rows"]
        call["out"] = rows_of_tokens("out", draw["dtype"], lead, heads, widths["v"], rows)
    if draw["lse_rows"]:
        call["lse"] = rows_of_tokens("lse", "float32", lead, heads, 0, draw["lse_rows"])
    if draw["sinks"]:
        shape = (heads,) if draw["sinks"] == "flat" else (kv_heads, draw["group"])
        call["sinks"] = tensor("sinks", "float32", *shape)
    for name in ("softmax_scale", "output_scale"):
        call[name] = scale(name, draw[name])
    for name in ("k_scale", "v_scale"):
        own, shapes = draw.get(name), {"one": (1,), "heads": (kv_heads,), "requests": (batch, kv_heads)}
        if own is not None:
            call[name] = tensor(name, "float32", *shapes[own]) if own in shapes else own
    steps: list[dict[str, Any]] = [{}]
    if draw["again"] == "moved":
        steps.append(moved(call, *call))
    elif draw["again"] == "caches moved":
        steps.append(moved(call, "k", "v"))
    elif draw["again"] == "numbers":
        steps.append({name: 0.31 for name in ("softmax_scale", "output_scale") if type(call[name]) is float})
    name = "plan_context_attention" if draw["call"] == "plan" else "context_attention"
    case: dict[str, Any] = {"on": draw["on"], "call": name, "with": call, "steps": steps}
    return {**case, **{option: draw[option] for option in ("workspace", "stream", "torch") if draw[option]}}
